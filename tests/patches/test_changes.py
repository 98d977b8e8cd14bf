"""The report names what made a recording unfit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.patches.pair import Pair

MakePair = Callable[..., Pair]


def _moved(pipe: Any) -> None:
    for parameter in pipe.unet.parameters():
        parameter.data = parameter.data.clone()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weights moved": (_moved, "where the weights lie"),
    "training flag": (lambda pipe: pipe.unet.mid_block.train(), "the training flag of mid_block"),
    "an attribute": (
        lambda pipe: setattr(pipe.unet.up_blocks[0], "s1", 0.5),
        "attribute 's1' of up_blocks.0",
    ),
    "a setting of torch's layer": (
        lambda pipe: setattr(pipe.unet.conv_norm_out, "eps", 0.1),
        "attribute 'eps' of conv_norm_out",
    ),
    "a layer": (
        lambda pipe: setattr(pipe.unet, "conv_act", nn.ReLU()),
        "modules were added, removed or replaced|where the weights lie, or which there are",
    ),
    "precision": (
        lambda pipe: torch.backends.cuda.matmul.__setattr__("allow_tf32", True),
        "torch's switches",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_named(what: str, pair: MakePair) -> None:
    change, words = CHANGES[what]
    both = pair("sd15", text_encoder=False, vae=False)
    for seed in range(3):
        both.picture(seed)
    try:
        both.both(change)
        for seed in range(3):
            both.picture(seed)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    changes = both.part("unet").changes
    assert any(any(w in found for w in words.split("|")) for found in changes), changes
    assert any("changed x" in line for line in str(both.report).splitlines())
    assert both.report.to_dict()["parts"][0]["changes"] == dict(changes)
