"""Kernels of our own: where there are none, and that only such are taken as compute what torch
does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.patches import kernels as rooms
from accel.patches import rotary
from accel.patches.gated import fused_gates
from accel.patches.kernels import kernels_for
from accel.patches.rotary import fused_rotary, turned
from tests.patches.counting_kernels import CountingKernels
from tests.patches.llm_families import own_hidden, prompts_of, tiny_lm

GPU = torch.device("cuda:0")
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    kernels_for.cache_clear()
    yield
    kernels_for.cache_clear()


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What there is to import; its result may be set."""
    importing = mock.Mock(return_value=CountingKernels())
    monkeypatch.setattr(rooms, "import_module", importing)
    return importing


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial for a GPU, without one: its tensors stay where they are drawn."""
    drawn = rooms.drawn
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(rooms, "drawn", lambda *args: drawn(*args).as_subclass(Staying))


class Staying(torch.Tensor):
    """Goes to no device, and is a plain tensor from then on."""

    def to(self, device: Any, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).to(dtype)


def test_tensors_without_memory_have_those_of_the_gpu(
    imported: mock.Mock, on_the_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert kernels_for(torch.device("meta")) is imported.return_value
    assert kernels_for(torch.device("cuda:0")) is imported.return_value
    kernels_for.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels_for(torch.device("meta")) is None


def test_there_are_none_but_for_cuda(sim: torch.device, imported: mock.Mock) -> None:
    assert kernels_for(torch.device("cpu")) is None
    assert kernels_for(sim) is None
    assert imported.call_count == 0


def test_those_that_compute_what_torch_does_are_taken_once(
    imported: mock.Mock, on_the_host: None
) -> None:
    kernels = imported.return_value
    assert kernels_for(GPU) is kernels
    tried = kernels.turns, kernels.gates, kernels.norms
    assert min(tried) > 0 and kernels.tanh == kernels.centred == {False, True}
    assert kernels_for(torch.device("cuda", 0)) is kernels
    assert (kernels.turns, kernels.gates, kernels.norms) == tried
    imported.assert_called_once_with("accel.patches.triton_kernels")


def test_the_trial_is_out_of_sight_of_modes_and_gradients(
    imported: mock.Mock, on_the_host: None
) -> None:
    with torch.inference_mode(), FakeTensorMode():
        assert kernels_for(GPU) is imported.return_value


class SineForCosine(CountingKernels):
    def turn(self, q: Any, k: Any, cos: Any, sin: Any) -> Pair:
        return super().turn(q, k, sin, cos)


class Back(CountingKernels):
    def turn(self, q: Any, k: Any, cos: Any, sin: Any) -> Pair:
        return super().turn(q, k, cos, -sin)


class KeysAsTheyWere(CountingKernels):
    def turn(self, q: Any, k: Any, cos: Any, sin: Any) -> Pair:
        return super().turn(q, k, cos, sin)[0], k


class Exchanged(CountingKernels):
    def gate(self, gated: Any, by: Any, tanh: bool) -> torch.Tensor:
        return super().gate(by, gated, tanh)


class OneActivation(CountingKernels):
    def gate(self, gated: Any, by: Any, tanh: bool) -> torch.Tensor:
        return super().gate(gated, by, False)


class NotANumber(CountingKernels):
    def gate(self, gated: Any, by: Any, tanh: bool) -> torch.Tensor:
        return super().gate(gated, by, tanh) / 0


class Wide(CountingKernels):
    def gate(self, gated: Any, by: Any, tanh: bool) -> torch.Tensor:
        return super().gate(gated, by, tanh).float()


class WrongInHalf(CountingKernels):
    def turn(self, q: Any, k: Any, cos: Any, sin: Any) -> Pair:
        return super().turn(q, k, cos, sin if q.dtype == torch.float32 else cos)


class WithoutItsWeight(CountingKernels):
    def norm(self, rows: Any, weight: Any, *settings: Any) -> torch.Tensor:
        return super().norm(rows, torch.ones_like(weight), *settings)


class NeverCentred(CountingKernels):
    def norm(self, rows: Any, weight: Any, epsilon: float, zero_centred: bool) -> torch.Tensor:
        return super().norm(rows, weight, epsilon, False)


class WithoutAnEpsilon(CountingKernels):
    def norm(self, rows: Any, weight: Any, epsilon: float, zero_centred: bool) -> torch.Tensor:
        return super().norm(rows, weight, 0.0, zero_centred)


class OneRowForAll(CountingKernels):
    def norm(self, rows: Any, *settings: Any) -> torch.Tensor:
        return super().norm(rows[:1].expand_as(rows), *settings)


class NormRoundedTwice(CountingKernels):
    """Wrong enough in one precision only."""

    def norm(self, rows: Any, *settings: Any) -> torch.Tensor:
        found = super().norm(rows, *settings)
        return found.half().to(rows.dtype) if rows.dtype == torch.float32 else found


class WrongLater(CountingKernels):
    """Right until a kind of launches comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def again(self, *kind: Any) -> bool:
        known = kind in self.seen
        self.seen.add(kind)
        return known


class NormsWrongLater(WrongLater):
    def norm(self, rows: Any, weight: Any, epsilon: float, zero_centred: bool) -> torch.Tensor:
        found = super().norm(rows, weight, epsilon, zero_centred)
        return found + 1 if self.again(rows.dtype, zero_centred) else found


class TurnsWrongLater(WrongLater):
    def turn(self, q: Any, k: Any, cos: Any, sin: Any) -> Pair:
        found = super().turn(q, k, cos, sin)
        return found[::-1] if self.again(q.dtype) else found


class GatesWrongLater(WrongLater):
    def gate(self, gated: Any, by: Any, tanh: bool) -> torch.Tensor:
        return super().gate(gated, by, tanh ^ self.again(gated.dtype, tanh))


class DoesNotCompile(CountingKernels):
    def gate(self, gated: Any, by: Any, tanh: bool) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")


FAULTY = [
    SineForCosine,
    Back,
    KeysAsTheyWere,
    Exchanged,
    OneActivation,
    NotANumber,
    Wide,
    WrongInHalf,
    WithoutItsWeight,
    NeverCentred,
    WithoutAnEpsilon,
    OneRowForAll,
    NormRoundedTwice,
    NormsWrongLater,
    TurnsWrongLater,
    GatesWrongLater,
    DoesNotCompile,
]


@pytest.mark.parametrize("faulty", FAULTY)
def test_those_that_do_not_are_not_taken(
    faulty: type[CountingKernels], imported: mock.Mock, on_the_host: None
) -> None:
    imported.return_value = faulty()
    assert kernels_for(GPU) is None and imported.call_count == 1


@pytest.mark.parametrize("error", [ModuleNotFoundError("triton"), OSError("libcuda"), KeyError(0)])
def test_without_triton_there_are_none(
    error: Exception, imported: mock.Mock, on_the_host: None
) -> None:
    imported.side_effect = error
    assert kernels_for(GPU) is None
    assert kernels_for(GPU) is None and imported.call_count == 1


def test_without_a_gpu_there_are_none(imported: mock.Mock) -> None:
    absent = torch.device("cuda", 99)
    assert kernels_for(absent) is None and imported.call_count == 1


def test_without_kernels_the_models_own_units_and_the_fallback_run(
    device: torch.device, imported: mock.Mock
) -> None:
    imported.return_value = DoesNotCompile()
    model, (prompt,) = tiny_lm("llama", device), prompts_of(12)
    own, heard = own_hidden(model, prompt), []
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn.register_forward_hook(lambda *call: heard.append(call[0]))
    with (
        mock.patch.object(rotary, "turned", wraps=turned) as counted,
        fused_rotary(model),
        fused_gates(model, device) as count,
    ):
        ours = own_hidden(model, prompt)
    assert count == 0 and len(heard) == 2
    assert counted.call_count >= 4  # and of a GPU the trial's
    assert (ours - own).abs().max() < 1e-5


@pytest.mark.gpu
def test_on_a_gpu_with_triton_they_work() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("triton")
    assert kernels_for(GPU) is import_module("accel.patches.triton_kernels")
