"""What a runner takes at its peak: without graphs, and with graphs up to some ceilings.

All of them run the same batches, up to the chunk size: sizes of graphs, then random ones, as the
allocator's memory grows by sizes that it has not seen. With graphs that end below it, the batches
above run eagerly: their memory adds to the graphs'.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from prefill_measures.prompts import random_prompts
from prefill_measures.ways import Options

MIB = 2**20
MIXED = 40
"""Batches of random lengths."""


class Meter:
    """Reads the device's memory, in MiB. Needs CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Peaks count from here on."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> dict[str, float]:
        """Weights included. `of the device` is what the driver says now, graphs and libraries
        included; the allocator keeps what it reserved at its peak."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "peak allocated, MiB": torch.cuda.max_memory_allocated(self.device) / MIB,
            "peak reserved, MiB": torch.cuda.max_memory_reserved(self.device) / MIB,
            "of the device, MiB": (total - free) / MIB,
        }


def batches(chunk: int, smallest: int, max_requests: int) -> list[list[int]]:
    """Lengths of the prompts of every batch: whole chunks first, then halves of it, of prompts that
    the lowest ceiling lets in.

    >>> batches(8, 4, 16)
    [[4, 4], [4]]
    """
    if chunk > smallest * max_requests:
        raise ValueError(
            f"a chunk of {chunk} tokens in prompts of {smallest}, the lowest ceiling, takes "
            f"{-(-chunk // smallest)} requests, --max-requests={max_requests}"
        )
    found, total = [], chunk
    while total >= smallest:
        found.append(_filled(total, smallest))
        total //= 2
    return found


def mixed(chunk: int, smallest: int, seed: int = 0) -> list[list[int]]:
    """Batches of any number of tokens up to `chunk`, in prompts of `smallest` tokens at most.

    >>> [sum(batch) <= 9 and max(batch) <= 4 for batch in mixed(9, 4)[:2]]
    [True, True]
    """
    draw = random.Random(seed)
    return [_filled(draw.randint(1, chunk), smallest) for _ in range(MIXED)]


def _filled(total: int, most: int) -> list[int]:
    """Prompts of `most` tokens, and one of what is left."""
    return [most] * (total // most) + [total % most] * bool(total % most)


def memory(
    model: Any, modes: Sequence[str], options: Options, ceilings: Sequence[int], meter: Meter
) -> Iterator[dict[str, Any]]:
    """A row without graphs, then one for each mode and ceiling, from the chunk size down."""
    chunk = options.max_tokens
    vocabulary = model.get_input_embeddings().weight.shape[0]
    smallest = min([*ceilings, chunk])
    lengths = batches(chunk, smallest, options.max_requests) + mixed(chunk, smallest)
    rounds = [random_prompts(some, vocabulary, seed) for seed, some in enumerate(lengths)]
    plain = _peak(model, "eager", options, None, rounds, meter)
    yield plain
    for mode in modes:
        for ceiling in sorted({*ceilings, chunk}, reverse=True):
            row = _peak(model, mode, options, ceiling, rounds, meter)
            for key in [key for key in plain if key.endswith("MiB") and key in row]:
                row[f"{key}, over no graphs"] = row[key] - plain[key]
            yield row


def _peak(
    model: Any, mode: str, options: Options, ceiling: int | None, rounds: Any, meter: Meter
) -> dict[str, Any]:
    figures: dict[str, Any] = {"mode": mode, "graphs up to": ceiling, "chunk": options.max_tokens}
    meter.start()
    try:
        with options.runner(model, mode, ceiling) as runner:
            runner.capture()
            for prompts in rounds * 2:
                runner(prompts)
            report = runner.report
            figures |= {"graphs": len(report.buckets), "graphs' pool, MiB": report.pool_bytes / MIB}
            return figures | meter.read()
    except Exception as why:
        return figures | {"failed": f"{type(why).__name__}: {why}".partition("\n")[0]}
