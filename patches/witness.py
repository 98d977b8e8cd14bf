"""What the parts of a pipeline take and give in one run, call by call, as bytes to compare.

Knows how a run is watched without changing it: at the place where each part is patched, below
everyone's hooks. Does not know which runs are made nor what a difference means.

Watching makes the host wait for the device around every call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from accel.layout import bytes_of
from accel.patches.part import Part
from accel.signature import is_value, leaves

KEPT_BYTES = 2**28
"""Outputs of one run that are kept on the host as they are; of what comes after, only a hash."""
OUTPUT = "output"
"""The component's name under which what the pipeline itself returns is listed, last."""
GIVEN_OTHERS = "what it is given already differs"
RETURNS_OTHERS = "what it returns differs"

Run = Callable[[Callable[..., Any], Any, Any], Any]


@dataclass
class Seen:
    """One call of a component: hashes of all that went in and came out.

    `call` counts the component's calls in the run and `step` the scheduler's steps before it, both
    from 0; `step` is None outside the denoising loop. `kept` holds, on the host, the tensors that
    came out, if there was room. `finite` says that none of their numbers is infinite or NaN.
    """

    component: str
    call: int
    step: int | None
    inputs: list[bytes]
    outputs: list[bytes]
    finite: bool
    kept: list[torch.Tensor] | None


@dataclass
class Witness:
    """Watches `parts` and counts the steps of `schedulers` while it is open.

    Outputs are kept as far as `room`, in bytes, goes; if `only` names a call (component and number)
    that of this one alone; if `expected` holds another run's calls, the first that is not the same.
    """

    parts: Sequence[Part]
    schedulers: Sequence[Any] = ()
    only: tuple[str, int] | None = None
    expected: list[Seen] | None = None
    room: int = KEPT_BYTES
    calls: list[Seen] = field(default_factory=list)
    _steps: int = 0
    _differ: int = 0
    _inside: bool = False
    _counts: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def watching(self, run: Callable[[Part, Run], Run]) -> Iterator[None]:
        """While open, calls of a part are done by `run(part, what it does otherwise)`."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                make = functools.partial(self._watched, part, run)
                stack.enter_context(in_its_place(part, make))
            for scheduler in self.schedulers:
                stack.enter_context(self._counted(scheduler))
            yield
        if not self._steps:
            for seen in self.calls:
                seen.step = None

    def finish(self, result: Any) -> None:
        """Takes what the pipeline returned: the last of the calls."""
        self._see(OUTPUT, None, [], result)

    def _watched(self, part: Part, instead: Callable[[Part, Run], Run], usual: Run) -> Run:
        run = instead(part, usual)

        def watched(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self._inside:  # a part within a part: the outer one may be recording
                return run(original, args, kwargs)
            self._inside = True
            try:
                inputs = [_fingerprint(x) for x in leaves((args, kwargs)) if _is_plain(x)]
                step = self._steps if is_denoiser(part) else None
                result = run(original, args, kwargs)
                self._see(part.name, step, inputs, result)
                return result
            finally:
                self._inside = False

        return watched

    def _see(self, component: str, step: int | None, inputs: list[bytes], result: Any) -> None:
        tensors = host_tensors(result)
        call = self._counts[component]
        self._counts[component] += 1
        finite = all(bool(are_finite(x).all()) for x in tensors)
        prints = [_fingerprint(x) for x in tensors]
        seen = Seen(component, call, step, inputs, prints, finite, None)
        if self._is_kept(seen, sum(x.nbytes for x in tensors)):
            seen.kept = tensors
        self.calls.append(seen)

    def _is_kept(self, seen: Seen, size: int) -> bool:
        if self.only is not None:
            return (seen.component, seen.call) == self.only
        if self.expected is not None:
            place = len(self.calls)
            right = self.expected[place].outputs if place < len(self.expected) else []
            self._differ += right != seen.outputs
            return self._differ == 1 and right != seen.outputs
        fits = size <= self.room
        self.room -= size if fits else 0
        return fits

    @contextlib.contextmanager
    def _counted(self, scheduler: Any) -> Iterator[None]:
        """Counts the steps of `scheduler` alone. On its class, since pipelines copy schedulers, and
        a wrapper on the instance would make the copy step the original."""
        kind, step = type(scheduler), getattr(type(scheduler), "step", None)
        if step is None:
            yield
            return

        @functools.wraps(step)
        def counted(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(this, *args, **kwargs)
            self._steps += this is scheduler
            return result

        with mock.patch.object(kind, "step", counted):
            yield


@contextlib.contextmanager
def in_its_place(part: Part, make: Callable[[Run], Run]) -> Iterator[None]:
    """While open, the patched method does what `make` gives for what it did before.

    This is no change of the module: nothing that a recording depends on is touched.
    """
    method = part._patched
    before = method._instead
    if before is None:  # taken off in the meantime
        yield
        return
    method._instead = make(before)
    try:
        yield
    finally:
        if method._instead is not None:
            method._instead = before


def plainly(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The module as it is without a patch."""
    return original(*args, **kwargs)


def always(run: Run) -> Callable[[Run], Run]:
    """For `in_its_place`: `run`, whatever was done before."""
    return lambda usual: run


def is_denoiser(part: Part) -> bool:
    """Whether the part runs in the denoising loop: neither text encoder nor VAE."""
    return "encoder" not in part.name and part._method == "forward"


def host_tensors(result: Any) -> list[torch.Tensor]:
    """Copies, on the host, of all tensors, arrays and pictures in what a call returned, in order.

    >>> host_tensors({"a": [torch.ones(2, device=device)], "b": "words"})
    [tensor([1., 1.])]
    """
    found = (_as_tensor(x) for x in leaves(result))
    return [x.detach().cpu().resolve_conj().resolve_neg().clone() for x in found if x is not None]


def are_finite(x: torch.Tensor) -> torch.Tensor:
    """Which numbers are neither infinite nor NaN."""
    return (x.float() if x.is_floating_point() and x.element_size() == 1 else x).isfinite()


def _as_tensor(x: Any) -> torch.Tensor | None:
    if isinstance(x, torch.Tensor):
        return x if x.layout is torch.strided else x.to_dense()
    if hasattr(x, "__array_interface__"):  # numpy's and pillow's
        import numpy

        array = numpy.ascontiguousarray(x)
        return torch.from_numpy(array.copy()) if array.dtype.kind in "biufc" else None
    return None


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or is_value(x)


def _fingerprint(x: Any) -> bytes:
    """A hash that tells values apart that differ in one bit, in shape or in type."""
    if not isinstance(x, torch.Tensor):
        return hashlib.blake2b(repr(x).encode(), digest_size=16).digest()
    digest = hashlib.blake2b(f"{tuple(x.shape)} {x.dtype}".encode(), digest_size=16)
    digest.update(bytes_of(x.detach().cpu()).numpy().data)
    return digest.digest()


def first_difference(expected: list[Seen], found: list[Seen]) -> tuple[Seen, Seen, str] | None:
    """The first call in which two runs differ: the one, the other, and how in words."""
    for ours, theirs in zip(expected, found, strict=False):
        if (ours.component, ours.call) != (theirs.component, theirs.call):
            return ours, theirs, f"{theirs.component} is called in its place"
        if ours.inputs != theirs.inputs:
            return ours, theirs, GIVEN_OTHERS
        if ours.outputs != theirs.outputs:
            return ours, theirs, RETURNS_OTHERS
    if len(expected) != len(found):
        last = (expected + found)[-1]
        return last, last, f"{len(expected)} calls became {len(found)}"
    return None


def distance(
    expected: list[torch.Tensor], found: list[torch.Tensor]
) -> tuple[float | None, float | None]:
    """The largest absolute difference, and that over the largest magnitude expected in the same
    tensor. None where one side has other shapes, or no number where the other has one.

    >>> distance([torch.tensor([4.0, 2.0])], [torch.tensor([4.0, 1.0])])
    (1.0, 0.25)
    """
    if [x.shape for x in expected] != [x.shape for x in found]:
        return None, None
    largest, relative = 0.0, 0.0
    for ours, theirs in zip(expected, found, strict=True):
        wide = torch.complex128 if ours.is_complex() or theirs.is_complex() else torch.float64
        a, b = ours.to(wide), theirs.to(wide)
        differ = ~((a == b) | (a.isnan() & b.isnan()))
        if not differ.any():
            continue
        gap = float((a - b)[differ].abs().max())
        if not torch.isfinite(torch.tensor(gap)):
            return None, None
        largest = max(largest, gap)
        scale = float(a[a.isfinite()].abs().max())
        relative = max(relative, gap / scale if scale else float("inf"))
    return largest, relative if relative != float("inf") else None
