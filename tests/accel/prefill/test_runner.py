"""A runner's results equal the model's own, in every mode; graphs change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.graph import Recording
from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
BATCHES = [(1,), (64,), (65, 3), (1, 1, 1, 1), (100, 27, 64, 65)]
MODES = ("eager", "breakable", "full")


def worst(runner: PrefillRunner, model: TinyModel, prompts: list[list[int]]) -> float:
    """The largest difference from the model's own hidden states and logits."""
    result = runner(prompts)
    differences = []
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            own = model.own(torch.tensor(prompt, device=model.device))
            logits = model.head(own[-1:])[0]
        differences.append((result.hidden(i) - own).abs().max().item())
        differences.append((result.logits[i] - logits).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("mode", MODES)
def test_results_are_the_models_own(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode)
    assert runner.report.declined is None
    for lengths in BATCHES:
        assert worst(runner, tiny, prompts_of(*lengths)) < 1e-5


def test_modes_agree_bit_for_bit(tiny: TinyModel, make: Make) -> None:
    runners = [make(tiny, mode=mode) for mode in MODES]
    for lengths in BATCHES:
        prompts = prompts_of(*lengths)
        results = [runner(prompts) for runner in runners]
        for result in results[1:]:
            assert torch.equal(result.logits, results[0].logits)
            for i in range(len(prompts)):
                assert torch.equal(result.hidden(i), results[0].hidden(i))
    assert [r.report.replays for r in runners] == [0, len(BATCHES), len(BATCHES)]


def test_results_outlive_later_calls(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny)
    first = runner(prompts_of(9, 30))
    kept = first.hidden(1).clone(), first.logits.clone()
    runner(prompts_of(39, seed=2))
    assert torch.equal(first.hidden(1), kept[0])
    assert torch.equal(first.logits, kept[1])


def test_python_runs_for_breaks_only(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny).capture()
    bodies = tiny.bodies
    runner(prompts_of(3, 4))
    assert tiny.bodies == bodies
    assert runner.report.captures == len(runner.report.buckets) == 4
    assert [b.bucket for b in runner.report.buckets] == [256, 192, 128, 64]
    assert {b.breaks for b in runner.report.buckets} == {2}


def test_a_full_graph_is_one_segment(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="full").capture()
    assert {(b.segments, b.breaks) for b in runner.report.buckets} == {(1, 0)}


def test_the_largest_bucket_is_captured_first(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny)
    runner(prompts_of(5))
    assert [b.bucket for b in runner.report.buckets] == [256, 64]
    assert runner.report.buckets[1].pool_bytes == 0


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_of_all_captures_only_the_first_runs(
    mode: str, tiny: TinyModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []
    init = Recording.__init__

    def noted(recording: Recording, graph: Any, origins: Any, run: bool = True) -> None:
        ran.append(run)
        init(recording, graph, origins, run)

    monkeypatch.setattr(Recording, "__init__", noted)
    runner = make(tiny, mode=mode, cache_tokens=256).capture()
    assert ran == [True] + [False] * (runner.report.captures - 1)
    prompts = prompts_of(100)
    assert worst(runner, tiny, prompts) < 1e-5, "an unwritten page, say"


def test_progress_says_why_nothing_is_captured(
    tiny: TinyModel, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tiny, mode="eager").capture(progress=True)
    assert capsys.readouterr().err == "nothing is captured: mode='eager'\n"
    make(tiny, mode="eager").capture()
    assert capsys.readouterr().err == ""


def test_progress_is_told(tiny: TinyModel, make: Make) -> None:
    told: list[tuple[int, int, int]] = []
    make(tiny).capture(progress=lambda *now: told.append(now))
    assert told == [(1, 4, 256), (2, 4, 192), (3, 4, 128), (4, 4, 64)]


def test_scores_are_log_probabilities(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny)
    prompts = prompts_of(200, 1, 2, 100, 30, 5, 5)
    for prompt, score in zip(prompts, runner.score(prompts), strict=True):
        ids = torch.tensor(prompt, device=tiny.device)
        with torch.no_grad():
            own = tiny.head(tiny.own(ids)).log_softmax(-1).cpu()
        expected = own[:-1].gather(-1, torch.tensor(prompt)[1:, None])[:, 0]
        assert score.shape == (len(prompt) - 1,)
        assert torch.allclose(score, expected, atol=1e-5)
    assert runner.report.eager_passes == 0


def test_it_closes_at_the_end_of_its_context(tiny: TinyModel, make: Make) -> None:
    with make(tiny) as runner:
        runner(prompts_of(3))
    with pytest.raises(ValueError, match="closed"):
        runner.score(prompts_of(3))


def test_a_closed_runner_says_so(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny)
    runner(prompts_of(3))
    runner.close()
    with pytest.raises(ValueError, match="closed"):
        runner(prompts_of(3))


def test_the_report_reads_as_a_text(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode="full", max_requests=2)
    runner(prompts_of(5))
    runner(prompts_of(1, 1, 1))
    said = str(runner.report).splitlines()
    assert said[1] == "  2 captured, 1 replayed, 1 eager"
    assert said[2:5] == [
        "  graph 256: 0 replays",
        "  graph 64: 1 replays",
        "  eager x1: more requests than max_requests=2",
    ]


def test_the_report_says_what_was_asked_for_and_why_it_is_eager_once(make: Make) -> None:
    runner = make(TinyModel(torch.device("cpu")), mode="full")
    why = "nothing can be captured on cpu"
    assert str(runner.report).count(why) == 1
    runner(prompts_of(5))
    said = str(runner.report)
    assert (runner.report.asked, runner.report.mode) == ("full", "eager")
    assert said.startswith("tiny (eager instead of full, attention reference): 1 calls")
    assert said.count(why) == 1 and f"eager x1: {why}" in said
    asked = make(TinyModel(torch.device("cpu")), mode="eager")
    assert str(asked.report).startswith("tiny (eager, attention reference): 0 calls")
