"""Where the device's time goes in one batch, by a profiler. Knows kernels by their names only.

Tracing makes graphs some percent slower: shares are read here, not times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from prefill_measures.prompts import Prompts
from prefill_measures.timing import timed
from prefill_measures.ways import Run

KINDS = {
    "attention": ("flash", "fmha", "attention", "prefill", "softmax"),
    "experts": ("grouped", "group_gemm", "groupproblem"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitk", "xmma"),
    "copies": ("memcpy", "memset"),
}
"""Parts of a kernel's name, in the order of asking; the rest is elementwise work, norms, RoPE."""
LONGEST = 8


def kind_of(kernel: str) -> str:
    """`matmul`, `attention`, …, by a kernel's name.

    >>> kind_of("nvjet_tst_128x64"), kind_of("void at::native::elementwise_kernel<4>")
    ('matmul', 'rest')
    """
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "rest")


def breakdown(run: Run, prompts: Prompts, device: torch.device) -> dict[str, Any]:
    """Milliseconds of kernels by kind, their number, and the longest by name, of one batch. The
    sum is less than wall time where the device waits for the host."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        _, wall = timed(lambda: run(prompts), device)
    kernels = [e for e in traced.key_averages() if e.device_type != DeviceType.CPU]
    return {"wall while traced, ms": wall, **by_kind(kernels)}


def by_kind(kernels: Any) -> dict[str, Any]:
    """The same of averages as a profiler gives them, which count microseconds."""
    spent = dict.fromkeys([*KINDS, "rest"], 0.0)
    for kernel in kernels:
        spent[kind_of(kernel.key)] += kernel.self_device_time_total / 1e3
    longest = sorted(kernels, key=lambda k: -k.self_device_time_total)[:LONGEST]
    return {
        "device busy, ms": sum(spent.values()),
        "kernels": sum(kernel.count for kernel in kernels),
        "by kind, ms": spent,
        "longest, ms": {k.key[:80]: k.self_device_time_total / 1e3 for k in longest},
    }
