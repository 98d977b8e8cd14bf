"""torch's own varlen kernel attends as written out prompt by prompt, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

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


def test_without_cuda_there_is_no_kernel() -> None:
    with pytest.raises(Unsupported, match="needs CUDA, the model is on cpu"):
        TorchBackend(torch.device("cpu"))
