"""Every tiny denoiser family through a runner: recorded and equal bit for bit, or declined.

Fresh latents, prompts and timesteps at every call, a second shape, and back to the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.memory import Pool
from accel.pipelines.tiny import FAMILIES
from accel.runner import GraphRunner
from accel.signature import leaves, map_tree
from tests.accel.same import assert_same
from tests.accel.twin import watching

CALLS = [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (4, 0)]
"""Seed and variant, that is shape, of each call."""

NEVER_RECORDED = {
    "glm_image_cached": "kv_caches is a GlmImageKVCache, whose contents may change",
    "omnigen": "the model keeps a tensor that this call made",  # a new table in every call
    "sana_wm_refiner_cached": "kv_cache is a SanaWMRefinerKVCache, whose contents may change",
    "wan_animate2": "kv_cache is a WanAnimate2KVCache, whose contents may change",
}
"""Families that no recording fits, and what the report says about them."""
NOT_DETERMINISTIC = {"nucleus"}
"""Its experts' shares are added up in any order: on a GPU two eager calls differ, unless torch is
asked for deterministic algorithms."""
NEVER_REPLAYED = {"hidream"}
"""Experts' loads, other ones in every call, steer Python: each recording fits its own call only."""


@pytest.fixture(autouse=True)
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    call = getattr(request.node, "callspec", None)
    wanted = call is not None and call.params["name"] in NOT_DETERMINISTIC
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def moved(tree: Any, device: torch.device | str) -> Any:
    return map_tree(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_eager(name: str, device: torch.device) -> None:
    family = FAMILIES[name]
    eager_on = "cpu" if device.type == "sim" else device  # whose bits are the CPU's
    plain, watched = family.make(seed=0).to(eager_on), family.make(seed=0).to(device)
    options = {"name": name, "module": watched, **watching(watched)}
    runner = GraphRunner(watched, pool=Pool(device), capture="always", **options)
    for seed, variant in CALLS:
        with torch.no_grad():
            expected = plain(**moved(family.inputs(seed, variant), eager_on))
            result = runner(**moved(family.inputs(seed, variant), device))
        assert_same(moved(result, "cpu"), moved(expected, "cpu"))
        assert any(isinstance(x, Tensor) for x in leaves(result))
    report = runner.report
    assert report.captures + report.replays + report.eager_calls == len(CALLS)
    if name in NEVER_RECORDED:
        assert report.captures == 0
        assert any(NEVER_RECORDED[name] in reason for reason in report.reasons), report
    else:
        assert report.captures >= 2, report
        assert report.replays >= (name not in NEVER_REPLAYED), report


def test_nearly_every_family_is_recorded() -> None:
    assert len(FAMILIES) - len(NEVER_RECORDED) >= 50
