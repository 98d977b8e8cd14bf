"""What broke once or still does: a hook older than the patch goes, and the patch with it."""

import gc

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import accel
from tests.patches.pair import Pair


def test_a_bare_module_is_plain_again_and_the_report_says_why(sim):
    """Nothing of ours is left on it that could notice."""
    layer = nn.Linear(4, 4).to(sim)
    add_hook_to_module(layer, ModelHook())
    accel.patch(layer, capture="always")
    remove_hook_from_module(layer)
    gc.collect()
    x = torch.ones(2, 4, device=sim)
    with torch.no_grad():
        for _i in range(4):
            assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert "forward" not in vars(layer) or layer.forward.__func__ is nn.Linear.forward
    assert "call accel.patch() again" in accel.report(layer).inactive


def test_a_pipeline(sim):
    both = Pair("sd15", sim)
    accel.unpatch(both.patched)
    add_hook_to_module(both.patched.unet, ModelHook())
    accel.patch(both.patched, capture="always")
    both.picture(0)
    remove_hook_from_module(both.patched.unet)
    gc.collect()
    both.picture(0)
    both.picture(1)
    assert "unet" in {p.name for p in both.report.parts}
    assert both.part("unet").replays > 0


def test_patching_again_repairs_it(sim):
    layer = nn.Linear(4, 4).to(sim)
    add_hook_to_module(layer, ModelHook())
    accel.patch(layer, capture="always")
    remove_hook_from_module(layer)
    gc.collect()
    accel.patch(layer, capture="always")
    with torch.no_grad():
        for _i in range(4):
            layer(torch.ones(2, 4, device=sim))
    assert [p.replays > 0 for p in accel.report(layer).parts] == [True]
