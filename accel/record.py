"""The op-level recorder: automatic breaks, value guards, outside storages.

While a call is recorded, a dispatch mode sees every op. Most are left alone. One that cannot be
recorded becomes a break; host data on its way to the device is uploaded beside the recording; what
recorded work reads and writes outside the recording is noted. This module knows ops and where
tensors come from; what a break or a segment is, it leaves to graph.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tag
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from accel.breaks import Break
from accel.graph import ARGUMENT, OURS, Recording, Refused, current_recording
from accel.record_stand_ins import OPERATORS, VIEWS, fitting, visible_host_data
from accel.signature import leaves, map_tree

aten = torch.ops.aten

FIRST_OPERATIONS, SEGMENT_OPERATIONS = 64, 256
"""After so many ops a segment ends, and runs while the next is recorded: only the last one's work
is left when the host is done. The first is short and the others up to twice as long as the one
before: what the device is to begin with takes the host less long to launch."""
_UNRECORDABLE_TAGS = {Tag.dynamic_output_shape, Tag.data_dependent_output, Tag.cudagraph_unsafe}
_UNRECORDABLE = {aten._linalg_check_errors, aten.bincount, aten.histogram, aten.linalg_eig}
"""Tags miss these: they wait for the device, or the shape of their result depends on values."""
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_INDEXING |= {aten._unsafe_index, aten._unsafe_index_put}
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
_RUNNING_STATISTICS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default}
"""Their schemas hide that they write arguments 3 and 4 where argument 5, `training`, is true."""
_LIFTS = {aten.lift_fresh.default, aten.lift.default}
_ON_HOST = "a host tensor that outlives the call"
_TENSOR = torch.Tensor
_OF_TORCH = types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType
_NO_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


class Rule(NamedTuple):
    """What the recorder needs to know of an op, once for all its calls.

    >>> _rule_for(aten.add_.Tensor).writes, _rule_for(aten.add.Tensor).plain
    ((0,), True)
    """

    plain: bool
    """Recordable as it is when all its tensors lie on the device."""
    composite: bool = False
    lifts: bool = False
    unrecordable: Callable[[Any, Any], bool] | None = None
    writes: tuple[int | str, ...] = ()
    random: bool = False


def _always(args: Any, kwargs: Any) -> bool:
    return True


def _with_mask(args: Any, kwargs: Any) -> bool:
    """Indexing by a boolean mask: the number of elements depends on its values."""
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _to_host(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    return (device is not None and device.type == "cpu") or (len(args) > 1 and args[0].is_cpu)


@functools.cache
def _rule_for(func: Any) -> Rule:
    if not isinstance(func, torch._ops.OpOverload):
        return Rule(plain=False)
    unrecordable = None
    if func.overloadpacket in _INDEXING:  # tagged as if every index were a mask
        unrecordable = _with_mask
    elif func in _COPIES:
        unrecordable = _to_host
    elif func.overloadpacket in _UNRECORDABLE or _UNRECORDABLE_TAGS.intersection(func.tags):
        unrecordable = _always
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    writes += (3, 4) if func in _RUNNING_STATISTICS else ()
    composite, lifts = _is_composite(func), func in _LIFTS
    draws = any(argument.name == "generator" for argument in func._schema.arguments)
    random = draws or Tag.nondeterministic_seeded in func.tags
    plain = not (composite or lifts or unrecordable or writes or random)
    return Rule(plain, composite, lifts, unrecordable, writes, random)


def _is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether the op is only a way to call others. Inference tensors let such ops through whole."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not any(
        has(func.name(), key) for key in ("CUDA", "PrivateUse1")
    )


@contextlib.contextmanager
def watched(recording: Recording) -> Iterator[None]:
    """Sees every op of a recording, and host data on its way to the device.

    >>> from accel.graph import BreakableGraph, capture
    >>> from accel.memory import Pool
    >>> with capture(BreakableGraph(Pool(device)), automatic=False) as recording:
    ...     with watched(recording):
    ...         y = torch.tensor([1.0, 2.0], device=device) * 2
    >>> y.tolist()
    [2.0, 4.0]
    """
    with OpRecorder(recording) as recorder, visible_host_data(recorder.whole):
        yield


class OpRecorder(TorchDispatchMode):
    """Sees every op of a recording but those on lists of numbers (`watched` shows these too).

    Values on the host are constants if this recording made them from Python values, from the call's
    keyed arguments or from guarded reads.

    >>> from accel.graph import BreakableGraph, capture
    >>> from accel.memory import Pool
    >>> x = torch.ones(2, device=device)
    >>> with capture(BreakableGraph(Pool(device)), automatic=False) as recording:
    ...     with OpRecorder(recording):
    ...         y = x * 2 + 1
    >>> y.tolist(), recording.graph.operations
    ([3.0, 3.0], 2)
    """

    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._graph, self._known = recording, recording.graph, recording.known
        self._pool, self._backend = self._graph.pool, self._graph.pool.backend
        self._address, self._plain = self._backend.address, set(self._backend.tensor_types)
        self._origins = recording.origins
        self._rules: dict[int, Rule] = {}
        self._length = self._end = min(FIRST_OPERATIONS, SEGMENT_OPERATIONS)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks inside the forward stay compiled under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch wraps the handler below, which costs microseconds an op."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._recording.paused:
            return func(*args, **kwargs)
        if types and not self._plain.issuperset(types):
            return NotImplemented
        rule = self._rules.get(id(func)) or self._learned(func)  # to hash an op takes Python code
        if rule.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if rule.lifts:  # how torch.tensor(data) announces what it built
            self._recording.adopt([args[0]])
        self._count()
        device, host = self._look_at([*args, *kwargs.values()] if kwargs else args)
        if host or not rule.plain:
            return self._run_with_care(func, rule, args, kwargs, device, host)
        return self._run(func, args, kwargs)

    def _count(self) -> None:
        self._graph.operations += 1
        if self._graph.operations == self._end and self._pool.may_cut:
            self._recording.cut()
            self._length = min(2 * self._length, SEGMENT_OPERATIONS)
            self._end += self._length

    def whole(self, owner: Any, name: str) -> Callable[..., Any]:
        """A stand-in for a function of torch that makes it one op here (torch makes up to four of a
        linear layer), past the dispatch mode, which takes most of the time. For functions without
        an effect but their result, unless told `out`. Of `VIEWS` only what they are of is noted:
        lists and Triton's kernels are made of them unseen. The original where it is not torch's
        own, or something was compiled in this process: that would be compiled anew."""
        original = getattr(owner, name)
        compiled = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        if compiled or not isinstance(original, _OF_TORCH):
            return original  # type: ignore[no-any-return]
        fits, views = fitting(name, self._plain), name in VIEWS
        recorder = weakref.ref(self)  # someone may keep the stand-in

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            given, here = (*args, *kwargs.values()) if kwargs else args, recorder()
            mine = here is not None and current_recording() is here._recording
            if has_torch_function(given):  # they compare functions, with torch's own
                if name in OPERATORS:  # of `-x` torch tells them that it is `neg`
                    return original(*args, **kwargs)
                own = mock.patch.object(owner, name, original)
                with own if mine else contextlib.nullcontext():
                    return handle_torch_function(original, given, *args, **kwargs)
            if (
                here is None
                or not mine
                or torch._C._len_torch_dispatch_stack() != 1
                or torch._C._functorch.peek_interpreter_stack() is not None
                or not (given and fits(given))
                or "out" in kwargs
                or here._pool.unrecordable
                or here._look_at(given[:1] if views else given)[1]
            ):
                return original(*args, **kwargs)
            if not views:
                here._count()
            with torch._C._DisableTorchDispatch():
                return original(*args, **kwargs) if views else here._run(original, args, kwargs)

        return run

    def _learned(self, func: Any) -> Rule:
        rule = _rule_for(func)
        if func in self._pool.unrecordable:
            rule = rule._replace(plain=False, unrecordable=_always)
        self._rules[id(func)] = rule
        return rule

    def _look_at(self, args: Iterable[Any]) -> tuple[bool, bool]:
        """Whether there are device tensors and host tensors among `args`; notes new ones. Most
        arguments are told at a glance: an op's list with a number in front holds nothing else."""
        device = host = False
        known, address = self._known, self._address
        for x in args:
            kind = type(x)
            if kind in _NO_TENSORS:
                continue
            # Some subclasses (GGUF's) are tensors like any other and come by here.
            if kind is _TENSOR or isinstance(x, _TENSOR):
                if address(x) not in known and self._is_host(x):
                    host = True
                else:
                    device = True
            elif kind is tuple or (kind is list and x and type(x[0]) is not int):
                in_device, in_host = self._look_at(x)
                device, host = device or in_device, host or in_host
        return device, host

    def _is_host(self, x: torch.Tensor) -> bool:
        """Notes a tensor that was not met before; True if it lies on the host."""
        if not x.is_cpu and x.device != self._pool.device:
            raise Refused(f"the forward uses {x.device} beside {self._pool.device}")
        if not x.numel():
            return x.is_cpu
        storage = self._backend.storage(x)
        base = storage.data_ptr()
        if base not in self._origins:
            self._origins[base] = self._origin(x, storage)
        if self._origins[base] == _ON_HOST:
            self._recording.held.hold_host(x)  # each view: another may change by itself
        if not x.is_cpu:
            self._known.add(self._address(x))
        return x.is_cpu

    def _origin(self, x: torch.Tensor, storage: torch.UntypedStorage) -> str:
        """Where a storage comes from that was not met before; holds what others may let go."""
        if x.is_cpu:
            return _ON_HOST
        base = storage.data_ptr()  # a look into the pool takes a third of a millisecond
        if base in self._known or base in self._backend.live_blocks(self._pool.id):
            return OURS
        self._recording.held.hold(storage)
        return "a tensor that outlives the call"

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Records an op and notes what it makes."""
        try:
            out = getattr(func, "_op", func)(*args, **kwargs)  # a Python frame less
        except RuntimeError as error:
            if "generator not in capture mode" in str(error):  # it draws: no harm was done
                return self._recording.run_break(Break(func, args, kwargs, self._pool), pure=True)
            if "captur" in str(error):
                self._pool.unrecordable.add(func)
            raise
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if type(x) is _TENSOR or isinstance(x, _TENSOR):
                if x.is_cpu:
                    self._recording.adopt([x])
                else:
                    self._known.add(self._address(x))
        return out

    def _run_with_care(
        self, func: Any, rule: Rule, args: Any, kwargs: Any, device: bool, host: bool
    ) -> Any:
        """Host data on its way to the device is uploaded beside the recording, once. A copy that
        the model may change is made from it in the recording."""
        if rule.writes:
            self._note_writes(func, rule, args, kwargs)
        if device and rule.unrecordable is not None and rule.unrecordable(args, kwargs):
            return self._recording.run_break(Break(func, args, kwargs, self._pool), pure=True)
        target = kwargs.get("device")
        if kwargs.get("generator") is not None:
            raise Refused(f"{func} draws from a generator of its own")
        if rule.random and not device and (target is None or target.type == "cpu"):
            raise Refused("the forward draws random numbers on the host")
        if host and device:
            args, kwargs = map_tree(lambda x: self._uploaded(func, x), (args, kwargs))
        elif host and func in _COPIES and target is not None and target.type != "cpu":
            func, args, kwargs = aten.clone.default, (self._constant(func, *args, **kwargs),), {}
        return self._run(func, args, kwargs)

    def _uploaded(self, func: Any, x: Any) -> Any:
        """Host tensors among device tensors: an op would copy them itself. Those of no dimension
        are read when it is launched and left alone, but where they are copied too."""
        copies = func in _COPIES or getattr(func, "overloadpacket", None) in _INDEXING
        bakes = isinstance(x, torch.Tensor) and x.is_cpu and (x.dim() > 0 or copies)
        return self._constant(x.to, self._pool.device) if bakes else x

    def _constant(self, upload: Callable[..., torch.Tensor], *args: Any, **kw: Any) -> torch.Tensor:
        with self._pool.upload():
            constant = upload(*args, **kw)
        self._graph.held.append(constant)
        return constant

    def _note_writes(self, func: Any, rule: Rule, args: Any, kwargs: Any) -> None:
        writes = rule.writes if func not in _RUNNING_STATISTICS or args[5] else ()
        for place in writes:
            written = kwargs.get(place) if isinstance(place, str) else args[place : place + 1]
            for x in leaves(written):
                if not isinstance(x, torch.Tensor) or not x.numel():
                    continue
                origin = self._origins.get(self._backend.storage(x).data_ptr(), OURS)
                if origin == ARGUMENT:
                    raise Refused(f"{func} changes an argument in place")
                if x.is_cpu and origin != OURS:
                    raise Refused(f"{func} writes {origin}")
                if origin != OURS:
                    self._recording.note_effect(x, f"{func} has written {origin}")


def _hide_from_compiler(handler: Any) -> None:
    """What compiles under the handler leaves it and all that it calls alone. (Torch's own way, a
    wrapper, costs microseconds an op.)"""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(handler.__code__, skip)


_hide_from_compiler(OpRecorder.__torch_dispatch__)
