"""What measure_parallel.py measures, on a tiny model: two ranks on the host, one on the simulated
device; bounds, shapes, and the watch over ranks that hang or fail."""

from __future__ import annotations

import doctest
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.pipelines import zoo_language
from tests.conftest import GPU_COUNT
from tests.patches.llm_families import tiny_lm

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import measure_parallel as script
from prefill_measures import parallel, parallel_shapes, parallel_times, parallel_watch
from prefill_measures.parallel_ranks import Job
from prefill_measures.parallel_sameness import Answer, Judge, Reference, Yardstick
from prefill_measures.ways import Run

REPOSITORY = Path(__file__).parents[2]
FEW = ["--batches", "8", "--every", "3", "--max-tokens", "64", "--max-requests", "4"]
SHORT = [*FEW, "--attention", "reference", "--tokens", "9", "--repeats", "2", "--warm-up", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bf16, its head tied to its embeddings, as Qwen3-4B's is. transformers 5.17
    splits vocabularies of even size only."""
    made = tmp_path_factory.mktemp("model")
    more: dict[str, Any] = {"tie_word_embeddings": True, "vocab_size": 98}
    tiny_lm("qwen3", dtype=torch.bfloat16, **more).save_pretrained(made)
    return made


@pytest.fixture
def path_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr("sys.argv", ["scripts/measure_parallel.py", "--folder", "x"])


def of_mode(facts: dict[str, Any], mode: str) -> dict[str, Any]:
    """The row of a mode."""
    (row,) = [row for row in facts["modes"] if row["mode"] == mode]
    found: dict[str, Any] = row
    return found


@pytest.mark.usefixtures("path_of_ranks")
def test_two_ranks_on_the_host_are_measured_to_the_end(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "parallel.json"
    arguments = ["--folder", str(folder), "--output", str(output), "--device", "cpu", *SHORT]
    code = script.main([*arguments, "--modes", "full,eager"])
    facts = json.loads(output.read_text())
    assert (code, facts["ended"], facts["ranks"]) == (0, "finished", 2), facts
    assert facts["command"] == "python scripts/measure_parallel.py --folder x"
    assert "where ranks were" not in facts
    assert facts["shapes"][0]["alike on all ranks"]
    (own,) = facts["transformers"]
    assert own["batches"] == [0, 3, 6]
    # In bf16 a sum over two ranks rounds otherwise than one over all columns: were the model not
    # split, its errors would be 0.
    assert 1e-3 < own["split from one GPU, relative"] < 0.1
    assert own["from float32, relative"].keys() == {"one GPU", "split"}
    for mode in ("full", "eager"):
        row = of_mode(facts, mode)
        assert (row["batches"], row["ran as"], row["declined"]) == (8, "eager", None)
        assert (row["replays"], row["eager passes"]) == (0, 8)
        assert 1e-3 < row["split from one GPU, relative"] < 0.1
        assert row["bound"] == pytest.approx(1.25 * own["split from one GPU, relative"])
        ratio = row["of transformers' batches"] / own["split from one GPU, relative"]
        assert row["times transformers'"] == pytest.approx(ratio)
        assert ratio < 1.25
        assert row["same token on all ranks"]
    assert of_mode(facts, "eager")["batches with the bits of full"] == 8
    (times,) = facts["times"]
    for way in ("transformers", "no graphs", "full", "full, one GPU"):
        low, high = times["spread, ms"][way]
        assert 0 < low <= times[f"{way}, ms"] <= high
    expected = times["transformers, ms"] / times["full, ms"]
    assert times["full, times transformers"] == pytest.approx(expected)


@pytest.mark.usefixtures("path_of_ranks")
def test_ranks_that_take_too_long_are_ended_and_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[Path] = []

    def watch(command: list[str], room: Path, limit: float) -> parallel_watch.End:
        rooms.append(room)
        assert (room / "model" / "config.json").exists(), "the zoo's model, for all ranks to load"
        return parallel_watch.watch(command, room, limit)

    monkeypatch.setattr(script, "watch", watch)
    monkeypatch.setattr(zoo_language, "build", lambda *_, **__: tiny_lm("qwen3"))
    output = tmp_path / "parallel.json"
    arguments = ["qwen3-4b", "--output", str(output), "--device", "cpu", *SHORT]
    assert script.main([*arguments, "--limit", "2"]) == 1
    facts = json.loads(output.read_text())
    assert facts["ended"].startswith("hung ")
    assert (facts["model"], facts["weights"]) == ("qwen3-4b", "random, float32")
    assert not running(str(rooms[0]))


def running(word: str) -> list[int]:
    """Processes whose command line has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if word.encode() in text:
            found.append(int(path.parent.name))
    return found


# Whoever starts it is no parent of the ranks' sessions, as with torch's launcher.
FAKE = """
    import signal, subprocess, sys, time
    from pathlib import Path
    from prefill_measures.parallel_watch import Note

    def waits_for_the_others():
        while True:
            time.sleep(60)

    room, rank, done = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if rank < 0:
        ranks = [
            subprocess.Popen([*sys.orig_argv[:-2], str(n), str(done + n)], start_new_session=True)
            for n in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note = Note(room, rank)
    note.begin("full: batches", mode="full", batch=0)
    if done < 0:
        note(failed=f"ValueError: {rank} is wrong")
        sys.exit(3)
    for batch in range(done):
        note(batch=batch + 1)
    waits_for_the_others()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A launcher of two ranks that know nothing of models; to it, the batches that rank 0 does."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "scripts"))
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE))
    return [sys.executable, str(path), str(tmp_path), "-1"]


def test_a_hang_is_told_by_the_rank_that_is_behind(fake: list[str], tmp_path: Path) -> None:
    end = parallel_watch.watch([*fake, "3"], tmp_path, 3)
    assert end.words == "hung after batch 3 in mode full (full: batches)"
    assert not end.well
    assert [note["batch"] for note in end.ranks] == [3, 4]
    assert all("waits_for_the_others" in "\n".join(note["stack"]) for note in end.ranks)
    assert not running(fake[1]), "also ranks that do not listen are ended"


def test_a_failure_is_told_by_rank(fake: list[str], tmp_path: Path) -> None:
    end = parallel_watch.watch([*fake, "-5"], tmp_path, 30)
    assert end.words == "failed: rank 0: ValueError: 0 is wrong; rank 1: ValueError: 1 is wrong"


def test_a_launcher_that_ends_without_a_word_has_failed(tmp_path: Path) -> None:
    end = parallel_watch.watch([sys.executable, "-c", "raise SystemExit(7)"], tmp_path, 30)
    assert end.words.endswith("status 7")


def test_who_is_interrupted_leaves_no_ranks_behind(
    fake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        parallel_watch._until(lambda: len(parallel_watch.notes(tmp_path)) == 2, 20)
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel_watch, "_where_it_hung", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_watch.watch([*fake, "3"], tmp_path, 0.2)
    assert not running(fake[1])


def test_a_note_of_one_phase_is_none_of_the_next(tmp_path: Path) -> None:
    note = parallel_watch.Note(tmp_path, 5)
    note.begin("one", mode="full", batch=3)
    note.begin("other")
    (found,) = parallel_watch.notes(tmp_path)
    assert found == {"rank": 5, "pid": os.getpid(), "step": 2, "phase": "other"}
    assert parallel_watch._where_it_hung([found]) == "hung in other"
    assert parallel_watch._where_it_hung([]) == "hung while starting"


def test_shapes_cover_the_edges_and_are_the_same_for_the_same_seed() -> None:
    assert doctest.testmod(parallel_shapes).failed == 0
    drawn = parallel_shapes.shapes(200, 16, 2048, 0)
    assert drawn == parallel_shapes.shapes(200, 16, 2048, 0)
    assert drawn != parallel_shapes.shapes(200, 16, 2048, 1)
    assert drawn[:3] == parallel_shapes.shapes(3, 16, 2048, 0)
    assert max(max(lengths) for lengths in drawn) == 2048
    assert min(min(lengths) for lengths in drawn) == 1
    crowded = [lengths for lengths in drawn if len(lengths) > 16]
    long = [lengths for lengths in drawn if sum(lengths) > 2048]
    assert 10 <= len(crowded) <= 15
    assert 10 <= len(long) <= 15
    assert {len(lengths) for lengths in drawn} >= {*range(1, 17)}
    buckets = [sum(sum(s) <= size for s in drawn) for size in (64, 256, 1024)]
    assert buckets[0] > 20 and buckets[1] - buckets[0] > 20 and buckets[2] - buckets[1] > 20
    ordinary = [parallel_shapes.fits(s, "full", 16, 2048) for s in drawn[::20]]
    assert all(ordinary), "what transformers measures are batches of graphs"


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_shapes_of_few_slots_and_tokens(slots: int) -> None:
    drawn = parallel_shapes.shapes(60, slots, 2 * slots, 3)
    assert all(1 <= min(lengths) <= max(lengths) <= 2 * slots for lengths in drawn)
    assert all(len(lengths) <= max(2 * slots, 2) for lengths in drawn)


class Alone:
    """The only rank there is."""

    rank, size, first = 0, 1, True

    def meet(self) -> None: ...

    def gather(self, mine: Any) -> list[Any]:
        return [mine]


def job_of(arguments: list[str], folder: Path, room: Path) -> Job:
    """As the script makes it."""
    given = ["--folder", str(folder), "--output", str(room / "out.json"), *arguments]
    return script.job(script.parser().parse_args(given), folder, room, {})


@pytest.fixture
def alone(
    sim: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[parallel.Measurement]:
    """A measurement on the simulated device, where there are graphs; both models are the same."""
    monkeypatch.setattr(parallel, "load", lambda *_, **__: tiny_lm("qwen3", sim))
    job, threads = job_of(SHORT, tmp_path, tmp_path), torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other longer than they compute
    yield parallel.Measurement(job, Alone(), parallel_watch.Note(tmp_path, 0))  # type: ignore[arg-type]
    torch.set_num_threads(threads)


def test_graphs_are_captured_before_batches_and_every_batch_that_fits_is_replayed(
    alone: parallel.Measurement, tmp_path: Path
) -> None:
    alone.run()
    facts = json.loads((tmp_path / "out.json").read_text())
    drawn = alone.shapes
    for mode, fitting in (("breakable", 7), ("full", 5), ("eager", 0)):
        row = of_mode(facts, mode)
        assert (row["ran as"], row["captures"]) == (mode, int(mode != "eager"))
        assert row["replays"] == row["replays expected"] == fitting
        assert row["replays"] + row["eager passes"] == len(drawn) == 8
        assert row["split from one GPU, relative"] == 0
    assert of_mode(facts, "full")["batches with the bits of breakable"] == 8
    assert "not replayed" not in facts["times"][0]


def test_a_missing_replay_is_a_failure(alone: parallel.Measurement, tmp_path: Path) -> None:
    alone.job.modes[:] = ["full"]
    alone.job.tokens.clear()
    alone._expected = lambda mode: 6  # type: ignore[method-assign]
    alone.run()
    (row,) = json.loads((tmp_path / "out.json").read_text())["modes"]
    assert row["failed"] == ["5 replays, not 6"]


def test_ranks_that_drew_other_batches_do_not_begin(alone: parallel.Measurement) -> None:
    alone.ranks.gather = lambda mine: [mine, "other"]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="different batches"):
        alone.run()


def answer(shift: float = 0.0, token: int = 2) -> Answer:
    """Hidden states off by a share, and logits whose best is `token`, 2 or 3, by a gap of 1."""
    logits = torch.zeros(1, 6)
    logits[0, 2:4], logits[0, token] = 4.0, 5.0
    return Answer(torch.full((3, 4), 1 + shift), logits)


def within(error: float) -> Yardstick:
    """Transformers is off by so much in hidden states, and by as much in logits."""
    whole = answer()
    split = Answer(whole.hidden + error, whole.logits + error)
    return Yardstick({0: Reference(whole, split)})


def test_hidden_states_may_be_off_by_the_bound_and_no_more() -> None:
    for shift, fine in ((0.0, True), (0.012, True), (0.013, False), (float("nan"), False)):
        judge = Judge(within(0.01))
        judge.add(0, answer(shift), answer())
        figures = judge.figures()
        assert (not figures["failed"]) == fine, shift
        assert figures["bound"] == pytest.approx(0.0125)
        assert figures["same token, of 1"] == 1


def test_float32_is_a_bound_of_its_own() -> None:
    exact = answer(0.02)
    measure = Yardstick({0: Reference(answer(), answer(), exact)})
    assert measure.figures()["from float32, relative"]["one GPU"] == pytest.approx(0.02 / 1.02)
    for shift, fine in ((0.0, True), (-0.01, False)):  # both of ours the same, farther off
        judge = Judge(measure)
        judge.add(0, answer(shift), answer(shift))
        assert (not judge.figures()["failed"]) == fine


def test_tokens_may_differ_only_where_rounding_explains_the_gap() -> None:
    for error, fine in ((0.5, True), (0.3, False)):  # a gap of 1 takes 2 · 1.25 · 0.4
        judge = Judge(within(error))
        judge.add(0, answer(), answer())
        judge.add(7, answer(token=3), answer())
        figures = judge.figures()
        assert figures["same token, of 1"] == 0.5
        (other,) = figures["widest gaps of other tokens"]
        assert figures["other tokens"] == 1
        assert other == {"batch": 7, "prompt": 0, "gap to it": 1, "top-2 gap": 1, "error": 1}
        assert (not figures["failed"]) == fine


def test_logits_that_are_not_finite_are_a_failure() -> None:
    judge = Judge(within(0.01))
    wrong = answer()
    wrong.logits[0, 5] = float("nan")
    judge.add(3, wrong, answer())
    assert "logits are not finite" in judge.figures()["failed"]


def test_ways_take_turns_and_ranks_meet_before_each() -> None:
    seen: list[str] = []

    def way(name: str) -> Run:
        def run(prompts: list[list[int]]) -> torch.Tensor:
            seen.append(f"{name}{prompts[0][0]}")
            return torch.zeros(1)

        return run

    rounds = [[[0]], [[1]]]
    runs = {name: way(name) for name in "ab"}
    found = parallel_times.in_turns(runs, rounds, torch.device("cpu"), lambda: seen.append("-"))
    assert seen == ["-", "a0", "-", "b0", "-", "b1", "-", "a1"]
    assert [len(samples) for samples in found.values()] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "one of MODEL and --folder"),
        (["none"], "the zoo has qwen3-4b"),
        (["qwen3-4b", "--folder", "x"], "one of MODEL and --folder"),
        (["qwen3-4b", "--modes", "fast"], "breakable, full, eager"),
        (["qwen3-4b", "--batches", "0"], "above 0"),
        (["qwen3-4b", "--ranks", "1,2"], "one number"),
        (["qwen3-4b", "--max-tokens", "20"], "--max-requests=16"),
        (["qwen3-4b", "--tokens", "4096"], "--max-tokens=2048"),
        (["qwen3-4b", "--output", "no/such/x.json"], "does not exist"),
        (["qwen3-4b", "--ranks", "99"], "this machine has"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["--output", "x.json", *arguments])
    assert complaint in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(GPU_COUNT < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("path_of_ranks")
def test_two_gpus_replay_every_batch_that_fits(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "parallel.json"
    code = script.main(["--folder", str(folder), "--output", str(output), *SHORT])
    facts = json.loads(output.read_text())
    assert (code, facts["ended"]) == (0, "finished"), facts
    for row in facts["modes"]:
        assert row["replays"] == row["replays expected"], row
    assert of_mode(facts, "full")["replays"] == 5
    assert "not replayed" not in facts["times"][0]
