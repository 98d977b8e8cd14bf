"""The reference backend attends as written out prompt by prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.prefill.reference_attention import ReferenceBackend
from tests.accel.prefill.attending import PLAIN, RAGGED, WITH_PREFIX, Trial

GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "soft-cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "latent": {"kv_heads": 4, "head_dim": 24},
    "everything": {"window": 5, "softcap": 3.0, "sinks": True},
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("requests", [*RAGGED, *WITH_PREFIX])
def test_ragged_batches_and_prefixes(
    group: str, requests: list[tuple[int, int]], device: torch.device
) -> None:
    trial = Trial(ReferenceBackend(), replace(PLAIN, **GROUPS[group]), device)
    assert trial.run(requests) < 1e-5


@pytest.mark.parametrize("requests", RAGGED)
@pytest.mark.parametrize("paged", [False, True])
def test_sentinels_and_pages_change_nothing(
    requests: list[tuple[int, int]], paged: bool, device: torch.device
) -> None:
    trial = Trial(ReferenceBackend(), PLAIN, device, slots=6, static=True)
    assert trial.run(requests, paged=paged) < 1e-5
