"""Graphs follow the model: weights, settings, failed captures, threads, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.breaks import Break
from accel.graph import BreakableGraph, current_recording
from accel.prefill import captured
from accel.prefill.runner import PrefillRunner
from tests.accel.common import scribble
from tests.accel.prefill.tiny import TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
PROMPTS = prompts_of(20, 30)


def agrees(runner: PrefillRunner, model: TinyModel, prompts: list[list[int]] | None = None) -> bool:
    """Whether results are what the model computes now."""
    prompts = PROMPTS if prompts is None else prompts
    result = runner(prompts)
    return all(
        torch.allclose(result.hidden(i), own(model, prompt), atol=1e-5)
        for i, prompt in enumerate(prompts)
    )


def own(model: TinyModel, prompt: list[int]) -> torch.Tensor:
    """The model's own hidden states."""
    with torch.no_grad():
        return model.own(torch.tensor(prompt, device=model.device))


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_weights_changed_in_place_are_followed(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode, buckets=(64,))
    assert agrees(runner, tiny)
    tiny.module.layers[0].up.weight.data.mul_(-2)
    assert agrees(runner, tiny)
    assert (runner.report.captures, runner.report.recaptures) == (2, 0)


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_other_weights_are_captured_anew(
    mode: str, tiny: TinyModel, make: Make, device: torch.device
) -> None:
    runner = make(tiny, mode=mode, buckets=(64,))
    assert agrees(runner, tiny)
    weight = tiny.module.layers[1].q.weight
    weight.data = weight.data.clone() * -2
    scribble(device)
    assert agrees(runner, tiny)
    tiny.module.layers[0].down = torch.nn.Linear(48, 32, device=device)
    assert agrees(runner, tiny)
    assert (runner.report.captures, runner.report.recaptures) == (6, 2)


def test_another_setting_is_captured_anew(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, buckets=(64,))
    runner(PROMPTS)
    tiny.setting = 1
    runner(PROMPTS)
    assert (runner.report.captures, runner.report.recaptures) == (4, 1)


def test_a_setting_that_changes_in_every_call_is_eager(tiny: TinyModel, make: Make) -> None:
    class Restless(TinyModel):
        def state(self) -> object:
            self.setting += 1
            return self.setting

    model = Restless(tiny.device)
    runner = make(model, buckets=(64,))
    assert agrees(runner, model)
    assert dict(runner.report.reasons) == {"the model changes while it runs": 1}


def test_a_model_that_changes_in_every_call_is_not_captured_for_ever(
    tiny: TinyModel, make: Make
) -> None:
    class Restless(TinyModel):
        def state(self) -> object:
            self.setting += 1
            return self.setting

    model = Restless(tiny.device)
    runner = make(model, buckets=(64,))
    for _ in range(6):
        assert agrees(runner, model)
    assert runner.report.reasons["the model changes in every call"] == 4
    assert runner.report.captures == 8


def test_a_model_whose_prompts_leak_is_declined(device: torch.device, make: Make) -> None:
    model = TinyModel(device, leak=True)
    runner = make(model)
    assert runner.report.declined is not None
    assert runner.report.declined.startswith("self-test: packed, the result differs")
    assert agrees(runner, model)
    assert (runner.report.own_passes, runner.report.captures) == (2, 0)
    assert [len(score) for score in runner.score(PROMPTS)] == [19, 29]


def test_chunks_that_only_the_mask_knows_are_found(device: torch.device, make: Make) -> None:
    runner = make(TinyModel(device, chunk=100))
    assert runner.report.declined is not None and "self-test" in runner.report.declined


def test_a_failed_capture_runs_eagerly_with_the_reason(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, buckets=(64,))
    tiny.fails_in_capture = RuntimeError
    assert agrees(runner, tiny)
    assert agrees(runner, tiny)
    why = "bucket 64 not captured: RuntimeError: the capture was refused"
    assert dict(runner.report.reasons) == {why: 2}
    assert why in runner.report.notes


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_what_another_rank_cannot_capture_is_eager_here(
    mode: str, tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, mode=mode, buckets=(64,))
    tiny.another_rank_fails = True
    assert agrees(runner, tiny)
    assert runner.report.captures == 0
    [reason] = runner.report.reasons
    assert reason.endswith("another rank could not capture")


def test_after_one_failure_all_ranks_are_eager_for_good(tiny: TinyModel, make: Make) -> None:
    tiny.ranks = 2
    runner = make(tiny, buckets=(64,)).capture()
    assert agrees(runner, tiny) and runner.report.replays == 1
    tiny.setting, tiny.another_rank_fails = 1, True  # graphs are made anew, and one rank fails
    assert agrees(runner, tiny)
    tiny.another_rank_fails = False
    assert agrees(runner, tiny) and agrees(runner.capture(), tiny)
    assert (runner.report.replays, runner.report.eager_passes) == (1, 3)
    assert runner.report.buckets == []


def test_a_rank_that_cannot_capture_tells_the_others(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny)
    tiny.verdicts.clear()
    tiny.fails_in_capture = RuntimeError
    runner.capture()
    assert tiny.verdicts == [True, False] * 8  # twice a bucket: a barrier, then the verdict


def test_out_of_memory_while_capturing_is_eager_with_the_bytes(
    sim: torch.device, make: Make
) -> None:
    from tests.simulated.backend import SimulatedBackend

    model = TinyModel(sim)
    runner = make(model, buckets=(64,))
    model.fails_in_capture = torch.OutOfMemoryError
    assert agrees(runner, model)
    [reason] = runner.report.reasons
    assert "out of memory" in reason and "bytes free" in reason
    model.fails_in_capture = None
    model.setting = 1  # what was dropped may be tried again
    assert agrees(runner, model)
    assert runner.report.replays == 1
    assert SimulatedBackend().aborts == 0


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_out_of_memory_in_a_replay_costs_the_graphs_and_no_call(
    mode: str, tiny: TinyModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes a graph launchable takes memory when it runs."""
    runner = make(tiny, mode=mode, buckets=(64, 128)).capture()
    before, replay, lacking = runner.report.captures, BreakableGraph.replay, [True]

    def short_once(self: BreakableGraph) -> None:
        if lacking.pop():
            raise torch.OutOfMemoryError("CUDA out of memory in cuGraphInstantiateWithFlags")
        lacking.append(False)
        replay(self)

    monkeypatch.setattr(BreakableGraph, "replay", short_once)
    assert agrees(runner, tiny)
    assert runner.report.reasons["memory was lacking for a graph"] == 1
    assert runner.report.buckets == [] and runner.report.replays == 0
    lacking.append(False)
    assert agrees(runner, tiny)
    assert runner.report.replays == 1 and runner.report.captures > before


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_any_thread_may_call(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode, cache_tokens=2048)
    prompts = [prompts_of(n, n + 5, seed=n) for n in range(5, 25, 5)]
    expected = [[own(tiny, prompt) for prompt in batch] for batch in prompts]
    wrong: list[int] = []

    def work(turn: int) -> None:
        for i in range(turn, turn + 4):
            result = runner(prompts[i % 4])
            pairs = enumerate(expected[i % 4])
            if not all(torch.allclose(result.hidden(j), own, atol=1e-5) for j, own in pairs):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong
    assert runner.report.calls == 16


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_gradient_mode_will_do(
    context: Callable[[], torch.no_grad], tiny: TinyModel, make: Make
) -> None:
    with context():
        runner = make(tiny, buckets=(64,))
        first = runner(PROMPTS)
    second = runner(PROMPTS)
    assert torch.equal(first.logits, second.logits)
    assert not second.logits.requires_grad and not second.logits.is_inference()
    assert (runner.report.replays, runner.report.captures) == (2, 2)


def test_autocast_and_default_devices_of_the_caller_change_nothing(
    tiny: TinyModel, make: Make
) -> None:
    runner = make(tiny, buckets=(64,), cache_tokens=256)
    first = runner(PROMPTS)
    with torch.autocast(tiny.device.type, torch.bfloat16), tiny.device:
        second = runner(PROMPTS, prefix=first.handle(0))
        third = make(tiny, buckets=(64,))(PROMPTS)
        scores = runner.score(PROMPTS)
    assert second.logits.dtype == torch.float32
    assert torch.equal(third.logits, first.logits)
    assert all(score.is_cpu for score in scores)
    assert runner.report.eager_passes == 0


def test_memory_that_ran_out_elsewhere_is_given_up(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, buckets=(64,))
    runner(PROMPTS)
    pool = runner._pool
    assert pool is not None
    generation, pool.short = pool.generation, True
    assert agrees(runner, tiny)
    assert pool.generation == generation + 1 and runner.report.captures == 4


def test_the_pool_needs_no_more_than_the_largest_bucket(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, max_tokens=2048, attention="reference").capture()
    first, *others = runner.report.buckets
    assert first.bucket == 2048 and first.pool_bytes > 0
    assert sum(entry.pool_bytes for entry in others) <= first.pool_bytes // 4
    assert runner.report.pool_bytes == sum(b.pool_bytes for b in runner.report.buckets)


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_of_large_graphs_one_is_ready_for_launch(
    mode: str, tiny: TinyModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes memory for each segment that is. Full graphs are cut for it."""
    monkeypatch.setattr(captured, "LAYERS_A_SEGMENT", 1)
    sizes = 64, 1152, 1536, 2048
    runner = make(tiny, mode=mode, buckets=sizes, max_tokens=2048).capture()
    assert [bucket for bucket, ready in launchable(runner).items() if ready] == [64]
    for lengths, bucket in (((500, 500, 60), 1152), ((500, 500, 500), 1536), ((30,), 1536)):
        assert agrees(runner, tiny, prompts_of(*lengths))
        assert [n for n, ready in launchable(runner).items() if ready] == [bucket, 64]
    assert runner.report.eager_passes == 0 and runner.report.captures == 4
    assert {(b.segments, b.breaks) for b in runner.report.buckets} == (
        {(3, 2)} if mode == "breakable" else {(2, 0), (1, 0)}
    )


def test_large_full_graphs_are_whole_where_nothing_can_be_cut(
    tiny: TinyModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "LAYERS_A_SEGMENT", 1)
    runner = make(tiny, mode="full", buckets=(1152,), max_tokens=1152)
    assert runner._pool is not None
    runner._pool.may_cut = False
    runner.capture()
    assert {(b.segments, b.breaks) for b in runner.report.buckets} == {(1, 0)}
    assert list(launchable(runner).values()) == [True]


def launchable(runner: PrefillRunner) -> dict[int, bool]:
    """By bucket, whether its segments are ready for launch: all of them are, or none."""
    assert runner._graphs is not None
    found = {}
    for body in runner._graphs._captured.values():
        segments = [step for step in body.graph.steps if not isinstance(step, Break)]
        [found[body.bucket]] = set(map(is_launchable, segments))
    return found


def is_launchable(segment: Any) -> bool:
    """A simulated segment says so. One of torch's that cannot rest is, from its capture on."""
    if hasattr(segment, "launchable"):
        return bool(segment.launchable)
    return getattr(segment, "_launchable", segment) is not None


def test_the_pool_begins_with_the_plans_pieces(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, max_tokens=8192, attention="reference")
    planned = runner.plan().activations
    runner.capture()
    small = 10 << 20  # tensors up to 1 MiB have segments of their own, pieces are whole MiB
    assert planned > 32 << 20
    assert planned < runner.report.pool_bytes <= planned * 33 // 32 + small


@pytest.mark.parametrize("mode", ["breakable", "full"])
def test_graphs_read_their_batches_in_turns_from_one_place(
    tiny: TinyModel, make: Make, mode: str
) -> None:
    runner = make(tiny, mode=mode, attention="reference", max_requests=3).capture()
    largest = max(b.bucket for b in runner.report.buckets)
    assert len(runner.report.buckets) > 1
    numbers = 4 * (4 * 3 + 3) if mode == "full" else 0
    assert runner.report.buffer_bytes == 3 * 8 * largest + numbers
    assert runner.plan().buffers >= runner.report.buffer_bytes
    for lengths in ((1,), (largest,), (5, 3), (1,)):
        assert agrees(runner, tiny, prompts_of(*lengths))
    assert runner.report.eager_passes == 0


@pytest.mark.parametrize("cache_tokens", [0, 96])
def test_batch_tensors_are_counted_again_after_a_recapture(
    tiny: TinyModel, make: Make, cache_tokens: int
) -> None:
    runner = make(tiny, cache_tokens=cache_tokens).capture()
    taken = runner.report.buffer_bytes
    assert 0 < taken <= runner.plan().buffers < 2 * taken
    weight = next(tiny.module.parameters())
    weight.data = weight.data.clone()
    runner.capture()
    assert runner.report.recaptures == 1 and runner.report.buffer_bytes == taken


def test_batch_tensors_of_a_capture_that_failed_are_not_counted(
    tiny: TinyModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, failed = tiny.body, list[int]()

    def fails_once(ids: torch.Tensor, *others: Any) -> torch.Tensor:
        if current_recording() is not None and not failed:
            failed.append(ids.numel())
            raise RuntimeError("only the recorder knows")
        return body(ids, *others)

    monkeypatch.setattr(tiny, "body", fails_once)
    runner = make(tiny).capture()
    assert failed and runner.report.notes == []
    assert runner.report.buffer_bytes == 3 * 8 * failed[0]


def test_the_plan_is_near_what_capturing_takes(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, max_tokens=512)
    plan = runner.plan()
    runner.capture()
    assert plan.fits
    # Pools on a GPU hold a library's workspace too, and come in blocks of megabytes.
    library = 96 << 20 if tiny.device.type == "cuda" else 0
    assert plan.activations + library >= runner.report.pool_bytes // 8
    assert plan.buffers >= runner.report.buffer_bytes
    assert plan.results == 512 * tiny.hidden_size * tiny.dtype.itemsize


def test_closing_gives_the_pool_back(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny).capture()
    pool = runner._pool
    assert pool is not None and pool.bytes() > 0
    runner.close()
    assert pool.bytes() == 0


def test_a_loop_needs_room_for_one_result(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, cache_tokens=96)
    first = kept = runner(prompts_of(20))
    prefix = kept.handle(0)
    for seed in range(5):
        result = runner(prompts_of(50, seed=seed))
        runner.score(prompts_of(30))
    assert torch.equal(first.hidden(0), runner(prompts_of(20)).hidden(0))
    with pytest.raises(ValueError, match=r"prompt 0 is no longer cached.*handle\(0\) before"):
        result.handle(0)
    assert prefix.alive
    assert len(runner(prompts_of(3), prefix=prefix)) == 1


def test_pages_go_back_when_results_die(tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, cache_tokens=64)
    for _ in range(5):
        runner(prompts_of(60))
    assert runner.free_cache_tokens == 64
