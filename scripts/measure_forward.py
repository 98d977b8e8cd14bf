"""One denoiser forward on a GPU: eager, as one bare CUDA graph, and patched, in one process.

Answers three questions of a model at its real size: how far a patched forward is from the same
forward captured whole and replayed, what recording a new shape costs an op, and what declining
costs. Run as

    python scripts/measure_forward.py sdxl sd15 zimage:1024 --output docs/benchmarks/forward.json

A name may carry a size in pixels, and "+lora" for one that is attached. "alone" waits for the
device around each forward; "in a row" queues forwards as a denoise loop does and waits once.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from result_file import write
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.pipelines import zoo

REPEATS, ROW, ROUNDS, TURNS = 15, 10, 5, 3
SLOW_REPEATS, SLOW_ROW = 5, 3
SLOW = 100.0
"""Milliseconds of a forward from which on fewer are measured."""


def alone(run: Callable[[], object]) -> float:
    """Median milliseconds of one forward between two waits."""
    first = _timed(run, 1)
    repeats = SLOW_REPEATS if first > SLOW else REPEATS
    return statistics.median([first, *(_timed(run, 1) for _ in range(repeats - 1))])


def in_a_row(run: Callable[[], object]) -> float:
    """Median milliseconds a forward when several of them are queued without a wait."""
    row = SLOW_ROW if _timed(run, 1) > SLOW else ROW
    return statistics.median(_timed(run, row) for _ in range(5)) / row


def in_turns(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Both figures of every way, each way's turn after the other's: a device that has warmed up is
    slower than one that was idle."""
    figures: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for name, run in ways.items():
            figures.setdefault(f"{name} alone", []).append(alone(run))
            figures.setdefault(f"{name} in a row", []).append(in_a_row(run))
    return {name: statistics.median(times) for name, times in figures.items()}


def _timed(run: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def denoiser_call(pipe: Any, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The denoiser and the arguments of its last call in a short run of the pipeline."""
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    calls: list[tuple[Any, Any]] = []
    hook = denoiser.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    pipe(
        "a photo of a cat on a table",
        output_type="latent",
        **{**settings, "num_inference_steps": 3},
    )
    hook.remove()
    return denoiser, *calls[-1]


def bare_graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The forward captured whole, by torch alone."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return graph


@torch.no_grad()
def measure(name: str, size: int | None, lora: bool) -> dict[str, Any]:
    """Every figure of one model, in milliseconds unless the name says otherwise."""
    settings = {**zoo.defaults(name)}
    if size is not None:
        settings |= {"height": size, "width": size}
    pipe = zoo.build(name, device="cuda", dtype=zoo.dtype(name), seed=0)
    pipe.set_progress_bar_config(disable=True)
    if lora:
        layers = LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
        (getattr(pipe, "transformer", None) or pipe.unet).add_adapter(layers)
    denoiser, args, kwargs = denoiser_call(pipe, settings)
    _, *wider = denoiser_call(pipe, settings | {"width": settings["width"] + 128})

    def run() -> Any:
        return denoiser(*args, **kwargs)

    def run_wider() -> Any:
        return denoiser(*wider[0], **wider[1])

    eager = {"eager alone": alone(run), "eager in a row": in_a_row(run)}
    expected = run()
    graph = bare_graph(run)
    accel.patch(denoiser)
    calls = [_timed(run, 1) for _ in range(4)]
    same = all(torch.equal(a, b) for a, b in zip(_tensors(run()), _tensors(expected), strict=True))
    taken = in_turns({"bare graph": graph.replay, "patched": run})
    part = accel.report(denoiser)["module"]
    figures: dict[str, Any] = {"model": name, "lora": lora, "height": settings["height"]}
    figures |= {**eager, **taken, "bit-equal": same, "first four patched calls": calls}
    figures["patched over bare, alone"] = taken["patched alone"] / taken["bare graph alone"]
    figures["patched over bare, in a row"] = (
        taken["patched in a row"] / taken["bare graph in a row"]
    )
    figures["patched over eager, in a row"] = taken["patched in a row"] / eager["eager in a row"]
    figures |= _recording_cost(denoiser, run, run_wider) if part.graphs else {}
    figures |= {"declined": part.declined, "graph MiB": accel.report(denoiser).pool_bytes / 2**20}
    accel.unpatch(denoiser)
    return figures


def _recording_cost(
    denoiser: Any, run: Callable[[], object], run_wider: Callable[[], object]
) -> dict[str, Any]:
    """Recording a second, wider shape after a first one: wall time of the whole call between two
    waits, and what it is an op of the eager forward above an eager call of that shape, timed right
    before: hosts are fast in one minute and slow in another."""
    eager, costs = [], []
    accel.unpatch(denoiser)
    with Operations() as eagerly:
        run_wider()
    for _ in range(ROUNDS):
        accel.unpatch(denoiser)
        eager.append(alone(run_wider))
        accel.patch(denoiser, capture="always")
        for call in (run, run, run, run_wider):  # the wider one's first call is eager
            call()
        costs.append(_timed(run_wider, 1))
    _, graph = accel.report(denoiser)["module"].graphs
    over = statistics.median(cost - plain for cost, plain in zip(costs, eager, strict=True))
    return {
        "eager alone, new shape": eager,
        "recording a new shape": costs,
        "operations": eagerly.count,
        "recorded as": graph.operations,
        "segments": graph.segments,
        "recording over eager, us an op": over * 1e3 / eagerly.count,
    }


class Operations(TorchDispatchMode):
    """While open, counts the ops that torch is asked for: those of an eager forward, some of which
    a recording takes together."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _tensors(result: Any) -> list[torch.Tensor]:
    first = result[0] if isinstance(result, tuple) else next(iter(result.values()))
    return list(first) if isinstance(first, list) else [first]


def main() -> None:
    """Measures the models named on the command line and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="zoo names, each with :SIZE if wanted")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here, which this measures")
    rows = []
    for model in options.models:
        name, _, size = model.removesuffix("+lora").partition(":")
        rows.append(measure(name, int(size) if size else None, model.endswith("+lora")))
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps(rows[-1], indent=1), flush=True)
    write(options.output, torch.device("cuda:0"), {"unit": "ms", "rows": rows})


if __name__ == "__main__":
    main()
