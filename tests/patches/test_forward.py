"""A replaced method: looks as before, comes off exactly, whatever others wrapped around it."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook as AcceleratHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from accel.patches.forward import ForOneThread, PatchedMethod


class Doubles(nn.Module):
    """A module whose forward can be told from the patch's."""

    def forward(self, x: Tensor, scale: float = 2.0, *, shift: float | None = None) -> Tensor:
        """Scales."""
        return x * scale + (shift or 0.0)


def patched(module: nn.Module, calls: list[Any] | None = None) -> PatchedMethod:
    def instead(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if calls is not None:
            calls.append((args, kwargs))
        return original(*args, **kwargs) + 100

    method = PatchedMethod(module, "forward", instead)
    method.install()
    return method


X = torch.ones(2)


def test_what_runs_instead_gets_the_original_and_the_arguments() -> None:
    module, calls = Doubles(), []
    patched(module, calls)
    assert module(X, 3.0, shift=1.0).tolist() == [104.0, 104.0]
    assert calls == [((X, 3.0), {"shift": 1.0})]


def test_it_looks_like_the_method() -> None:
    module = Doubles()
    patched(module)
    assert inspect.signature(module.forward) == inspect.signature(Doubles().forward)
    assert module.forward.__name__ == "forward"
    assert module.forward.__doc__ == "Scales."
    assert "shift" in inspect.signature(module.forward).parameters


def test_it_has_what_a_method_has() -> None:
    """Some bind a forward to another module: `module.forward.__func__.__get__(other)`."""
    module, other = Doubles(), Doubles()
    method = module.forward
    PatchedMethod(module, "forward", lambda original, args, kwargs: None).install()
    for name in ("__self__", "__func__", "__code__", "__defaults__"):
        assert getattr(module.forward, name) is getattr(method, name)
    assert module.forward.__func__.__get__(other).__self__ is other
    assert not hasattr(module.forward, "no_such_attribute")


def test_retired_nothing_is_left() -> None:
    module = Doubles()
    before = dict(vars(module))
    kept = patched(module).__class__ and module.forward
    vars(module)["forward"].retire()
    assert dict(vars(module)) == before
    assert isinstance(module.forward, types.MethodType)
    assert kept(X).tolist() == [2.0, 2.0]  # a reference that someone kept is the original now


def test_an_instances_own_forward_comes_back() -> None:
    module = Doubles()
    own = lambda x: x - 1  # noqa: E731
    module.forward = own
    method = patched(module)
    assert module(X).tolist() == [100.0, 100.0]
    method.retire()
    assert vars(module)["forward"] is own


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_the_plain_module(again: Callable[[Any], Any]) -> None:
    whole = nn.Sequential(Doubles(), nn.Linear(2, 2))
    patched(whole[0])
    copied = again(whole)
    assert copied[0](X).tolist() == [2.0, 2.0]
    assert copied[0].forward.__self__ is copied[0]
    assert whole[0](X).tolist() == [102.0, 102.0]


def test_a_copy_of_the_method_alone_is_the_plain_method() -> None:
    module = Doubles()
    method = patched(module)
    assert copy.deepcopy(method)(X).tolist() == [2.0, 2.0]


class OfAccelerate(AcceleratHook):
    """Adds 1000 to what comes out."""

    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output + 1000


class OfDiffusers(ModelHook):
    """Adds 10000 to what comes out."""

    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output + 10000


class Patch:
    """Puts the patch on and takes it off, as the hooks are."""

    value = 100.0

    def on(self, module: nn.Module) -> None:
        self.method = patched(module)

    def off(self, module: nn.Module) -> None:
        self.method.retire()


class Accelerate(Patch):
    value = 1000.0

    def on(self, module: nn.Module) -> None:
        add_hook_to_module(module, OfAccelerate())

    def off(self, module: nn.Module) -> None:
        remove_hook_from_module(module)


class Diffusers(Patch):
    value = 10000.0

    def on(self, module: nn.Module) -> None:
        HookRegistry.check_if_exists_or_initialize(module).register_hook(OfDiffusers(), "test")

    def off(self, module: nn.Module) -> None:
        HookRegistry.check_if_exists_or_initialize(module).remove_hook("test")


def _order(on: Any, off: Any) -> Any:
    names = "-".join(kind.__name__ for kind in (*on, *off))
    lost = on[1] is Patch and off[0] is not Patch
    reason = "a hook below the patch takes the patch along when it goes"
    return pytest.param(
        on, off, id=names, marks=[pytest.mark.xfail(strict=True, reason=reason)] * lost
    )


ORDERS = [
    _order(on, off)
    for kinds in ([Patch, Accelerate], [Patch, Diffusers])
    for on in itertools.permutations(kinds)
    for off in itertools.permutations(kinds)
]


@pytest.mark.parametrize(("on", "off"), ORDERS)
def test_hooks_added_and_removed_in_any_order(on: Any, off: Any) -> None:
    module = Doubles()
    layers = {kind: kind() for kind in on}
    expected = 2.0
    for kind in on:
        layers[kind].on(module)
        expected += kind.value
        assert module(X)[0].item() == expected
    for kind in off:
        layers[kind].off(module)
        expected -= kind.value
        assert module(X)[0].item() == expected
    assert module.forward.__func__ is Doubles.forward


def test_torchs_own_hooks_stay(device: torch.device) -> None:
    module = Doubles().to(device)
    seen: list[str] = []
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    method = patched(module)
    module.register_forward_hook(lambda m, args, out: seen.append("after"))
    module(torch.ones(2, device=device))
    method.retire()
    module(torch.ones(2, device=device))
    assert seen == ["before", "after"] * 2


def for_this_thread(module: nn.Module) -> ForOneThread:
    """Adds 100 to what the original returns."""
    method = ForOneThread(module, lambda own, args, kwargs: own(*args, **kwargs) + 100)
    method.install()
    return method


def test_what_is_for_one_thread_is_the_original_in_others(device: torch.device) -> None:
    module, found, x = Doubles().to(device), [], torch.ones(2, device=device)
    method = for_this_thread(module)
    elsewhere = threading.Thread(target=lambda: found.append(module(x, shift=1.0)))
    elsewhere.start()
    elsewhere.join()
    assert found[0].tolist() == [3.0, 3.0]
    assert module(x, 3.0, shift=1.0).tolist() == [104.0, 104.0]
    method.retire()


def test_made_in_another_thread_it_is_for_that_one() -> None:
    module = Doubles()
    elsewhere = threading.Thread(target=lambda: for_this_thread(module))
    elsewhere.start()
    elsewhere.join()
    assert isinstance(module.forward, ForOneThread)
    assert threading.current_thread() is not elsewhere and module(X).tolist() == [2.0, 2.0]


def test_of_one_thread_nothing_is_left_either() -> None:
    module, with_its_own = Doubles(), Doubles()
    own = lambda x: x - 1  # noqa: E731
    with_its_own.forward = own
    before = dict(vars(module))
    methods = [for_this_thread(m) for m in (module, with_its_own)]
    assert with_its_own(X).tolist() == [100.0, 100.0]
    kept = module.forward
    for method in methods:
        method.retire()
    assert dict(vars(module)) == before and vars(with_its_own)["forward"] is own
    assert kept(X).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_plain_in_the_one_thread_too(again: Callable[[Any], Any]) -> None:
    whole = nn.Sequential(Doubles(), nn.Linear(2, 2))
    method = for_this_thread(whole[0])
    copied = again(whole)
    method.retire()
    assert copied[0](X).tolist() == [2.0, 2.0]
    assert copied[0].forward.__self__ is copied[0]


def test_an_error_in_the_one_thread_comes_through() -> None:
    module = Doubles()

    def failing(own: Any, args: Any, kwargs: Any) -> Any:
        raise ZeroDivisionError

    method = ForOneThread(module, failing)
    method.install()
    with pytest.raises(ZeroDivisionError):
        module(X)
    method.retire()
    assert module(X).tolist() == [2.0, 2.0]


def test_compiled_it_is_the_original() -> None:
    module = Doubles()
    method = for_this_thread(module)
    compiled = torch.compile(lambda x: module(x), backend="eager")
    assert compiled(X).tolist() == [2.0, 2.0] and module(X).tolist() == [102.0, 102.0]
    method.retire()
