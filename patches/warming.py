"""accel.warm(): runs a call until its graphs exist, and leaves no other trace.

Knows when another run would bring nothing new. Does not know what a run does.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from accel.patches import pipeline
from accel.patches.overview import Report
from accel.patches.part import Part
from accel.patches.rerun import Call, Traces
from accel.reporting import PartReport

MOST_RUNS = 6
"""Runs after which a call that still brings news is left as it is."""

_log = logging.getLogger("accel")


def warm(pipe: Any, /, *args: Any, **call: Any) -> Report:
    """Calls `pipe(*args, **call)` until its graphs exist; returns `accel.report(pipe)`.

    For servers: afterwards a call with the same shapes replays from its first step. Give what your
    calls give, a generator too: left out, some parts are called in another way. Usually three
    or four runs: a part is recorded at its second or third call, and text encoders and the VAE are
    called once a picture. It ends with the first run that records nothing and in which every eager
    call has the reason that it had in the run before; after 6 runs in any case.

    Random generators (those in the arguments too), the pipeline's attributes and its schedulers are
    left as they were. Without CUDA nothing is run, and the report says so;
    arguments that the call does not take are refused all the same.

    `num_inference_steps` is never lowered for you. What is recorded depends on what each step hands
    over (a second denoiser behind a boundary, a ControlNet's window, guidance that ends early), and
    whether a shorter schedule meets all of it cannot be known without running the long one. Where
    you know that it does, pass the smaller number yourself.

    Raises ValueError if `pipe` is not patched, and what the call raises.

    >>> import accel
    >>> layer = accel.patch(nn.Linear(2, 2).to(device), capture="always")
    >>> with torch.no_grad():
    ...     report = accel.warm(layer, torch.ones(1, 2, device=device))
    >>> report["module"].captures
    1
    """
    parts = parts_of(pipe, "warm")
    if parts:
        repeated = Call(args, call)
        traces = Traces(pipe, devices_of(parts))
        with traces.put_back_after():
            for _ in settling(parts):
                traces.put_back()
                args, call = repeated.fresh()
                pipe(*args, **call)
    else:
        refuse_unfit(pipe, args, call)
    return pipeline.report(pipe)


def refuse_unfit(pipe: Any, args: Sequence[Any], call: Mapping[str, Any]) -> None:
    """Raises TypeError where `pipe(*args, **call)` would for its arguments, without calling it. Not
    for a module: hooks may change what its forward is given.

    >>> class Pipe:
    ...     def __call__(self, prompt=""): ...
    >>> refuse_unfit(Pipe(), (), {"promt": "a cat"})
    Traceback (most recent call last):
    TypeError: Pipe.__call__() got an unexpected keyword argument 'promt'
    """
    called = type(pipe).__call__
    try:
        inspect.signature(called).bind(pipe, *args, **call)
    except TypeError as error:
        raise TypeError(f"{called.__qualname__}() {error}") from None


def parts_of(obj: Any, caller: str) -> list[Part]:
    """The patched parts of `obj`. Raises ValueError if it is not patched; `caller` is the function
    of accel that wants to know.

    >>> parts_of(nn.Linear(2, 2), "warm")
    Traceback (most recent call last):
    ValueError: accel.warm(): this Linear is not patched: call accel.patch(...) on it first
    """
    patched = pipeline._patches.get(obj)
    if patched is None:
        raise ValueError(
            f"accel.{caller}(): this {type(obj).__name__} is not patched: "
            "call accel.patch(...) on it first"
        )
    patched.find_parts()
    return patched.parts


def devices_of(parts: Sequence[Part]) -> tuple[torch.device, ...]:
    """The devices that the parts are on, each once; and a GPU, where offloaded parts may run."""
    found = [device for part in parts if (device := part.device()) is not None]
    if torch.cuda.is_available():
        found.append(torch.device("cuda", torch.cuda.current_device()))
    return tuple(dict.fromkeys(found))


def settling(parts: Sequence[Part]) -> Iterator[int]:
    """Numbers of runs, from 0, as long as the run made since the last one brought something new.

    >>> list(settling([]))
    [0]
    """
    before: Counter[tuple[str, str]] | None = None
    for number in range(MOST_RUNS):
        captures, eager = _captures(parts), _eager_calls(parts)
        yield number
        brought = _eager_calls(parts) - eager
        if _captures(parts) == captures and (not brought or brought == before):
            return
        before = brought
    _log.warning("accel: %d runs of this call, and each still brought something new", MOST_RUNS)


def _captures(parts: Sequence[Part]) -> int:
    return sum(part.report.captures for part in parts)


def _eager_calls(parts: Sequence[Part]) -> Counter[tuple[str, str]]:
    """Eager calls by part and reason, those of declined calls left out: more of them is no news."""
    return Counter(
        {
            (report.name, reason): count
            for report in (part.report for part in parts)
            for reason, count in report.reasons.items()
            if not _is_final(report, reason)
        }
    )


def _is_final(report: PartReport, reason: str) -> bool:
    return reason == report.declined
