"""Wall time, ways in turns. Knows functions of prompts and a device to wait for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from accel.pipelines.machine import synchronize
from prefill_measures.prompts import Prompts
from prefill_measures.ways import NO_GRAPHS, TRANSFORMERS, Run, Ways

Beside = Callable[[Prompts], Prompts]


def timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds until the host is done, and until the device is, from an idle device on."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    host = time.perf_counter()
    synchronize(device)
    return (host - begin) * 1e3, (time.perf_counter() - begin) * 1e3


def in_turns(
    runs: Mapping[str, Run],
    rounds: Sequence[Prompts],
    device: torch.device,
    beside: Beside = lambda prompts: prompts,
) -> dict[str, list[tuple[float, float]]]:
    """`timed` of each way, once for the prompts of every round; another one begins each round.
    Before it is timed, a way reads what lies `beside` the prompts: what it keeps of the lengths
    that it has read is nothing to the next."""
    names = list(runs)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number, prompts in enumerate(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            runs[name](beside(prompts))
            found[name].append(timed(partial(runs[name], prompts), device))
    return found


def warmed(
    runs: Mapping[str, Run], rounds: Sequence[Prompts], device: torch.device
) -> tuple[dict[str, Run], dict[str, str]]:
    """The ways that got through some rounds that do not count (kernels load, graphs are captured),
    and of the others why not."""
    fine, failed = dict(runs), {}
    for name, run in runs.items():
        try:
            for prompts in rounds:
                run(prompts)
            synchronize(device)
        except Exception as why:
            del fine[name]
            failed[name] = f"{type(why).__name__}: {why}".partition("\n")[0]
    return fine, failed


def row(
    ways: Ways,
    warm_up: Sequence[Prompts],
    rounds: Sequence[Prompts],
    device: torch.device,
    beside: Beside,
) -> dict[str, Any]:
    """Medians of one batch, in milliseconds, and what they are to each other."""
    runs, failed = warmed(ways.runs, warm_up, device)
    before = {name: _counts(ways, name) for name in runs}
    samples = in_turns(runs, rounds, device, beside) if runs else {}
    wall = {name: statistics.median(w for _, w in found) for name, found in samples.items()}
    host = {name: statistics.median(h for h, _ in found) for name, found in samples.items()}
    spread = {
        n: [min(w for _, w in found), max(w for _, w in found)] for n, found in samples.items()
    }
    eager = {n: _not_replayed(ways, n, before[n]) for n in runs}
    figures: dict[str, Any] = {f"{name}, ms": ms for name, ms in wall.items()}
    for base in (TRANSFORMERS, NO_GRAPHS):
        for name in wall:
            if base in wall and name not in (base, TRANSFORMERS):
                figures[f"{name}, times {base}"] = wall[base] / wall[name]
    figures |= {"host done, ms": host, "spread, ms": spread}
    figures |= {"not replayed": found} if (found := {n: w for n, w in eager.items() if w}) else {}
    return figures | ({"failed": failed} if failed else {})


def _counts(ways: Ways, name: str) -> tuple[int, int]:
    report = ways.runners[name].report if name in ways.runners else None
    return (report.captures, report.eager_passes) if report else (0, 0)


def _not_replayed(ways: Ways, name: str, before: tuple[int, int]) -> str | None:
    """Why a graph's figure is none of a graph: something was captured or ran eagerly meanwhile."""
    if name in (TRANSFORMERS, NO_GRAPHS):
        return None
    captures, eager = (now - then for now, then in zip(_counts(ways, name), before, strict=True))
    if not captures and not eager:
        return None
    return f"{eager} eager passes, {captures} captures: {dict(ways.runners[name].report.reasons)}"
