"""Wall time of a split model, ways in turns, all ranks together. Knows functions of prompts and a
barrier: every rank makes the same calls, in the same order, from idle devices on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from accel.prefill.runner import PrefillRunner
from prefill_measures.prompts import Prompts
from prefill_measures.timing import timed
from prefill_measures.ways import NO_GRAPHS, TRANSFORMERS, Run

ONE_GPU = "full, one GPU"


def nothing(_: Prompts) -> torch.Tensor:
    """What ranks do while the first one runs by itself."""
    return torch.empty(0)


def in_turns(
    runs: Mapping[str, Run],
    rounds: Sequence[Prompts],
    device: torch.device,
    meet: Callable[[], object],
) -> dict[str, list[float]]:
    """Milliseconds of each way, once for the prompts of every round; another begins each round.
    Before each, all ranks `meet` with idle devices."""
    names = list(runs)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number, prompts in enumerate(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            timed(meet, device)
            found[name].append(timed(partial(runs[name], prompts), device)[1])
    return found


def row(
    runs: Mapping[str, Run],
    runners: Mapping[str, PrefillRunner],
    warm_up: Sequence[Prompts],
    rounds: Sequence[Prompts],
    device: torch.device,
    meet: Callable[[], object],
) -> dict[str, Any]:
    """Medians of one batch, and what they are to each other. `runners` are those of the ways with
    graphs: what was no replay is told."""
    in_turns(runs, warm_up, device, meet)
    before = {name: _not_replays(runner) for name, runner in runners.items()}
    samples = in_turns(runs, rounds, device, meet)
    wall = {name: statistics.median(found) for name, found in samples.items()}
    figures: dict[str, Any] = {f"{name}, ms": ms for name, ms in wall.items()}
    for base in (TRANSFORMERS, NO_GRAPHS, ONE_GPU):
        for name in wall:
            if base in wall and name not in (base, TRANSFORMERS):
                figures[f"{name}, times {base}"] = wall[base] / wall[name]
    figures["spread, ms"] = {name: [min(found), max(found)] for name, found in samples.items()}
    not_replayed = {n: _not_replays(runner) - before[n] for n, runner in runners.items()}
    found = {name: calls for name, calls in not_replayed.items() if calls}
    return figures | ({"not replayed": found} if found else {})


def _not_replays(runner: PrefillRunner) -> int:
    return runner.report.eager_passes + runner.report.captures
