"""Thousands of calls of tiny pipelines from many threads; every result is compared with eager.

    python scripts/soak.py --processes 4 --output docs/benchmarks/soak.json

A round is a state (LoRA, scheduler, weights, patch options). Its eager pictures are drawn first, by
unpatched twins in the same state; then all threads draw the same pictures, in any order and mixed
sizes, through patched pipelines over the same modules, each thread with a pipeline, scheduler and
tokenizer of its own, as servers do. Between rounds, when no thread draws, the state changes. The
memory limit is by turns none and so small that graphs are evicted. Memory is noted after each
round: once every state has come by it must not grow. Ends after `--calls`, or `--seconds`, and
exits with 1 if anything was wrong. Threads of one process take turns in Python: processes, each
with its threads, share the device and the calls.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import dataclasses
import gc
import itertools
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from peft import LoraConfig
from result_file import as_text

import accel
from accel.backend import backend_for
from accel.pipelines import tiny

MODELS = ("sd15", "zimage", "flux")
SIZES = ((64, 64), (64, 96), (96, 64))
PROMPTS = ("a red circle", "two blue squares on a white background")
SEEDS = (0,)
SCARCE = 0.75
"""From one "patched again" to the next all graphs live, or, by turns, so much of the memory that
they took before is all that they get: some are evicted."""
GROWTH = 1.02
"""What memory may grow by after every state has come by twice, for the allocator's rounding."""

Do = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """One call: which model draws what."""

    model: str
    size: tuple[int, int]
    prompt: str
    seed: int

    def draw(self, pipe: Any) -> np.ndarray:
        """The picture, as numbers."""
        height, width = self.size
        options = {**tiny.CALLS[self.model], "height": height, "width": width}
        generator = torch.Generator().manual_seed(self.seed)
        made = pipe(self.prompt, generator=generator, output_type="np", **options)[0]
        return np.asarray(made)


DRAWINGS = [Drawing(*choice) for choice in itertools.product(MODELS, SIZES, PROMPTS, SEEDS)]


def _denoiser(pipe: Any) -> Any:
    return getattr(pipe, "unet", None) or pipe.transformer


def _lora(pipe: Any) -> None:
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    _denoiser(pipe).add_adapter(config, adapter_name="soak")


def _weights(pipe: Any) -> None:
    with torch.no_grad():
        for parameter in _denoiser(pipe).parameters():
            parameter.mul_(1.01)


def _moved_weights(pipe: Any) -> None:
    for parameter in _denoiser(pipe).parameters():
        parameter.data = parameter.data.clone()


def _scheduler(kind: str) -> Do:
    def change(pipe: Any) -> None:
        if hasattr(pipe, "unet"):  # flow models keep theirs
            pipe.scheduler = getattr(diffusers, kind).from_config(pipe.scheduler.config)

    return change


CHANGES: dict[str, Do] = {
    "nothing": lambda pipe: None,
    "weights scaled in place": _weights,
    "LoRA added": _lora,
    "LoRA disabled": lambda pipe: _denoiser(pipe).disable_adapters(),
    "LoRA enabled": lambda pipe: _denoiser(pipe).enable_adapters(),
    "LoRA deleted": lambda pipe: _denoiser(pipe).delete_adapters("soak"),
    "Euler": _scheduler("EulerDiscreteScheduler"),
    "weights moved": _moved_weights,
    "DDIM": _scheduler("DDIMScheduler"),
    "patched again": lambda pipe: None,
    "UniPC": _scheduler("UniPCMultistepScheduler"),
}
"""What happens between rounds, over and over."""


class Soak:
    """Twins of every model, plain and shared; the threads' own pipelines over the shared ones."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.plain = {name: self._made(name) for name in MODELS}
        self.shared = {name: self._made(name) for name in MODELS}
        self._fill_tables()
        self.own = [
            {name: _over(pipe) for name, pipe in self.shared.items()} for _ in range(threads)
        ]
        self.totals: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.calls = 0
        self.limits: list[int | None] = []
        self._taken = 0
        self._patch()

    def _made(self, name: str) -> Any:
        pipe = tiny.pipeline(name).to(self.device)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _fill_tables(self) -> None:
        """One picture each: Z-Image's first call makes its table of frequencies on the host and
        moves it, and another thread's call in between fails, in plain diffusers too."""
        for drawing in {drawing.model: drawing for drawing in DRAWINGS}.values():
            drawing.draw(self.shared[drawing.model])

    def _patch(self) -> None:
        scarce = len(self.limits) % 2 == 1
        limit = int(SCARCE * self._taken) if scarce else None
        self.limits.append(limit)
        for pipe in self._pipes():
            accel.patch(pipe, capture="always", memory_limit=limit)

    def _pipes(self) -> list[Any]:
        return [pipe for pipes in self.own for pipe in pipes.values()]

    def change(self, name: str) -> None:
        """Puts all pipelines into the next state. No thread draws meanwhile."""
        if name == "patched again":
            self.unpatch()
            self._patch()
        for pipe in (*self.plain.values(), *self.shared.values()):
            CHANGES[name](pipe)
        for pipes in self.own:
            for model, pipe in pipes.items():
                pipe.scheduler = copy.deepcopy(self.shared[model].scheduler)

    def unpatch(self) -> None:
        """Takes the patches off, and adds up what they did."""
        reports = [accel.report(pipe) for pipe in self._pipes()]
        self._taken = max(report.pool_bytes for report in reports)
        parts = {id(part): part for report in reports for part in report.parts}
        for part in parts.values():
            for what in ("captures", "replays", "eager_calls", "recaptures", "evictions"):
                self.totals[what] += getattr(part, what)
        for pipe in self._pipes():
            accel.unpatch(pipe)

    def round(self, calls: int, chance: random.Random) -> None:
        """Draws from all threads and compares."""
        expected = {drawing: drawing.draw(self.plain[drawing.model]) for drawing in DRAWINGS}
        drawings = [chance.choice(DRAWINGS) for _ in range(calls)]
        shares = [drawings[index :: len(self.own)] for index in range(len(self.own))]
        with concurrent.futures.ThreadPoolExecutor(len(self.own)) as pool:
            for wrong in pool.map(_wrong, self.own, shares, [expected] * len(self.own)):
                self.wrong += wrong
        self.calls += calls

    def reserved_bytes(self) -> int:
        """Memory of the device that torch holds, what it could give back excluded."""
        gc.collect()
        if self.device.type == "cuda":  # of each thread that ever multiplied, 32 MiB on an H200
            torch._C._cuda_clearCublasWorkspaces()
        backend: Any = backend_for(self.device)
        backend.synchronize(backend.current_stream(self.device))
        return int(backend.reserved_bytes(self.device) - backend.reclaimable_bytes(self.device))


def _over(shared: Any) -> Any:
    """A pipeline over the same modules. Tokenizers are its own: shared by threads they pad prompts
    to each other's lengths, in plain diffusers too."""
    own = {name: copy.deepcopy(x) for name, x in shared.components.items() if "tokenizer" in name}
    pipe = type(shared)(**shared.components | own)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _wrong(
    own: dict[str, Any], drawings: list[Drawing], expected: dict[Drawing, np.ndarray]
) -> list[str]:
    """A thread's work: the drawings that came out otherwise than eagerly."""
    return [
        str(drawing)
        for drawing in drawings
        if not np.array_equal(drawing.draw(own[drawing.model]), expected[drawing])
    ]


def soak(
    device: torch.device, calls: int, threads: int, seconds: float, laps: int = 4, seed: int = 0
) -> dict[str, Any]:
    """Runs `laps` times through all states, `calls` in all, and says what was seen. `seed` is that
    of the order of the drawings."""
    begin, chance, states = time.monotonic(), random.Random(seed), list(CHANGES)
    a_round = -(-calls // (laps * len(states)))
    work = Soak(device, threads)
    memory: list[list[int]] = []
    while work.calls < calls and time.monotonic() - begin < seconds:
        memory.append([])
        for state in states:
            work.change(state)
            work.round(a_round, chance)
            memory[-1].append(work.reserved_bytes())
            print(f"{work.calls} calls, {len(work.wrong)} wrong, after {state}", flush=True)
    work.unpatch()
    return {
        "calls": work.calls,
        "wrong": len(work.wrong),
        "first wrong": work.wrong[:10],
        "threads": threads,
        "rounds": sum(map(len, memory)),
        "seconds": time.monotonic() - begin,
        "memory limits": work.limits,
        "bytes in use after each round, by lap": memory,
        "memory flat": len(memory) < 3 or max(memory[-1]) <= GROWTH * max(memory[1]),
        **work.totals,
    }


def soak_in_processes(
    processes: int, device: torch.device, calls: int, threads: int, seconds: float
) -> dict[str, Any]:
    """The same in several processes at once, and what they saw together."""
    share, spawn = -(-calls // processes), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        jobs = [
            pool.submit(soak, device, share, threads, seconds, seed=seed)
            for seed in range(processes)
        ]
        each = [job.result() for job in jobs]
    result: dict[str, Any] = {"processes": processes}
    for name, first in each[0].items():
        values = [one[name] for one in each]
        if name == "threads":
            result[name] = first
        elif name == "memory flat":
            result[name] = all(values)
        elif name in ("memory limits", "bytes in use after each round, by lap"):
            result[name] = values
        else:
            result[name] = max(values) if name == "seconds" else sum(values, type(first)())
    return result


def main() -> None:
    """Soaks, writes a JSON file, exits with 1 if a result was wrong or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="begin no lap after this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here, which this puts under load")
    device = torch.device(options.device)
    result = soak_in_processes(
        options.processes, device, options.calls, options.threads, options.seconds
    )
    text = as_text(device, result)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    served = result["calls"] >= options.calls and result["replays"] > result["captures"]
    served &= result["evictions"] > 0
    sys.exit(bool(result["wrong"]) or not result["memory flat"] or not served)


if __name__ == "__main__":
    main()
