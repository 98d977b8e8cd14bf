"""Which submodule is the first to differ: sums over the bits of what each of them returns.

The sums are taken on the device, so that a recording of the module computes them too and a replay
shows them. Knows how a module is tapped and recorded in this way. Does not know what went wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accel.memory import Pool
from accel.patches.forward import PatchedMethod
from accel.patches.part import Part
from accel.patches.state import StateProbe
from accel.patches.witness import Run, are_finite
from accel.runner import GraphRunner
from accel.signature import leaves

Sums = dict[str, tuple[int, ...]]
"""By submodule, in the order in which they return: an inner one before those around it."""


class Taps:
    """Sums of every submodule of a part, call by call, while it is open.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> taps = Taps(net)
    >>> with taps.open():
    ...     _ = taps.listening(net.forward)(torch.ones(1, 2))
    >>> list(taps.calls[0])
    ['0', '1']
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[Sums] = []
        self._module = module
        self._now: dict[str, torch.Tensor] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Puts a tap behind every submodule for the length of the context."""
        children = [(name, m) for name, m in self._module.named_modules() if m is not self._module]
        taps = [PatchedMethod(child, "forward", self._tap(name)) for name, child in children]
        for tap in taps:
            tap.install()
        try:
            yield
        finally:
            for tap in reversed(taps):
                tap.retire()

    def _tap(self, name: str) -> Run:
        def tapped(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._now is not None and (sums := _sums(result)) is not None:
                again = sum(key.split(" ")[0] == name for key in self._now)
                self._now[f"{name} ({again + 1})" if again else name] = sums
            return result

        return tapped

    def _with_sums(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, returning what it returns and the sums: for a recording both are results."""

        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self._now = self._now, {}
            try:
                result = function(*args, **kwargs)
                return result, self._now
            finally:
                self._now = outer

        return run

    def listening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, eager; its sums go to `calls`."""
        return self._kept(self._with_sums(function))

    def _kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result, sums = function(*args, **kwargs)
            self.calls.append({name: tuple(x.tolist()) for name, x in sums.items()})
            return result

        return run

    def eagerly(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What stands in a part's place for an eager run."""
        return self.listening(original)(*args, **kwargs)

    @contextlib.contextmanager
    def replaying(self, part: Part) -> Iterator[Run]:
        """What stands in a part's place for runs that record and replay, in a pool of its own."""
        device = part.device()
        assert device is not None  # it was recorded
        pool, probe = Pool(device), StateProbe(part.module)
        runners: dict[str, GraphRunner] = {}

        def replayed(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if part.name not in runners:
                runners[part.name] = GraphRunner(
                    self._with_sums(original),
                    pool=pool,
                    name=part.name,
                    module=part.module,
                    capture="always",
                    probe=probe,
                    veto=probe.veto,
                    remember=probe.remember,
                )
            return self._kept(runners[part.name])(*args, **kwargs)

        try:
            yield replayed
        finally:
            pool.retire()
            pool.close()


def _sums(result: Any) -> torch.Tensor | None:
    """Three sums over the bits (all, every second, every third element: that differences cancel in
    all of them is unlikely), and how many numbers are none. None where nothing can be summed."""
    tensors = [x for x in leaves(result) if isinstance(x, torch.Tensor) and x.numel()]
    found = [_sums_of(x.detach()) for x in tensors if x.layout is torch.strided]
    return torch.stack(found).sum(dim=0) if found else None


def _sums_of(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.clone(memory_format=torch.contiguous_format).view(-1).view(integers[x.element_size()])
    sums = [bits[::stride].sum(dtype=torch.int64) for stride in (1, 2, 3)]
    return torch.stack([*sums, (~are_finite(x)).sum(dtype=torch.int64)])


def first_to_differ(expected: list[Sums], found: list[Sums]) -> str | None:
    """The submodule that is the first to return something else, by its name."""
    for ours, theirs in zip(expected, found, strict=False):
        for name, sums in ours.items():
            if name in theirs and theirs[name] != sums:
                return name.split(" ")[0]
    return None


def first_not_finite(calls: list[Sums]) -> str | None:
    """The submodule that is the first to return a number that is none, by its name."""
    for sums in calls:
        for name, values in sums.items():
            if values[-1]:
                return name.split(" ")[0]
    return None
