"""Launches after the first of a kind: through what the first compiled, and through no other's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from accel.patches import launches
from accel.patches.launches import kind_of, launch

GRID, SHAPE = (5, 2), {"WIDTH": 8, "TANH": True}


class Kernel:
    """Stands for a jitted function: says how each launch came about, and compiles one more kernel
    for every launch that it is asked for."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.compiled = 0
        self.fn = lambda: None

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            self.compiled += 1
            self.said.append(("anew", grid, args, more))
            return self.made(self.compiled)

        return run

    def made(self, number: int) -> Any:
        """What is compiled: it is launched with all arguments in a row, and a grid of three."""
        found = mock.MagicMock()
        found.__getitem__.side_effect = lambda grid: (
            lambda *args: self.said.append((number, grid, args))
        )
        return found


class Interpreted(Kernel):
    """Under Triton's interpreter nothing is compiled."""

    def made(self, number: int) -> Any:
        return None


class Unfit(Kernel):
    """Does not compile the first time."""

    def made(self, number: int) -> Any:
        if number == 1:
            raise RuntimeError("out of resource: shared memory")
        return super().made(number)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_compiled", {})


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def aligned(count: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.zeros(count, dtype=dtype)
    assert found.data_ptr() % 16 == 0
    return found


def test_the_first_of_a_kind_goes_by_triton_and_others_straight(kernel: Kernel) -> None:
    x, other = aligned(), aligned()
    launch(kernel, GRID, (x, 6, 0.5), SHAPE, warps=8)
    launch(kernel, (7, 1), (other, 9, 1.5), SHAPE, warps=8)
    anew, (number, grid, args) = kernel.said
    assert (anew[:2], anew[3]) == (("anew", GRID), {**SHAPE, "num_warps": 8})
    assert anew[2][0] is x and anew[2][1:] == (6, 0.5)
    assert (number, grid) == (1, (7, 1, 1))
    assert args[0] is other and args[1:] == (9, 1.5, 8, True)


OTHERS: dict[str, dict[str, Any]] = {
    "another precision": {"args": (aligned(64, torch.float16), 6, 0.5)},
    "another alignment": {"args": (aligned()[1:], 6, 0.5)},
    "another device": {"args": (torch.zeros(64, device="meta"), 6, 0.5)},
    "a one": {"args": (aligned(), 1, 0.5)},
    "a multiple": {"args": (aligned(), 32, 0.5)},
    "a zero": {"args": (aligned(), 0, 0.5)},
    "above 32 bits": {"args": (aligned(), 2**31 + 6, 0.5)},
    "below 32 bits": {"args": (aligned(), -(2**31) - 6, 0.5)},
    "a float for an integer": {"args": (aligned(), 6.0, 0.5)},
    "an integer for a float": {"args": (aligned(), 6, 1)},
    "another width": {"shape": {"WIDTH": 16, "TANH": True}},
    "another activation": {"shape": {"WIDTH": 8, "TANH": False}},
    "more warps": {"warps": 8},
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_another_kind_is_compiled_for_itself(changed: dict[str, Any], kernel: Kernel) -> None:
    first = {"grid": GRID, "args": (aligned(), 6, 0.5), "shape": SHAPE}
    other = {**first, **changed}
    for given in (first, other, first, other):
        launch(kernel, **given)
    assert [x[0] for x in kernel.said] == ["anew", "anew", 1, 2]


def test_another_kernel_is_another_kind(kernel: Kernel) -> None:
    other = Kernel()
    for either in (kernel, other, kernel, other):
        launch(either, GRID, (aligned(), 6), SHAPE)
    assert [x[0] for x in kernel.said] == [x[0] for x in other.said] == ["anew", 1]


def test_many_lengths_are_few_kinds(kernel: Kernel) -> None:
    """An eager pass of whatever length finds what another one left."""
    for count in range(1, 5000):
        launch(kernel, (count, 1), (aligned(), count, 1e-6 * count), SHAPE)
    assert kernel.compiled == len(launches._compiled) == 3
    assert [x[0] for x in kernel.said[1000:1010]].count("anew") == 0


def test_kinds_are_told_apart_as_triton_does() -> None:
    """Asked of Triton's own code for it, where that is there."""
    jit = pytest.importorskip("triton.runtime.jit")
    if not hasattr(jit, "native_specialize_impl"):
        pytest.skip("before Triton 3.6")
    backend = mock.Mock(supports_native_tensor_specialization=True)
    half, odd, steps = aligned(64, torch.float16), aligned()[1:], (-1, 0, 1)
    edges = (x + step for x in (0, 16, -16, 2**31, -(2**31), 2**32) for step in steps)
    given: list[Any] = [aligned(), aligned(), half, half[1:], odd, odd[1:], 0.5, 1.0, True, None]
    given += edges
    own = [jit.native_specialize_impl(backend, x, False, True, True) for x in given]
    for x, of_x in zip(given, own, strict=True):
        for y, of_y in zip(given, own, strict=True):
            assert (kind_of(x) == kind_of(y)) is (of_x == of_y), (x, y)


def test_interpreted_kernels_run_every_time() -> None:
    kernel = Interpreted()
    for _ in range(3):
        launch(kernel, GRID, (aligned(), 6), SHAPE)
    assert [x[0] for x in kernel.said] == ["anew"] * 3


def test_of_one_that_does_not_compile_nothing_is_kept() -> None:
    kernel = Unfit()
    with pytest.raises(RuntimeError, match="out of resource"):
        launch(kernel, GRID, (aligned(), 6), SHAPE)
    assert launches._compiled == {}
    launch(kernel, GRID, (aligned(), 6), SHAPE)
    launch(kernel, GRID, (aligned(), 6), SHAPE)
    assert [x[0] for x in kernel.said] == ["anew", "anew", 2]


class Slow(Kernel):
    """Takes its time, and notes whether another thread came in meanwhile."""

    inside, met = 0, False

    def made(self, number: int) -> Any:
        type(self).inside += 1
        time.sleep(0.002)
        type(self).met |= self.inside > 1
        type(self).inside -= 1
        return super().made(number)


def test_threads_compile_one_after_the_other_and_launch_all_that_they_are_asked_for() -> None:
    kernel, begin = Slow(), threading.Barrier(4)

    def run() -> None:
        begin.wait()
        for count in (3, 16, 1, 5):
            launch(kernel, GRID, (aligned(), count), SHAPE)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not kernel.met and len(kernel.said) == 16
    assert len(launches._compiled) == 3
