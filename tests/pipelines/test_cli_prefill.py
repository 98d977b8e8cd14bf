"""`accel prefill` on the machine that the tests run on: answers, scores, refusals."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from accel.pipelines import prefilling
from accel.pipelines.demo_lm.corpus import held_out_captions, shuffled
from tests.pipelines.conftest import HERE

Cli = Callable[..., Any]

FEW = ("--max-tokens", "256", "--repeats", "1")


def _json(done: Any) -> dict[str, Any]:
    assert (done.code, done.remarks()) == (0, []), done.err
    result: dict[str, Any] = json.loads(done.out)
    return result


def test_a_prompt_gets_its_likely_next_tokens(accel_cli: Cli) -> None:
    done = accel_cli("prefill", "a red circle on a blue", *FEW, "--top", "3")
    assert (done.code, done.remarks()) == (0, []), done.err
    heading, *lines = done.out.splitlines()
    assert heading == "a red circle on a blue (7 tokens)"
    assert any(line.endswith("' background'") for line in lines[:3])
    assert "1 prompt, 7 tokens, 1 batch; demo, " in done.out


def test_json_is_all_there_is_on_stdout(accel_cli: Cli) -> None:
    result = _json(accel_cli("prefill", "a red", "two big", *FEW, "--json"))
    assert [p["prompt"] for p in result["prompts"]] == ["a red", "two big"]
    for prompt in result["prompts"]:
        values = [token["log_probability"] for token in prompt["next"]]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert 0 < sum(map(math.exp, values)) <= 1
    assert len(result["prefill"]["seconds"]) == 1
    assert result["prefill"]["tokens_per_s"] == pytest.approx(
        result["tokens"] / result["prefill"]["median_s"]
    )
    assert result["own"] is None
    assert result["report"]["declined"] is None


def test_a_caption_scores_above_its_shuffled_words(accel_cli: Cli) -> None:
    rng, texts = Random(2), list(islice(held_out_captions(21), 60))
    Path("texts").write_text("\n".join([*texts, *(shuffled(t, rng) for t in texts)]))
    result = _json(accel_cli("prefill", "--prompts", "texts", "--score", *FEW, "--json"))
    sums = [prompt["sum"] for prompt in result["prompts"]]
    above = sum(own > other for own, other in zip(sums[:60], sums[60:], strict=True))
    assert above >= 57
    assert result["batches"] > 1


def test_a_score_is_the_sum_of_its_tokens(accel_cli: Cli) -> None:
    result = _json(accel_cli("prefill", "a red circle", *FEW, "--score", "--json"))
    (prompt,) = result["prompts"]
    none, *values = [token["log_probability"] for token in prompt["scores"]]
    assert none is None
    assert prompt["sum"] == pytest.approx(sum(values))
    assert prompt["mean"] == pytest.approx(sum(values) / 3)
    assert "".join(token["token"] for token in prompt["scores"][1:]) == " a red circle"


def test_scores_are_shown_token_by_token(accel_cli: Cli) -> None:
    done = accel_cli("prefill", "a red circle", *FEW, "--score")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "a red circle (4 tokens)"
    assert lines[1].split() == ["-", "'<|endoftext|>'"]
    assert lines[4].endswith("' circle'")
    assert "mean" in lines[5] and "over 3 tokens, perplexity " in lines[5]


@pytest.mark.parametrize("arguments", [("-",), ("--prompts", "-")])
def test_prompts_come_from_stdin(
    accel_cli: Cli, piped: Callable[[str], None], arguments: tuple[str, ...]
) -> None:
    piped("a red\n\ntwo big\n")
    result = _json(accel_cli("prefill", *arguments, *FEW, "--json"))
    assert [p["prompt"] for p in result["prompts"]] == ["a red", "two big"]


@pytest.mark.parametrize("score", [(), ("--score",)])
def test_the_models_own_forward_agrees(accel_cli: Cli, score: tuple[str, ...]) -> None:
    prompts = ("a red circle on a", "two big blue stars", "a")
    done = accel_cli(
        *("prefill", *prompts, *FEW, *score, "--compare", "--dtype", "float32", "--json"),
        *("--attention", "reference"),
    )
    result = _json(done)
    assert result["difference"]["largest_log_probability"] < 1e-3
    if HERE == "cuda":
        assert result["inactive"] is None
        assert result["ratio"] == pytest.approx(
            result["own"]["median_s"] / result["prefill"]["median_s"]
        )
    else:
        assert result["ratio"] is None
        assert result["inactive"].startswith("no CUDA GPU here")
    if not score:
        assert result["difference"]["same_next_token"] == 3


def test_a_comparison_is_shown(accel_cli: Cli) -> None:
    done = accel_cli("prefill", "a red circle", *FEW, "--compare")
    assert done.code == 0, done.err
    assert "the model's own forward" in done.out
    assert "same most likely token: 1 of 1 prompt" in done.out
    assert ("own / prefill: " in done.out) == (HERE == "cuda")


@pytest.mark.parametrize("few", [FEW, (*FEW, "--mode", "eager")])
def test_on_a_cpu_a_comparison_has_no_ratio_and_says_why_packing_may_lose(
    accel_cli: Cli, few: tuple[str, ...]
) -> None:
    done = accel_cli("prefill", "a red circle", *few, "--compare", "--device", "cpu")
    assert "own / prefill: " not in done.out
    lines = done.out.splitlines()
    assert any(line.startswith("not accelerated here: ") for line in lines)
    (why,) = [line for line in lines if "can be slower than the model's own forward" in line]
    assert "padded to a bucket, 64 tokens or more" in why


@pytest.mark.parametrize("mode", ["breakable", "full", "eager"])
def test_every_mode_says_the_same(accel_cli: Cli, mode: str) -> None:
    done, eager = (
        accel_cli("prefill", "a red circle", "a", *FEW, "--mode", name, "--json")
        for name in (mode, "eager")
    )
    assert done.code == 0, done.err
    assert (done.err.splitlines() if mode == "eager" else done.remarks()) == []
    assert json.loads(done.out)["prompts"] == json.loads(eager.out)["prompts"]


def test_full_takes_as_many_prompts_at_once_as_it_has_slots(accel_cli: Cli) -> None:
    few = ("prefill", "a", "b", "c", *FEW, "--json", "--max-requests", "2")
    assert json.loads(accel_cli(*few, "--mode", "full").out)["batches"] == 2
    assert json.loads(accel_cli(*few, "--mode", "breakable").out)["batches"] == 1


BAD = {
    "no prompt": ((), "no prompt: give one in quotes"),
    "empty": (("",), "the prompt is empty"),
    "twice": (("x", "--prompts", "y"), "prompts come as arguments or from --prompts, not both"),
    "no file": (("--prompts", "y"), "--prompts y: cannot be read: No such file or directory"),
    "a folder": (("--prompts", "."), "--prompts .: cannot be read: Is a directory"),
    "no text": (("--prompts", "bytes"), "--prompts bytes: not a text file"),
    "empty file": (("--prompts", "nothing"), "--prompts nothing: no prompt in it"),
    "too long": (
        ("a b c", "--max-tokens", "3", "--mode", "eager"),
        "4 tokens, the limit is 3: --max-tokens raises",
    ),
    "no such model": (
        ("x", "--model", "nowhere"),
        "no such model folder: nowhere (a model is demo, ",
    ),
    "no such mode": (("x", "--mode", "fast"), "--mode fast: choose from breakable, full, eager"),
    "no such attention": (("x", "--attention", "y"), "--attention y: choose from auto, reference"),
    "no such dtype": (("x", "--dtype", "int3"), "--dtype int3: choose from auto, float32"),
    "no such device": (("x", "--device", "abacus"), "--device abacus: no such device"),
    "no tokens": (("x", "--max-tokens", "0"), "accel: --max-tokens 0: this has to be at least 1"),
    "no requests": (("x", "--max-requests", "0"), "--max-requests 0: this has to be at least 1"),
    "none on top": (("x", "--top", "0"), "--top 0: this has to be at least 1"),
    "no rounds": (("x", "--repeats", "0"), "--repeats 0: this has to be at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(accel_cli: Cli, name: str) -> None:
    Path("bytes").write_bytes(b"\xff\xfe\xff")
    Path("nothing").write_text("\n", encoding="utf-8")
    arguments, words = BAD[name]
    done = accel_cli("prefill", *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.complaint


@pytest.mark.skipif(HERE == "cuda", reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(accel_cli: Cli) -> None:
    done = accel_cli("prefill", "x", "--device", "cuda")
    assert done.code == 2
    assert "--device cpu runs without" in done.complaint


def test_a_prompt_that_is_too_long_is_told_by_its_number(
    accel_cli: Cli, piped: Callable[[str], None]
) -> None:
    piped("a\n\na b c\nb\n")
    for prompts in (("a", "a b c", "b"), ("-",)):
        done = accel_cli("prefill", *prompts, "--max-tokens", "3", "--mode", "eager")
        assert done.code == 2
        assert done.complaint.startswith("accel: prompt 2 of 3 has 4 tokens, the limit is 3: ")


def _short_sighted(folder: Path) -> Path:
    """A language model whose packing ends at 8 positions, though its configuration has more."""
    from transformers import AutoTokenizer, Phi3Config, Phi3ForCausalLM

    from accel.pipelines.demo_lm import demo_lm_folder

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=768,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=8,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 8,
        },
    )
    Phi3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_lm_folder()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("score", [(), ("--score",)])
def test_a_prompt_that_only_the_runner_refuses_is_told_by_its_number_too(
    accel_cli: Cli, tmp_path: Path, score: tuple[str, ...]
) -> None:
    folder = _short_sighted(tmp_path / "short-sighted")
    prompts = ("a b c d e", "a b c d e f g h i j", "a")  # 6 tokens, 11 and 2: a batch each
    few = ("--max-tokens", "11", "--mode", "eager", *score)
    done = accel_cli("prefill", *prompts, "-m", folder, *few)
    assert done.code == 2, done.err
    assert done.complaint.endswith(": prompt 2 of 3 has 11 tokens, the model takes 8")


def test_a_picture_model_is_told_with_the_command_that_takes_it(
    accel_cli: Cli, saved: Callable[[str], Path]
) -> None:
    from accel.pipelines.models import ZOO

    for name in ZOO:
        done = accel_cli("prefill", "a", "--model", name)
        assert (done.code, done.out) == (2, "")
        assert f"--model {name} is no causal LM but a picture model" in done.complaint
        assert "accel bench" in done.complaint
    done = accel_cli("prefill", "a", "--model", saved("sd15"))
    assert (done.code, done.out) == (2, "")
    assert "accel generate and accel bench take this picture model" in done.complaint


@pytest.mark.skipif(HERE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_what_was_asked_for_and_why_it_is_eager(accel_cli: Cli) -> None:
    result = _json(accel_cli("prefill", "a", *FEW, "--mode", "full", "--json"))
    report = result["report"]
    assert (report["asked"], report["mode"]) == ("full", "eager")
    assert report["reasons"] == {"nothing can be captured on cpu": report["eager_passes"]}
    assert report["notes"] == []
    shown = accel_cli("prefill", "a", *FEW, "--mode", "full").out
    assert "prefill, eager instead of full, attention reference" in shown
    assert shown.count("not accelerated here: no CUDA GPU here") == 1
    asked = accel_cli("prefill", "a", *FEW, "--mode", "eager").out
    assert "prefill, eager, attention reference" in asked
    assert "not accelerated here" not in asked


def test_what_the_runner_refuses_is_told_in_options(
    accel_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "capturing to max_tokens=256 takes about 9 bytes, 3 are free: lower max_tokens="

    def refuse(*arguments: Any) -> Any:
        raise ValueError(said)

    monkeypatch.setattr(prefilling, "_ways", refuse)
    done = accel_cli("prefill", "x", *FEW, "--mode", "eager")
    assert done.code == 2
    told = said.replace("max_tokens=256", "--max-tokens 256").replace("max_tokens=", "--max-tokens")
    assert done.complaint == f"accel: demo: {told}"


@pytest.mark.skipif(HERE == "cuda", reason="there is a GPU")
def test_attention_that_does_not_run_here_is_told(accel_cli: Cli) -> None:
    done = accel_cli("prefill", "x", *FEW, "--attention", "torch", "--mode", "eager")
    assert done.code == 2
    assert done.complaint.startswith("accel: --attention torch: ")
    assert "needs CUDA" in done.complaint


def test_flashinfer_that_is_not_there_is_told(
    accel_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = accel_cli("prefill", "x", "--attention", "flashinfer")
    assert done.code == 2
    assert done.complaint.startswith("accel: --attention flashinfer: it is not installed (pip")


def test_out_of_memory_says_what_to_lower(accel_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(prefilling, "_ways", full)
    done = accel_cli("prefill", "x", *FEW)
    assert done.code == 1
    assert "lower --max-tokens (--plan says what has room)" in done.err.splitlines()[-1]


def test_memory_of_the_runner_is_given_back(
    accel_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    made = prefilling._runner

    def watched(*arguments: Any) -> Any:
        runner = made(*arguments)
        close = runner.close
        monkeypatch.setattr(runner, "close", lambda: (closed.append(True), close()))
        return runner

    monkeypatch.setattr(prefilling, "_runner", watched)
    assert accel_cli("prefill", "x", *FEW).code == 0
    assert closed == [True]


def test_a_plan_is_told_without_prompts(accel_cli: Cli) -> None:
    done = accel_cli("prefill", "--plan", "--max-tokens", "128")
    assert (done.code, done.err) == (0, "")
    asked = "bfloat16: weights 2.1 MiB" if HERE == "cuda" else "float32: weights 4.1 MiB"
    assert done.out.startswith(f"demo, {asked}")
    assert "64 tokens" in done.out and "128 tokens" in done.out
    last = done.out.splitlines()[-1]
    assert last.endswith("room for all of them" if HERE == "cuda" else "is told on a GPU")


def test_a_plan_is_for_the_precision_that_a_run_would_take(accel_cli: Cli) -> None:
    few = ("prefill", "--max-tokens", "64", "--mode", "full", "--json")
    for asked in ((), ("--dtype", "bfloat16"), ("--dtype", "float32"), ("--dtype", "float16")):
        plan = json.loads(accel_cli(*few, "--plan", *asked).out)
        run = json.loads(accel_cli(*few, "a red", "--repeats", "1", *asked).out)
        assert plan["dtype"] == run["dtype"]
        size = 4 if plan["dtype"] == "float32" else 2
        assert plan["weight_bytes"] == pytest.approx(1_083_008 * size, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a red circle",), "leave out prompts, or --plan"),
        (("",), "leave out prompts, or --plan"),
        (("-",), "leave out prompts, or --plan"),
        (("--prompts", "missing.txt"), "leave out prompts, or --plan"),
        (("--compare",), "leave out --compare, or --plan"),
        (("--score", "x", "--top", "3"), "leave out prompts, --score, --top, or --plan"),
        (("--repeats", "2"), "leave out --repeats, or --plan"),
        (("--mode", "eager"), "--mode eager has none: leave out one of them"),
    ],
)
def test_a_plan_refuses_what_it_would_ignore(
    accel_cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    done = accel_cli("prefill", "--plan", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.complaint.startswith("accel: --plan ") and done.complaint.endswith(words)


@pytest.mark.gpu
@pytest.mark.skipif(HERE == "cpu", reason="no CUDA device")
def test_graphs_take_what_the_plan_says(accel_cli: Cli) -> None:
    arguments = ("prefill", "a red circle", "--repeats", "1", "--json")
    report = json.loads(accel_cli(*arguments).out)["report"]
    plan = json.loads(accel_cli("prefill", "--plan", "--json").out)
    ceiling = plan["ceilings"][-1]
    assert ceiling["output_bytes"] == report["output_bytes"]
    assert report["pool_bytes"] >= ceiling["activation_bytes"] / 2
    assert report["pool_bytes"] <= ceiling["activation_bytes"] + plan["library_bytes"]


def _declined(folder: Path) -> Path:
    """A language model whose frequencies follow the longest prompt: prompts cannot be packed."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from accel.pipelines.demo_lm import demo_lm_folder

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(demo_lm_folder())
    config = LlamaConfig(
        vocab_size=768,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_declined_model_runs_as_it_is_and_says_why(accel_cli: Cli, tmp_path: Path) -> None:
    folder = _declined(tmp_path / "declined")
    done = accel_cli("prefill", "a red", "two", "-m", folder, *FEW, "--compare", "--json")
    assert done.code == 0, done.err
    (told,) = done.remarks()
    assert told.startswith("accel: prompts run one by one through the model's own forward: ")
    assert "dynamic RoPE" in told
    result = json.loads(done.out)
    assert result["report"]["declined"]
    assert result["ratio"] is None and result["inactive"]
    assert result["report"]["captures"] == 0
    assert len(result["prompts"]) == 2


def test_a_cached_model_works_while_the_hub_is_out_of_reach(
    accel_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from accel.pipelines import hub
    from accel.pipelines.demo_lm import demo_lm_folder

    home = tmp_path / "cache" / "models--owner--lm"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    shutil.copytree(demo_lm_folder(), home / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "unreachable", lambda name, option: "the hub is out of reach")
    here = accel_cli("prefill", "a red", "-m", "owner/lm", *FEW, "--mode", "eager", "--json")
    assert here.code == 0, here.err
    assert here.complaint == "accel: the hub is out of reach; taking owner/lm from the cache"
    own = accel_cli("prefill", "a red", *FEW, "--mode", "eager", "--json")
    assert json.loads(here.out)["prompts"] == json.loads(own.out)["prompts"]
    missing = accel_cli("prefill", "a red", "-m", "owner/other", *FEW)
    assert missing.code == 2
    assert "neither on disk" in missing.err.splitlines()[-1]


def test_the_examples_of_the_page_run(accel_cli: Cli, piped: Callable[[str], None]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "prefill.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = block.splitlines()
    assert len(lines) >= 5
    for line in lines:
        given, _, command = line.rpartition(" | ")
        piped(given)
        done = accel_cli(*shlex.split(command)[1:])
        assert done.code == 0, (line, done.err)
        assert done.out
