"""torch's own varlen kernel attends as written out prompt by prompt, on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from accel.prefill import torch_attention
from accel.prefill.attention import AttentionGroup, Unsupported
from accel.prefill.torch_attention import TorchBackend
from tests.accel.prefill.attending import PLAIN, RAGGED, WITH_PREFIX, Trial

GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "64": {"head_dim": 64, "value_dim": 64, "scale": 0.125},
    "128": {"head_dim": 128, "value_dim": 128, "scale": 128**-0.5},
    "256": {"head_dim": 256, "value_dim": 256, "scale": 0.0625},
    "odd": {"head_dim": 20, "value_dim": 20},
    "latent": {"kv_heads": 4, "head_dim": 192, "value_dim": 128, "scale": 192**-0.5},
    "window": {"window": 7},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 9, "sinks": True},
    "half": {"dtype": torch.float16},
}
ALLOWED = 2e-2
"""Rounding of bf16 outputs near 2, and of the weights that made them."""


def group_of(name: str) -> AttentionGroup:
    return replace(PLAIN, **{"dtype": torch.bfloat16, **GROUPS[name]})


@pytest.fixture
def cuda() -> torch.device:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("requests", [*RAGGED, *WITH_PREFIX])
def test_ragged_batches_and_prefixes(
    group: str, requests: list[tuple[int, int]], cuda: torch.device
) -> None:
    assert Trial(TorchBackend(cuda), group_of(group), cuda).run(requests) < ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["plain", "window and sinks"])
@pytest.mark.parametrize("requests", RAGGED)
@pytest.mark.parametrize("paged", [False, True])
def test_sentinels_and_pages_change_nothing(
    group: str, requests: list[tuple[int, int]], paged: bool, cuda: torch.device
) -> None:
    trial = Trial(TorchBackend(cuda), group_of(group), cuda, slots=6, static=True)
    assert trial.run(requests, paged=paged) < ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change, says",
    [
        ({"softcap": 30.0}, "no soft-cap"),
        ({"dtype": torch.float32}, "no float32, only half precision"),
        ({"head_dim": 264}, "no head dimension above 256"),
    ],
)
def test_what_the_kernel_cannot_do(change: dict[str, Any], says: str, cuda: torch.device) -> None:
    group = replace(group_of("plain"), **change)
    assert TorchBackend(cuda).objection(group, static=False, paged=False) == says


class OnTheHost(TorchBackend):
    """The backend without a GPU, for what surrounds the kernel."""

    def __init__(self) -> None:
        pass


def flash_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ends: torch.Tensor,
    k_ends: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel promises: causal from the bottom right, rows of no request left as they are,
    the natural log-sum-exp as `[heads, rows]`."""
    assert (dropout, causal, debug) == (0.0, True, False)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    assert q_ends.dtype == k_ends.dtype == torch.int32
    assert window_size_right == (None if window_size_left is None else 0)
    out = torch.full_like(q, math.nan)
    log_sum = torch.full((q.shape[1], q.shape[0]), math.nan, device=q.device)
    edges = zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True)
    for (start, stop), (first, last) in edges:
        assert stop - start <= max_q and last - first <= max_k
        keys, values = (
            x[first:last].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys.float()) * scale
        row = torch.arange(last - first - (stop - start), last - first)[:, None]
        behind = row - torch.arange(last - first)[None, :]
        shut = (behind < 0) | (behind > (max_k if window_size_left is None else window_size_left))
        scores = scores.masked_fill(shut.to(q.device), -math.inf)
        log_sum[:, start:stop] = scores.logsumexp(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float()).to(
            q.dtype
        )
    return out, log_sum


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("64", "128", "256")])
@pytest.mark.parametrize("requests", [*RAGGED, *WITH_PREFIX])
def test_what_surrounds_the_kernel(
    group: str, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "_flash", flash_written_out)
    for slots in (None, 6):
        trial = Trial(OnTheHost(), group_of(group), torch.device("cpu"), slots=slots)
        assert trial.run(requests) < ALLOWED


def test_without_cuda_there_is_no_kernel() -> None:
    with pytest.raises(Unsupported, match="needs CUDA, the model is on cpu"):
        TorchBackend(torch.device("cpu"))
