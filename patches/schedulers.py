"""Schedulers whose steps do not make the host wait for the device.

Works on instances of diffusers' own scheduler classes, all of them: their code runs unchanged, in
a mode that answers what it would read from the device out of the schedule that the host knows
(scheduler_answers.py). Classes of users, and subclasses, are left alone. What each class reads in
its steps is not known here, except for those that read nothing once they know their place.

An instance gets another class, a subclass made here that calls itself the original one, so that
`vars(scheduler)` stays as it is, and a copy, a pickle or a `from_config` is of the plain class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import nn

from accel.patches.scheduler_answers import Answering
from accel.patches.scheduler_tables import HostValues, device_of

ANSWERED = ("step", "scale_model_input", "add_noise", "scale_noise", "get_velocity")
"""The methods of a scheduler that a denoising loop calls."""

_READS_PLACE_ONLY = {
    "CMStochasticIterativeScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EDMDPMSolverMultistepScheduler",
    "EDMEulerScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "HeunDiscreteScheduler",
    "IPNDMScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
}
"""Classes whose `step` and `scale_model_input` read and upload nothing after the first step, and in
that one only if no begin index was set. A class that is missing here costs a little host time."""

_class_slot: Any = vars(object)["__class__"]


def find_schedulers(obj: Any) -> dict[str, Any]:
    """The schedulers among a pipeline's components as they are now, by name.

    >>> find_schedulers(nn.Linear(2, 2))
    {}
    """
    components = {} if isinstance(obj, nn.Module) else getattr(obj, "components", {})
    found = {n: c for n, c in components.items() if isinstance(c, SchedulerMixin)}
    own = getattr(obj, "scheduler", None)
    if isinstance(own, SchedulerMixin) and not any(own is known for known in found.values()):
        found["scheduler"] = own
    return found


class SyncFreeSchedulers:
    """The schedulers of one pipeline, sync-free until `take_off`. Does not hold the pipeline.

    `refresh` finds those that were assigned since; where nothing changed it costs a microsecond.

    >>> import diffusers
    >>> class Pipe:
    ...     scheduler = diffusers.DDIMScheduler()
    >>> pipe = Pipe()
    >>> schedulers = SyncFreeSchedulers(pipe)
    >>> is_sync_free(pipe.scheduler), type(pipe.scheduler) is pipe.scheduler.__class__
    (True, False)
    >>> schedulers.take_off()
    >>> type(pipe.scheduler) is diffusers.DDIMScheduler
    True
    """

    def __init__(self, obj: Any) -> None:
        self._obj = weakref.ref(obj)
        self._held: dict[str, weakref.ref[Any]] = {}
        self.refresh()
        _all.add(self)

    def refresh(self) -> None:
        """Makes the schedulers that the pipeline has now sync-free, and lets go of others."""
        obj = self._obj()
        if self._held and all(getattr(obj, n, None) is ref() for n, ref in self._held.items()):
            return
        found = {} if obj is None else find_schedulers(obj)
        before = self._schedulers()
        self._held = {name: weakref.ref(scheduler) for name, scheduler in found.items()}
        for scheduler in found.values():
            install(scheduler)
        self._give_up(before)

    def take_off(self) -> None:
        """Restores those that no other pipeline's `SyncFreeSchedulers` holds."""
        before, self._held = self._schedulers(), {}
        self._give_up(before)

    def _schedulers(self) -> list[Any]:
        return [scheduler for ref in self._held.values() if (scheduler := ref()) is not None]

    def _give_up(self, before: list[Any]) -> None:
        kept = {id(s) for schedulers in (*_all, self) for s in schedulers._schedulers()}
        for scheduler in before:
            if id(scheduler) not in kept:
                take_off(scheduler)


_all: weakref.WeakSet[SyncFreeSchedulers] = weakref.WeakSet()
_values: weakref.WeakKeyDictionary[Any, HostValues] = weakref.WeakKeyDictionary()


def install(scheduler: Any) -> bool:
    """Makes a scheduler's steps sync-free; False, and nothing done, if it is not diffusers' own.

    The numbers, the attributes and the use of random generators stay as they are.
    """
    if is_sync_free(scheduler):
        return True
    stock: Any = type(scheduler)
    if not _is_stock(stock):
        return False
    _values[scheduler] = values = HostValues()
    _class_slot.__set__(scheduler, _sync_free(stock))
    values.look(scheduler)
    return True


def take_off(scheduler: Any) -> None:
    """Gives a scheduler its own class back; nothing of ours stays on it."""
    if is_sync_free(scheduler):
        _class_slot.__set__(scheduler, scheduler.__class__)
    _values.pop(scheduler, None)


def is_sync_free(scheduler: Any) -> bool:
    """Whether `install` was called on the scheduler, and `take_off` not since."""
    return "_accel_stock" in vars(type(scheduler))


def _is_stock(cls: type) -> bool:
    return issubclass(cls, SchedulerMixin) and cls.__module__.startswith("diffusers.schedulers.")


@functools.cache
def _sync_free(stock: Any) -> type:
    """A subclass of `stock` that answers reads, and is `stock` to all who ask."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)  # type(scheduler).from_config(...), say

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, max(2, int(protocol)))
        made_by, (_, *rest), *state = reduced
        return made_by, (stock, *rest), *state

    namespace: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__new__": new,
        "__reduce_ex__": reduce,
        "__class__": property(lambda self: stock, _class_slot.__set__),
        "_accel_stock": stock,
    }
    for name in ANSWERED:
        if callable(getattr(stock, name, None)):
            namespace[name] = _answered(getattr(stock, name), name)
    if callable(getattr(stock, "set_timesteps", None)):
        namespace["set_timesteps"] = _learning(stock.set_timesteps)
    made: type = type(stock)(stock.__name__, (stock,), namespace)
    return made


def _answered(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = _values.get(self)
        if values is None or not _may_wait(self, name, args, kwargs):
            return original(self, *args, **kwargs)
        tables = values.look(self)
        ends_low = bool(getattr(self.config, "lower_order_final", False))
        with Answering(tables, ends_low and values.has_gaps()):
            return original(self, *args, **kwargs)

    return method


def _learning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = _values.get(self)
        if values is None:
            return original(self, *args, **kwargs)
        # Tensors made under inference mode do not tell when they are written to.
        with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
            result = original(self, *args, **kwargs)
            values.learn(self)
        return result

    return set_timesteps


def _may_wait(scheduler: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call may read or upload: not if the schedule is on the CPU, nor, of some classes,
    once the place in it is known, unless noise is drawn on the host."""
    device = device_of(scheduler)
    if device is None or device.type in ("cpu", "meta"):
        return False
    if name not in ("step", "scale_model_input"):
        return True
    if scheduler.__class__.__name__ not in _READS_PLACE_ONLY:
        return True
    if getattr(scheduler, "step_index", None) is None:
        return getattr(scheduler, "begin_index", None) is None or _draws_on_host(args, kwargs)
    return _draws_on_host(args, kwargs)


def _draws_on_host(args: Any, kwargs: Any) -> bool:
    for x in (*args, *kwargs.values()):
        first = x[0] if isinstance(x, list) and x else x
        if isinstance(first, torch.Generator) and first.device.type == "cpu":
            return True
    return False
