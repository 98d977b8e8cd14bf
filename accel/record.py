"""The op-level recorder: automatic breaks, value guards, outside storages.

While a call is recorded, a dispatch mode sees every op. Most are left alone. One that cannot be
recorded becomes a break; host data on its way to the device is uploaded beside the recording; what
recorded work reads and writes outside the recording is noted. This module knows ops and where
tensors come from; what a break or a segment is, it leaves to graph.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.graph import Recording, Refused
from accel.signature import leaves, map_tree

aten = torch.ops.aten

_UNRECORDABLE_TAGS = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.cudagraph_unsafe,
}
_UNRECORDABLE = {
    # Tags miss these: they wait for the device, or the shape of their result depends on values.
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.linalg_eig.default,
    aten.histogram.bin_ct,
}
_INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl_.default,
}
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
_RUNNING_STATISTICS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default}
"""Their schemas hide that they write arguments 3 and 4 where argument 5, `training`, is true."""
_LIFTS = {aten.lift_fresh.default, aten.lift.default}

learned: set[Any] = set()
"""Ops that a recording failed on: from the next recording on they are breaks."""


class Rule(NamedTuple):
    """What the recorder needs to know of an op, once for all its calls."""

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


def _rule_for(func: Any) -> Rule:
    if not isinstance(func, torch._ops.OpOverload):
        return Rule(plain=True)
    unrecordable = None
    if func in learned:
        unrecordable = _always
    elif func in _INDEXING:  # tagged as if every index were a mask
        unrecordable = _with_mask
    elif func in _COPIES:
        unrecordable = _to_host
    elif func in _UNRECORDABLE or _UNRECORDABLE_TAGS.intersection(func.tags):
        unrecordable = _always
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    writes += (3, 4) if func in _RUNNING_STATISTICS else ()
    composite, lifts = _is_composite(func), func in _LIFTS
    draws = any(argument.name == "generator" for argument in func._schema.arguments)
    random = draws or torch.Tag.nondeterministic_seeded in func.tags
    plain = not (composite or lifts or unrecordable or writes or draws)
    return Rule(plain, composite, lifts, unrecordable, writes, random)


def _is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether the op is only a way to call others. Inference tensors let such ops through whole."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not any(
        has(func.name(), key) for key in ("CUDA", "PrivateUse1")
    )


_rules: dict[Any, Rule] = {}


class OpRecorder(TorchDispatchMode):
    """Sees every op of a recording; open it around the forward, inside `capture`.

    `known` holds device addresses that need no second look: born in this recording, or noted as
    outside it. Values on the host are constants if this recording made them from Python values,
    from the call's keyed arguments or from guarded reads.
    """

    supports_higher_order_operators = True
    paused = False

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        pool = recording.graph.pool
        self.recording = recording
        self._pool, self._backend = pool, pool.backend
        self._address, self._plain = pool.backend.address, set(pool.backend.tensor_types)
        self._known: set[int] = set(recording.weights)
        self._outside: dict[int, str] = {}
        self._made: dict[int, torch.UntypedStorage] = {}
        self._host_data = _HostData(self)
        self.operations = 0
        recording.observer = self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks inside the forward stay compiled under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps the handler below, which costs microseconds an op.
        return False

    def __enter__(self) -> OpRecorder:
        self._host_data.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._host_data.__exit__(*error)
        self.recording.graph.operations = self.operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if types and not self._plain.issuperset(types):
            return NotImplemented
        rule = _rules.get(func)
        if rule is None:
            rule = _rules[func] = _rule_for(func)
        if rule.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if rule.lifts:  # how torch.tensor(data) announces what it built
            self.adopt(args[0])
        self.operations += 1
        device, host = self._look_at(args)
        if kwargs:
            in_device, in_host = self._look_at(kwargs.values())
            device, host = device or in_device, host or in_host
        if not rule.plain or host:
            return self._run_with_care(func, rule, args, kwargs, device, host)
        out = self._run(func, args, kwargs)
        if device and type(out) is torch.Tensor:
            self._known.add(self._address(out))
        else:
            self._note_results(out, rule)
        return out

    def _look_at(self, args: Iterable[Any]) -> tuple[bool, bool]:
        """Whether there are device tensors and host tensors among `args`; notes new ones."""
        device = host = False
        known, address = self._known, self._address
        for x in args:
            kind = type(x)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                if address(x) not in known and self._is_host(x):
                    host = True
                else:
                    device = True
            elif kind is list or kind is tuple:
                in_device, in_host = self._look_at(x)
                device, host = device or in_device, host or in_host
        return device, host

    def _is_host(self, x: torch.Tensor) -> bool:
        """Notes a tensor that was not met before; True if it lies on the host."""
        if x.is_cpu:
            self._meet_host(x)
            return True
        if x.device != self._pool.device:
            raise Refused(f"the forward uses {x.device} beside {self._pool.device}")
        if x.numel():
            self._meet(x)
            self._known.add(self._address(x))
        return False

    def _meet(self, x: torch.Tensor) -> None:
        storage = self._backend.storage(x)
        base = storage.data_ptr()
        if base in self._outside or base in self._known:
            return
        if base in self.recording.arguments:
            self._outside[base] = "an argument"
        elif base not in self._backend.live_blocks(self._pool.id):
            self._outside[base] = "a tensor that outlives the call"
            self.recording.held.hold(storage)

    def _meet_host(self, x: torch.Tensor) -> None:
        base = x.untyped_storage().data_ptr()
        if base not in self._made and base not in self.recording.arguments and x.numel():
            self.recording.held.hold_host(x)

    def adopt(self, result: Any) -> None:
        """Notes host tensors as made by this recording: constants, kept so that their addresses
        stay theirs."""
        for x in leaves(result):
            if isinstance(x, torch.Tensor) and x.is_cpu:
                storage = x.untyped_storage()
                self._made[storage.data_ptr()] = storage

    def own(self, buffers: list[torch.Tensor]) -> None:
        """Notes a break's boundary buffers as the recording's: writing one is no effect."""
        self._known.update(self._backend.storage(x).data_ptr() for x in buffers if x.numel())

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "captur" in str(error):
                learned.add(func)
                _rules.pop(func, None)
            raise

    def _note_results(self, out: Any, rule: Rule) -> None:
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(x, torch.Tensor):
                continue
            if not x.is_cpu:
                self._known.add(self._address(x))
            elif rule.random:
                raise Refused("the forward draws random numbers on the host")
            else:
                self.adopt(x)

    def _run_with_care(
        self, func: Any, rule: Rule, args: Any, kwargs: Any, device: bool, host: bool
    ) -> Any:
        self._note_writes(func, rule, args, kwargs)
        if device and rule.unrecordable is not None and rule.unrecordable(args, kwargs):
            return self.recording.run_break(func, args, kwargs, pure=True)
        if kwargs.get("generator") is not None:
            raise Refused(f"{func} draws from a generator of its own")
        if host and func in _COPIES:
            return self._copy_in(func, rule, args, kwargs, device)
        if host and device:
            args, kwargs = map_tree(self._uploaded, args), map_tree(self._uploaded, kwargs)
        out = self._run(func, args, kwargs)
        self._note_results(out, rule)
        return out

    def _copy_in(self, func: Any, rule: Rule, args: Any, kwargs: Any, device: bool) -> Any:
        """Host data on its way to the device: uploaded beside the recording, once, and copied in
        the recording, so that the model may change its copy."""
        target = kwargs.get("device")
        if device:
            args = (args[0], self._constant(args[1].to, self._pool.device), *args[2:])
        elif target is not None and target.type != "cpu":
            func, args, kwargs = aten.clone.default, (self._constant(func, *args, **kwargs),), {}
        out = self._run(func, args, kwargs)
        self._note_results(out, rule)
        return out

    def _uploaded(self, x: Any) -> Any:
        """Host indices among device tensors: an op would copy them itself. Host tensors of no
        dimension are left alone: they are read when the op is launched."""
        if not isinstance(x, torch.Tensor) or not x.is_cpu or x.dim() == 0:
            return x
        return self._constant(x.to, self._pool.device)

    def _constant(self, upload: Callable[..., torch.Tensor], *args: Any, **kw: Any) -> torch.Tensor:
        with self._pool.upload():
            constant = upload(*args, **kw)
        self.recording.graph.held.append(constant)
        return constant

    def _note_writes(self, func: Any, rule: Rule, args: Any, kwargs: Any) -> None:
        writes = rule.writes if func not in _RUNNING_STATISTICS or args[5] else ()
        for place in writes:
            written = kwargs.get(place) if isinstance(place, str) else _at(args, place)
            for x in leaves(written):
                if isinstance(x, torch.Tensor) and x.numel():
                    self._note_write(func, x)

    def _note_write(self, func: Any, x: torch.Tensor) -> None:
        if x.is_cpu:
            if x.untyped_storage().data_ptr() not in self._made:
                raise Refused(f"{func} writes a host tensor that outlives the call")
            return
        base = self._backend.storage(x).data_ptr()
        outside = "a weight" if base in self.recording.weights else self._outside.get(base)
        if outside == "an argument":
            raise Refused(f"{func} changes an argument in place")
        if outside is not None:
            self.recording.note_effect(x, f"{func} has written {outside}")


def _at(args: Any, position: int) -> Any:
    return args[position] if position < len(args) else None


class _HostData:
    """Makes visible what no dispatch mode sees: `torch.tensor(data, device=...)`, which becomes
    building on the host and a copy, and lists as indices.

    Stands in for those functions while any thread records, and does as they do in threads that do
    not. (A `TorchFunctionMode` would see them too, and each `x.shape`: 2 µs an access.)
    """

    _lock = threading.Lock()
    _open = 0
    _here = threading.local()

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        with _HostData._lock:
            _HostData._open += 1
            if _HostData._open == 1:
                for owner, name, stand_in in _stand_ins:
                    setattr(owner, name, stand_in)
        self._outer, _HostData._here.recorder = _HostData.recorder(), self._recorder

    def __exit__(self, *error: Any) -> None:
        _HostData._here.recorder = self._outer
        with _HostData._lock:
            _HostData._open -= 1
            if _HostData._open == 0:
                for (owner, name, _), original in zip(_stand_ins, _originals, strict=True):
                    if original is None:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, original)

    @classmethod
    def recorder(cls) -> OpRecorder | None:
        """The recorder of the calling thread, None if it does not record just now."""
        found: OpRecorder | None = getattr(cls._here, "recorder", None)
        return None if found is None or found.paused else found


def _from_data(original: Any) -> Any:
    """`original(data, ..., device=...)` as building on the host and a copy that can be seen."""

    @functools.wraps(original)
    def build(data: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, device = _HostData.recorder(), kwargs.get("device")
        if device is None:
            device = torch.get_default_device()
        if recorder is None or torch.device(device).type == "cpu" or isinstance(data, torch.Tensor):
            return original(data, *args, **kwargs)
        host = original(data, *args, **{**kwargs, "device": "cpu"})
        if isinstance(data, (list, tuple, int, float, complex)):
            recorder.adopt(host)
        return host.to(device)

    return build


def _new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    if _HostData.recorder() is None:
        return torch._C.TensorBase.new_tensor(self, data, **kwargs)
    return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})


def _getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
    if not self.is_cpu and _HostData.recorder() is not None:
        index = _on_device(index, self.device)
    return torch._C.TensorBase.__getitem__(self, index)


def _setitem(self: torch.Tensor, index: Any, value: Any) -> None:
    if not self.is_cpu and _HostData.recorder() is not None:
        index = _on_device(index, self.device)
    torch._C.TensorBase.__setitem__(self, index, value)


def _on_device(index: Any, device: torch.device) -> Any:
    if isinstance(index, tuple):
        return tuple(_on_device(part, device) for part in index)
    if isinstance(index, list) and index and all(type(i) in (int, bool) for i in index):
        return torch.tensor(index, device=device)
    return index


_stand_ins: list[tuple[Any, str, Any]] = [
    (torch, "tensor", _from_data(torch.tensor)),
    (torch, "as_tensor", _from_data(torch.as_tensor)),
    (torch, "asarray", _from_data(torch.asarray)),
    (torch.Tensor, "new_tensor", _new_tensor),
    (torch.Tensor, "__getitem__", _getitem),
    (torch.Tensor, "__setitem__", _setitem),
]
_originals = [vars(owner).get(name) for owner, name, _ in _stand_ins]
