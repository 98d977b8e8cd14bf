"""The same call of a pipeline again: arguments, random numbers, schedulers, attributes as before.

Knows what one call leaves behind: generators that were drawn from, attributes of the pipeline and
of its schedulers. Does not know why someone wants to repeat a call.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel.backend import backend_for
from accel.signature import identities

_BOXES = (list, dict, set)
_OTHER_SEED = 20_011
_PROMPT_TAIL = " at night"


@dataclass
class Call:
    """A call's arguments. `fresh()` gives them with every random generator copied, so that the
    caller's own are never drawn from and each call draws the same.

    >>> call = Call((), {"generator": torch.Generator().manual_seed(3)})
    >>> first, second = (call.fresh()[1]["generator"] for _ in range(2))
    >>> torch.rand(1, generator=first) == torch.rand(1, generator=second)
    tensor([True])
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    """What the generators start from instead of their own state; None: their own."""

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for one call."""
        args, kwargs = self._fresh((self.args, self.kwargs))
        return args, kwargs

    def _fresh(self, x: Any) -> Any:
        if isinstance(x, torch.Generator):
            again = torch.Generator(device=x.device)
            again.set_state(x.get_state())
            return again if self.seed is None else again.manual_seed(self.seed)
        if type(x) in (list, tuple):
            return type(x)(map(self._fresh, x))
        if type(x) is dict:
            return {name: self._fresh(value) for name, value in x.items()}
        return x

    def another(self) -> Call:
        """A call of the same kind with another seed, another prompt and one step more, as far as
        these are among the arguments.

        >>> Call(("a cat",), {"num_inference_steps": 4}).another().args
        ('a cat at night',)
        """
        kwargs = dict(self.kwargs)
        if "prompt" in kwargs:
            kwargs["prompt"] = _other_words(kwargs["prompt"])
        if type(kwargs.get("num_inference_steps")) is int:
            kwargs["num_inference_steps"] += 1
        args = (_other_words(self.args[0]), *self.args[1:]) if self.args else ()
        return Call(args, kwargs, _OTHER_SEED)


def _other_words(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt + _PROMPT_TAIL
    if isinstance(prompt, list):
        return [_other_words(part) for part in prompt]
    return prompt


class Traces:
    """What a call of `obj` leaves behind, as it is now: the states of the random generators of host
    and `devices`, the attributes of the schedulers and, of a pipeline, its own.

    A component that the call assigns is one of the pipeline's attributes. What modules keep (lazy
    caches) is not looked at.

    >>> class Pipe:
    ...     steps = 0
    >>> pipe = Pipe()
    >>> with Traces(pipe).put_back_after():
    ...     pipe.steps, drawn = 7, torch.rand(1)
    >>> pipe.steps
    0
    """

    def __init__(self, obj: Any, devices: tuple[torch.device, ...] = ()) -> None:
        self._generators = [(write, read()) for read, write in _generators(devices)]
        owners = [] if isinstance(obj, nn.Module) else [obj]
        owners += schedulers_of(obj)
        attributes = [vars(owner) for owner in owners]
        boxes = [x for own in attributes for x in own.values() if type(x) in _BOXES]
        self._boxes = [(box, copy.copy(box)) for box in (*attributes, *boxes)]

    def put_back(self) -> None:
        """Makes everything again what it was."""
        for write, state in self._generators:
            write(state)
        for box, before in self._boxes:
            if identities(box) != identities(before):
                box.clear()
                (box.extend if isinstance(box, list) else box.update)(before)

    @contextlib.contextmanager
    def put_back_after(self) -> Iterator[None]:
        """Puts everything back when the body is left, however that happens."""
        try:
            yield
        finally:
            self.put_back()


def _generators(
    devices: tuple[torch.device, ...],
) -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield numpy.get_state, numpy.set_state
    for device in devices:
        if (backend := backend_for(device)) is not None:
            write = functools.partial(backend.set_rng_state, device)
            yield functools.partial(backend.rng_state, device), write


def schedulers_of(obj: Any) -> list[Any]:
    """The diffusers schedulers among a pipeline's components, each once.

    >>> schedulers_of(nn.Linear(2, 2))
    []
    """
    if isinstance(obj, nn.Module) or "diffusers" not in sys.modules:
        return []
    found = _schedulers().find_schedulers(obj).values()
    return list({id(scheduler): scheduler for scheduler in found}.values())


@contextlib.contextmanager
def plain_schedulers(obj: Any) -> Iterator[None]:
    """While open, sync-free schedulers are what they were before."""
    ours = make_schedulers_plain(obj)
    try:
        yield
    finally:
        for scheduler in ours:
            _schedulers().install(scheduler)


def make_schedulers_plain(obj: Any) -> list[Any]:
    """Lets the sync-free schedulers of a pipeline wait again, and returns them."""
    ours = [found for found in schedulers_of(obj) if _schedulers().is_sync_free(found)]
    for scheduler in ours:
        _schedulers().take_off(scheduler)
    return ours


def _schedulers() -> Any:
    """Not before a pipeline is there: it brings diffusers in."""
    from accel.patches import schedulers

    return schedulers
