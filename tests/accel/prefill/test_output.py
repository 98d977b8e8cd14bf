"""Where graphs leave hidden states: in memory that they lend each other, so results are copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.tiny import TinyModel, prompts_of

Make = Callable[..., PrefillRunner]
MODES = ["breakable", "full"]


@pytest.mark.parametrize("mode", MODES)
def test_graphs_keep_no_hidden_states(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode).capture()
    pool, graphs = runner._pool, runner._graphs
    assert pool is not None and graphs is not None
    live = pool.backend.live_blocks(pool.id)
    outputs = [captured.output for captured in graphs._captured.values()]
    assert len(outputs) == len(runner.report.buckets) == 4
    assert not {pool.backend.storage(x).data_ptr() for x in outputs} & live


@pytest.mark.parametrize("mode", MODES)
def test_results_outlive_the_next_graphs(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode).capture()
    batches = [prompts_of(n, seed=n) for n in (20, 250, 64, 128, 20)]
    results = [runner(batch) for batch in batches]
    for [prompt], result in zip(batches, results, strict=True):
        own = tiny.own(torch.tensor(prompt, device=tiny.device))
        assert (result.hidden(0) - own).abs().max() < 1e-5
    assert runner.report.replays == 5


@pytest.mark.parametrize("mode", MODES)
def test_what_a_result_of_the_largest_batch_takes(mode: str, tiny: TinyModel, make: Make) -> None:
    runner = make(tiny, mode=mode)
    result = runner(prompts_of(256))
    assert result.hidden(0).nbytes == runner.report.output_bytes
