"""What measure_prefill.py measures, on a tiny model: ways in turns, JSON, early output, limits."""

from __future__ import annotations

import doctest
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.pipelines import zoo_language
from accel.prefill.buckets import Ladder
from tests.patches.llm_families import prompts_of, tiny_lm

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import measure_prefill as script
from prefill_measures import breakdown, capturing, memory, piecewise, timing, ways
from prefill_measures.prompts import one_token_aside, random_prompts

Measure = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Runs the script on a tiny model of a family: its exit status and its file."""
    monkeypatch.setattr("sys.argv", ["scripts/measure_prefill.py", "qwen3-4b"])

    def run(family: str, device: torch.device, *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(zoo_language, "build", lambda *_, **__: tiny_lm(family, device))
        output = tmp_path / "prefill.json"
        common = ["qwen3-4b", "--device", str(device), "--output", str(output)]
        few = ["--repeats", "3", "--warm-up", "1", "--max-requests", "4", "--compiler", "none"]
        code = script.main([*common, *few, "--attention", "reference", *arguments])
        return code, json.loads(output.read_text())

    return run


def test_rows_tell_times_and_what_they_are_to_each_other(
    sim: torch.device, measure: Measure
) -> None:
    code, facts = measure("qwen3", sim, "--tokens", "70,5", "--batch", "9,30,1")
    assert code == 0
    assert [(row["tokens"], row["requests"], row["bucket"]) for row in facts["rows"]] == [
        (5, 1, 64),
        (70, 1, 70),  # the largest batch is the ceiling
        (40, 3, 64),
    ]
    for row in facts["rows"]:
        walls = {way: row[f"{way}, ms"] for way in ways.WAYS}
        assert all(low <= walls[way] <= high for way, (low, high) in row["spread, ms"].items())
        assert all(0 < row["host done, ms"][way] <= row["spread, ms"][way][1] for way in walls)
        for way in ("no graphs", "breakable", "full"):
            ratio = walls["transformers"] / walls[way]
            assert row[f"{way}, times transformers"] == pytest.approx(ratio)
        expected = walls["no graphs"] / walls["full"]
        assert row["full, times no graphs"] == pytest.approx(expected)
        assert "not replayed" not in row
    assert facts["command"].startswith("python scripts/measure_prefill.py")
    assert {"date", "processor", "device", "versions", "flashinfer"} <= facts.keys()
    assert facts["left out"] == {}
    assert facts["parameters"] > 0


def test_every_row_is_printed_and_written_before_the_next_begins(
    sim: torch.device, measure: Measure, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    row = timing.row

    def cut_off(*arguments: Any) -> dict[str, Any]:
        if (tmp_path / "prefill.json").exists():
            raise KeyboardInterrupt
        return row(*arguments)

    monkeypatch.setattr(timing, "row", cut_off)
    with pytest.raises(KeyboardInterrupt):
        measure("qwen3", sim, "--tokens", "3,4,5", "--ways", "transformers,full")
    assert capsys.readouterr().out.startswith('rows: {"tokens": 3,')
    (kept,) = json.loads((tmp_path / "prefill.json").read_text())["rows"]
    assert kept["full, ms"] > 0
    assert "breakable, ms" not in kept


def test_between_buckets_means_one_token_more_than_each(
    sim: torch.device, measure: Measure
) -> None:
    _, facts = measure(
        "qwen3", sim, "--tokens", "7", "--between", "--max-tokens", "150", "--ways", "full"
    )
    found = [(row["tokens"], row["bucket"]) for row in facts["rows"]]
    assert found == [(7, 64), (65, 128), (129, 150)]


def test_ways_take_turns_and_each_begins_a_round() -> None:
    seen: list[tuple[str, int]] = []

    def way(name: str) -> ways.Run:
        return lambda prompts: seen.append((name, prompts[0][0])) or torch.zeros(1)

    rounds = [[[number]] for number in range(3)]
    found = timing.in_turns({n: way(n) for n in "ab"}, rounds, torch.device("cpu"))
    assert seen[::2] == seen[1::2]  # what lies beside, then what is timed
    assert seen[::2] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [len(samples) for samples in found.values()] == [3, 3]


def test_lengths_change_between_what_is_timed() -> None:
    """A plan for attention that is left from the same lengths costs nothing."""
    ladder = Ladder(256)
    for lengths, beside in (([5], [4]), ([1], [2]), ([65], [66]), ([3, 200], [3, 199])):
        prompts = random_prompts(lengths, 97, 0)
        aside = one_token_aside(prompts, ladder)
        assert list(map(len, aside)) == beside
        assert ladder.bucket(sum(lengths)) == ladder.bucket(sum(beside))


def test_tokens_are_random_and_new_in_every_round(sim: torch.device) -> None:
    options = script.parser().parse_args(["qwen3-4b", "--output", "x"])
    session = script.Session.__new__(script.Session)
    session.options, session.model = options, tiny_lm("qwen3")
    one, other = session.prompts([50], 0), session.prompts([50], 1)
    assert one == session.prompts([50], 0) != other
    assert len(set(one[0])) > 20


def test_a_way_that_fails_is_told_and_the_others_go_on(sim: torch.device) -> None:
    model = tiny_lm("qwen3", sim)
    some = ways.Ways(model, ["transformers", "no graphs"], ways.Options(64, 2, "reference"))
    model.forward = None  # the runner's head needs it no less, so it fails, too, but for itself
    row = timing.row(some, [prompts_of(5)], [prompts_of(5)], sim, lambda prompts: prompts)
    assert row["failed"].keys() == {"transformers", "no graphs"}
    assert "TypeError" in row["failed"]["transformers"]


def test_an_eager_pass_is_no_figure_of_a_graph(sim: torch.device) -> None:
    model = tiny_lm("qwen3", sim)
    some = ways.Ways(model, ["full"], ways.Options(64, 2, "reference"))
    three = [prompts_of(5, 5, 5)]
    row = timing.row(some, three, three, sim, lambda prompts: prompts)
    assert "max_requests=2" in row["not replayed"]["full"]
    some.close()


def test_modes_that_a_model_has_not_are_left_out(sim: torch.device, measure: Measure) -> None:
    code, facts = measure("glm_moe_dsa", sim, "--tokens", "5", "--check")
    assert code == 0
    assert facts["left out"].keys() == {"breakable"}
    assert "full, ms" in facts["rows"][0]
    assert "breakable, ms" not in facts["rows"][0]
    assert all(row["full = no graphs"] for row in facts["check"])


def test_check_compares_bits_and_fails_where_they_differ(
    sim: torch.device, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("qwen3", sim, "--no-times", "--check", "--tokens", "70", "--batch", "5,1")
    code, facts = measure(*arguments)
    assert code == 0
    assert "rows" not in facts
    for row in facts["check"]:
        assert row["breakable = no graphs"] and row["full = no graphs"] and row["finite"]
        assert row["no graphs from transformers, relative"] < 1e-5

    class Wrong(ways.Ways):
        """Its full runner adds a little."""

        def _open(self, name: str, options: ways.Options) -> None:
            super()._open(name, options)
            if name == "full":
                right = self.runners[name]
                self.runners[name] = lambda prompts: Shifted(right(prompts))  # type: ignore[assignment]

        attention = "reference"

        def close(self) -> None: ...

    class Shifted:
        def __init__(self, result: Any) -> None:
            self.logits, self.hidden = result.logits, lambda i: result.hidden(i) + 1e-3

    monkeypatch.setattr(script, "Ways", Wrong)
    code, facts = measure(*arguments)
    assert code == 1
    row = facts["check"][0]
    assert not row["full = no graphs"]
    assert row["breakable = no graphs"]
    assert row["full from no graphs, relative"] > 0


def test_captures_of_the_whole_ladder_are_timed_and_sized(
    sim: torch.device, measure: Measure
) -> None:
    code, facts = measure("qwen3", sim, "--no-times", "--capture", "--max-tokens", "150")
    assert code == 0
    breakable, full = facts["capture"]
    assert breakable["buckets"] == full["buckets"] == [64, 128, 150]
    assert (breakable["segments each"], full["segments each"]) == (3, 1)
    assert breakable["seconds, again"] > 0
    assert breakable["memory, MiB"]["hidden states"] > 0
    lines = facts["lines of code"][0]
    ours = sum(n for name, n in lines.items() if name.startswith("graphs"))
    assert 1000 < ours < lines["compiler: torch._inductor"]


def test_lines_of_code_are_neither_blank_nor_comment_nor_docstring(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text('"""A\nB"""\n\nx = 1  # why\n# what\ndef f():\n    """C"""\n    return x\n')
    assert capturing.lines_of_code(path) == 3


class Reading(memory.Meter):
    """Counts starts, and reads more every time."""

    starts = 0

    def start(self) -> None:
        self.starts += 1

    def read(self) -> dict[str, float]:
        return {"peak reserved, MiB": float(self.starts)}


def test_memory_is_read_without_graphs_and_for_every_ceiling(sim: torch.device) -> None:
    options = ways.Options(128, 4, "reference")
    model = tiny_lm("qwen3", sim)
    rows = list(memory.memory(model, ["breakable"], options, [64], Reading(sim)))
    found = [(row["mode"], row["graphs up to"], row["graphs"]) for row in rows]
    assert found == [
        ("eager", None, 0),
        ("breakable", 128, 2),
        ("breakable", 64, 1),
    ]
    assert [row["peak reserved, MiB, over no graphs"] for row in rows[1:]] == [1, 2]


def test_a_chunk_in_too_many_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1024.*16 requests, --max-requests=4"):
        memory.batches(1024, 64, 4)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """The compiler remembers, from other tests too, what it met with other sizes."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiler_of(seen: list[Any]) -> Callable[..., Any]:
    """A compiler that compiles nothing, and counts the pieces."""

    def backend(graph: Any, inputs: Any, **_: Any) -> Any:
        seen.append(graph)
        return graph.forward

    return backend


def test_the_compilers_pieces_lie_between_attention_calls() -> None:
    model, seen = tiny_lm("qwen3", num_hidden_layers=3), []
    found = piecewise.compiling(model, [5, 9], 100, backend=compiler_of(seen))
    assert "failed" not in found, found
    assert [entry["tokens"] for entry in found["lengths done"]] == [9, 5]
    assert found["a forward after it, ms"].keys() == {5, 9}
    assert found["seconds"] > 0
    assert found["pieces compiled"] == len(seen)
    assert 4 <= len(seen) <= 6, "once for all layers and lengths: norm, projections, the way out"
    called = [node.target for graph in seen for node in graph.graph.nodes]
    assert torch._C._nn.linear in called
    assert torch._C._nn.scaled_dot_product_attention not in called
    given = [node for graph in seen for node in graph.graph.nodes if node.op == "placeholder"]
    assert not [node.name for node in given if "epsilon" in node.name], "it would lie on the host"
    assert model.config._attn_implementation == "sdpa"


def test_the_compiler_computes_what_transformers_does() -> None:
    model = tiny_lm("qwen3")
    ids = torch.tensor(prompts_of(9))
    with piecewise.compiled(model, True, compiler_of([])) as run:
        found = run(ids)
    with torch.no_grad():
        expected = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_compiler_that_takes_too_long_is_stopped_and_told() -> None:
    def slow(graph: Any, inputs: Any, **_: Any) -> Any:
        time.sleep(30)

    found = piecewise.compiling(tiny_lm("qwen3"), [5], 0.5, backend=slow)
    assert found["seconds"] == "more than 0.5"
    assert found["lengths done"] == []


def test_device_time_is_told_by_kind_of_kernel() -> None:
    assert doctest.testmod(breakdown).failed == 0
    assert doctest.testmod(memory).failed == 0
    kernels = [
        SimpleNamespace(key=key, self_device_time_total=us, count=n)
        for key, us, n in (("nvjet_x", 2000, 3), ("flash_fwd", 500, 1), ("add", 250, 6))
    ]
    found = breakdown.by_kind(kernels)
    assert found["device busy, ms"] == 2.75
    assert found["kernels"] == 10
    assert found["by kind, ms"]["attention"] == 0.5
    assert next(iter(found["longest, ms"])) == "nvjet_x"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", "0"], "above 0"),
        (["--tokens", "many"], "above 0"),
        (["--ways", "fast"], "there is no fast"),
        (["--memory", "--device", "cpu"], "cannot be read"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["qwen3-4b", "--output", "x.json", *arguments])
    assert complaint in capsys.readouterr().err


@pytest.mark.gpu
def test_everything_is_measured_on_a_gpu(measure: Measure) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    arguments = ("--tokens", "5,70", "--max-tokens", "128", "--breakdown", "--check", "--memory")
    code, facts = measure("qwen3", torch.device("cuda:0"), *arguments, "--capture")
    assert code == 0, facts
    assert facts["rows"][0]["breakdown"]["full"]["kernels"] > 0
    assert len(facts["memory"]) == 7
