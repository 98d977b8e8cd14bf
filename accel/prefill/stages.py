"""A model from stage to stage: what its hidden states are before each of its layers.

Knows hooks on modules: it listens to one forward pass and feeds another one with what it heard.
What hidden states ought to be, and how far two may lie apart, it does not know.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.prefill.attention import Unsupported
from accel.prefill.slots import HOST


class Heard(NamedTuple):
    """One call of a stage, and the hidden states `[..., tokens, hidden]` that came in, on the host:
    of a deep model and a long prompt they are many."""

    stage: nn.Module
    hidden: torch.Tensor


@contextlib.contextmanager
def heard(stages: Iterable[nn.Module]) -> Iterator[list[Heard]]:
    """While open, lists the calls of `stages` in this thread.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> with heard(model) as calls:
    ...     _ = model(torch.ones(1, 3, 2))
    >>> [call.hidden.shape[-2] for call in calls]
    [3, 3]
    """
    calls: list[Heard] = []

    def listen(stage: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(Heard(stage, hidden.detach().to(HOST, copy=True)))
        return hidden

    with _between(stages, listen):
        yield calls


@contextlib.contextmanager
def fed(given: Sequence[Heard], see: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """While open, `given` stands in for what comes in at each stage in this thread; rows beyond it
    stay. What came in is shown to `see`, with the number of the call. Raises `Unsupported` if the
    stages are called in another order."""
    calls = iter(enumerate(given))

    def feed(stage: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        number, expected = next(calls, (0, None))
        if expected is None or expected.stage is not stage:
            raise Unsupported("packed prompts pass through other layers than single ones")
        rows = expected.hidden.shape[-2]
        see(number, hidden[..., :rows, :])
        instead = expected.hidden.to(hidden.device, hidden.dtype)
        return torch.cat([instead, hidden[..., rows:, :]], -2)

    with _between({call.stage for call in given}, feed):
        yield
    if next(calls, None) is not None:
        raise Unsupported("packed prompts pass through fewer layers than single ones")


@contextlib.contextmanager
def _between(
    stages: Iterable[nn.Module], handle: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """While open, the first tensor of numbers that a stage is called with goes by `handle`."""
    thread = threading.get_ident()

    def hook(stage: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if threading.get_ident() != thread:  # it runs the model for itself
            return None  # (and may meet a hook of which torch does not know yet that it takes both)
        found = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        hidden = next((x for x in found if x.is_floating_point()), None)
        if hidden is None:
            return None
        instead = handle(stage, hidden)
        args = tuple(instead if x is hidden else x for x in args)
        return args, {k: instead if x is hidden else x for k, x in kwargs.items()}

    with contextlib.ExitStack() as stack:
        for stage in stages:
            stack.callback(stage.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
