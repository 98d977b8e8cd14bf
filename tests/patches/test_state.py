"""A recording is used only in the state that it was made in: what of that is looked at."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook, apply_layerwise_casting
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

import accel
from accel.patches.attention import attending
from accel.patches.norms import fused_norms
from accel.patches.state import StateProbe
from accel.pipelines import tiny
from tests.patches.llm_families import own_hidden, prompts_of, tiny_lm
from tests.patches.pair import Pair

MakePair = Callable[..., Pair]


class ScaleProcessor:
    """What attention processors look like: plain objects that carry scales."""

    def __init__(self) -> None:
        self.scale = [1.0, 2.0]
        self.strength = 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.processor = ScaleProcessor()
        self.scales = [1.0, [2.0]]
        self.options = {"a": {"b": 1}}
        self.ordered = OrderedDict(a=1)
        self.names = {"x"}
        self.gate = 0.5
        self.kept = {"tensors": (torch.zeros(2),), "arrays": [np.zeros(2)], "bytes": bytearray(2)}
        self.table = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gate


def hook(module: nn.Module, *args: Any) -> None:
    """Does nothing."""


CHANGES: dict[str, Callable[[Block], Any]] = {
    "a number": lambda m: setattr(m, "gate", 0.7),
    "a new attribute": lambda m: setattr(m, "s1", 0.9),
    "an attribute gone": lambda m: delattr(m, "gate"),
    "an attribute renamed": lambda m: setattr(m, "board", m.__dict__.pop("table")),
    "a host tensor in a tuple in place": lambda m: m.kept["tensors"][0].add_(1),
    "an array in a list in place": lambda m: m.kept["arrays"][0].fill(1),
    "bytes in a dict in place": lambda m: m.kept["bytes"].append(1),
    "a key of a dict": lambda m: m.kept.update(octets=m.kept.pop("bytes")),
    "a list in place": lambda m: m.scales.__setitem__(0, 3.0),
    "a nested list in place": lambda m: m.scales[1].append(3.0),
    "a nested dict in place": lambda m: m.options["a"].update(b=2),
    "an ordered dict in place": lambda m: m.ordered.update(a=2),
    "a set in place": lambda m: m.names.add("y"),
    "a processor's scale": lambda m: setattr(m.processor, "strength", 0.5),
    "a processor's scale in place": lambda m: m.processor.scale.__setitem__(0, 0.5),
    "another processor": lambda m: setattr(m, "processor", ScaleProcessor()),
    "another tensor": lambda m: setattr(m, "table", torch.zeros(2)),
    "a host tensor in place": lambda m: m.table.add_(1),
    "a view of a host tensor in place": lambda m: m.table[1:].zero_(),
    "training": lambda m: m.eval(),
    "one child's training": lambda m: m.drop.eval(),
    "a torch hook": lambda m: m.register_forward_hook(hook),
    "a torch hook on a child": lambda m: m.layer.register_forward_pre_hook(hook),
    "another child": lambda m: setattr(m, "layer", nn.Linear(2, 2)),
    "a child's forward": lambda m: setattr(m.layer, "forward", lambda x: x),
    "a diffusers hook": lambda m: HookRegistry.check_if_exists_or_initialize(m).register_hook(
        ModelHook(), "test"
    ),
    "a setting of a torch layer": lambda m: setattr(m.drop, "p", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_stays_seen(change: str) -> None:
    block = Block()
    probe = StateProbe(block)
    before = [probe(), probe()]
    assert before[0] == before[1]
    CHANGES[change](block)
    assert probe() != before[0]
    assert probe() != before[1]
    assert probe() == probe()


def test_values_of_weights_and_calls_are_no_change() -> None:
    block = Block()
    probe = StateProbe(block)
    before = probe()
    with torch.no_grad():
        block.layer.weight.mul_(2)
        block(torch.ones(2))
    assert probe() == before


def test_an_empty_hook_registry_is_no_change() -> None:
    """`cache_context` leaves one behind."""
    block = Block()
    HookRegistry.check_if_exists_or_initialize(block)
    probe = StateProbe(block)
    before = probe()
    HookRegistry.check_if_exists_or_initialize(block)
    assert probe() == before


def test_the_attention_backend_is_part_of_it() -> None:
    block = Block()
    probe = StateProbe(block)
    before = probe()
    with attention_backend(AttentionBackendName._NATIVE_MATH):
        assert probe() != before
    assert probe() == before


def test_a_change_taken_back_is_the_old_state() -> None:
    block = Block()
    probe = StateProbe(block)
    before = probe()
    block.gate = 0.7
    assert probe() != before
    block.gate = 0.5
    assert probe() == before


class TestVeto:
    """Why nothing may be recorded just now."""

    def test_nothing_speaks_against_a_plain_module(self) -> None:
        assert StateProbe(Block()).veto() is None

    def test_layerwise_casting(self) -> None:
        model = tiny.FAMILIES["flux"].make()
        apply_layerwise_casting(model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        assert StateProbe(model).veto() == "layerwise casting is on"

    @pytest.mark.parametrize(
        "kind", ["register_module_forward_hook", "register_module_forward_pre_hook"]
    )
    def test_a_users_hook_on_all_modules(self, kind: str) -> None:
        handle = getattr(nn.modules.module, kind)(lambda *given: None)
        try:
            assert "hook on all modules" in str(StateProbe(Block()).veto())
        finally:
            handle.remove()
        assert StateProbe(Block()).veto() is None

    def test_a_device_map_over_several_devices(self) -> None:
        block: Any = Block()
        block.hf_device_map = {"layer": 0, "drop": 1}
        assert "several devices" in str(StateProbe(block).veto())
        block.hf_device_map = {"layer": 0, "drop": 0}
        assert StateProbe(block).veto() is None


def every(kind: type, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Changes every module of a kind in a pipeline's UNet."""

    def do(pipe: Any) -> None:
        for module in pipe.unet.modules():
            if isinstance(module, kind):
                change(module)

    return do


LIFE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "free u": (
        lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
        lambda pipe: pipe.disable_freeu(),
    ),
    "seamless tiling": (
        every(nn.Conv2d, lambda m: setattr(m, "padding_mode", "circular")),
        every(nn.Conv2d, lambda m: setattr(m, "padding_mode", "zeros")),
    ),
    "epsilon": (
        every(nn.GroupNorm, lambda m: setattr(m, "eps", 0.1)),
        every(nn.GroupNorm, lambda m: setattr(m, "eps", 1e-5)),
    ),
    "a hook on a block": (
        lambda pipe: pipe.unet.mid_block.register_forward_hook(lambda m, a, out: out * 2),
        lambda pipe: pipe.unet.mid_block._forward_hooks.clear(),
    ),
    "weights to another dtype and back": (
        lambda pipe: pipe.unet.conv_out.weight.data.mul_(2),
        lambda pipe: pipe.unet.conv_out.weight.data.div_(2),
    ),
}


@pytest.mark.parametrize("what", LIFE)
def test_pictures_follow_the_state(what: str, pair: MakePair) -> None:
    do, undo = LIFE[what]
    both = pair("sd15", text_encoder=False, vae=False)
    first = both.picture(0)
    both.both(do)
    second = both.picture(0)
    assert not np.array_equal(first, second)
    both.both(undo)
    third = both.picture(0)
    if what != "epsilon":  # the model has several
        assert np.array_equal(first, third)
    assert both.part("unet").replays > 0


def test_attention_processors_and_slicing(pair: MakePair) -> None:
    both = pair("sd15")
    both.picture(0)
    both.both(lambda pipe: pipe.unet.set_attn_processor(AttnProcessor()))
    both.picture(1)
    both.both(lambda pipe: pipe.enable_attention_slicing(1))
    both.picture(2)
    both.both(lambda pipe: pipe.vae.enable_tiling())
    both.picture(3)
    both.both(lambda pipe: pipe.unet.fuse_qkv_projections())
    both.picture(4)


def test_an_object_lives_as_long_as_a_state_that_names_it() -> None:
    """Else a new object could take its address, and pass for it."""

    class Table:
        pass

    layer = nn.Sequential(_Own())
    layer[0].table = Table()
    old = weakref.ref(layer[0].table)
    probe = StateProbe(layer)
    before = probe()
    layer[0].table = Table()
    assert probe() != before
    gc.collect()
    assert old() is not None
    del before
    gc.collect()
    assert old() is None


def test_what_a_runner_sets_for_one_call_is_not_put_back_after_it() -> None:
    """Another thread's recording of the same decoder was refused: what it found comes back."""
    model = tiny_lm("llama", torch.device("cpu"))
    prompt = prompts_of(9)[0]
    own = own_hidden(model, prompt)
    inside, go_on = threading.Event(), threading.Event()

    def prefill() -> None:
        with fused_norms(model), attending(model.model, lambda *of: of[0]):
            inside.set()
            go_on.wait()

    running = threading.Thread(target=prefill)
    running.start()
    inside.wait()
    probe = StateProbe(model)
    probe()
    put_back = probe.remember()
    go_on.set()
    running.join()
    model.config.note = "by the call that did not count"
    put_back()
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(m) for m in model.modules())
    assert not hasattr(model.config, "note")
    assert torch.equal(own_hidden(model, prompt), own)


class _Own(nn.Module):
    """A module that is not torch's own: its attributes are looked at."""


class Around(nn.Module):
    """A layer, and whatever else it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def raises(self: Any) -> Any:
    raise LookupError("ask me not")


class RaisingList(list[Any]):
    __len__ = raises


class RaisingDict(dict[str, Any]):
    __iter__ = keys = values = items = copy = raises


def dead_proxy() -> list[Any]:
    return [weakref.proxy(nn.Identity())]


UNREADABLE: dict[str, Callable[[], Any]] = {
    "a reference to what is gone": dead_proxy,
    "a list without a length": lambda: RaisingList([1]),
    "a dict that shows nothing": lambda: RaisingDict(a=1),
}


@pytest.mark.parametrize("when", ["from the first call", "from the fifth"])
@pytest.mark.parametrize("what", UNREADABLE)
def test_a_state_that_cannot_be_read_is_eager_and_fails_no_call(
    what: str, when: str, device: torch.device
) -> None:
    layer, x = Around().to(device).requires_grad_(False), torch.ones(2, 4, device=device)
    if when == "from the first call":
        layer.odd = UNREADABLE[what]()
    accel.patch(layer, capture="always")
    with torch.no_grad():
        for call in range(8):
            if call == 4:
                layer.odd = UNREADABLE[what]()
            assert torch.equal(layer(x), layer.layer(x))
        report = accel.report(layer)["module"]
        assert report.replays == (0 if when == "from the first call" else 2)
        assert any("cannot be read: " in reason for reason in report.reasons)
        del layer.odd
        for _ in range(4):
            assert torch.equal(layer(x), layer.layer(x))
    assert report.captures > 0
