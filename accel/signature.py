"""A call's tree of arguments: hashable key, tensor leaves, static inputs.

Knows how arguments and results are put together (lists, tuples, dicts, dataclasses, tensors, plain
values) and how a call's tensors are copied into the runner's own. Does not know what is recorded.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import SUPPORTED_NODES

from accel.backend import Backend

ALIGNMENT = 16
"""Bytes: what vectorised kernels look at when they choose how to read a tensor."""
SMALL_HOST_TENSOR = 64
"""Elements: up to here a host tensor is part of the key by value."""

_VALUES = (
    types.NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    types.EllipsisType,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


class Uncapturable(Exception):
    """A call that cannot be keyed; the message says which argument and why."""


class Signature(NamedTuple):
    """What the recorded work depends on in a call's arguments.

    `shapes` holds the tree and the tensors' metadata, `values` the plain values in tree order,
    `tensors` the tensor leaves themselves (not part of the key), each object once.
    """

    shapes: tuple[Any, ...]
    values: tuple[Any, ...]
    tensors: list[torch.Tensor]


def signature(call: Any, backend: Backend) -> Signature:
    """Keys `call`, usually `(args, kwargs)`. Raises `Uncapturable` for what cannot be keyed.

    >>> one, two = (signature(((x, 2), {}), backend) for x in torch.ones(2, 4, device=device))
    >>> one.shapes == two.shapes, one.values
    (True, ((<class 'int'>, 2),))
    """
    shapes: list[Any] = []
    values: list[Any] = []
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] = {}

    def walk(x: Any) -> None:
        kind = type(x)
        if isinstance(x, torch.Tensor):
            if id(x) in seen:
                shapes.append(seen[id(x)])
                return
            seen[id(x)] = len(tensors)
            tensors.append(x)
            shapes.append(_metadata(x, backend))
            if x.is_cpu:
                values.append(host_bytes(x))
        elif isinstance(x, _VALUES):
            exact = repr(x) if isinstance(x, (float, complex)) else x  # 0.0 equals -0.0
            values.append((kind, exact))
            shapes.append(None)
        elif (parts := opened(x)) is not None:
            shapes.append((kind, len(parts.children), parts.names))
            for child in parts.children:
                walk(child)
        elif isinstance(x, torch.Generator):
            shapes.append(kind)  # a recording that draws from one is refused
        elif isinstance(x, _FUNCTIONS):
            values.append((kind, x))
            shapes.append(None)
        else:
            raise Uncapturable(f"{_place(call, x)} is a {kind.__name__}, whose contents may change")

    walk(call)
    return Signature(tuple(shapes), tuple(values), tensors)


class Opened(NamedTuple):
    """A container's children, in order, and how to build its like from other children."""

    children: list[Any]
    names: tuple[Any, ...]
    build: Callable[[list[Any]], Any]


def opened(x: Any) -> Opened | None:
    """Takes a container apart; None if `x` is none that can be put together again."""
    kind = type(x)
    if kind is list or kind is tuple:
        return Opened(list(x), (), kind)
    if kind is slice:
        return Opened([x.start, x.stop, x.step], (), lambda children: slice(*children))
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return Opened(list(x), (), lambda children: kind(*children))
    if isinstance(x, dict):
        names = tuple(x)
        return Opened(list(x.values()), names, lambda c: _like_dict(x, names, c))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = tuple(f.name for f in dataclasses.fields(x) if hasattr(x, f.name))
        return Opened([getattr(x, f) for f in fields], fields, lambda c: _like_object(x, fields, c))
    return None


def _like_dict(x: dict[Any, Any], names: tuple[Any, ...], children: list[Any]) -> Any:
    if type(x) is dict:
        return dict(zip(names, children, strict=True))
    if (node := SUPPORTED_NODES.get(type(x))) is not None:
        return node.unflatten_fn(children, node.flatten_fn(x)[1])
    like = copy.copy(x)
    like.update(zip(names, children, strict=True))
    return like


def _like_object(x: Any, fields: tuple[str, ...], children: list[Any]) -> Any:
    like = copy.copy(x)
    for name, child in zip(fields, children, strict=True):
        object.__setattr__(like, name, child)
    return like


def map_tree(leaf: Callable[[Any], Any], x: Any) -> Any:
    """`x` built anew with `leaf(...)` in place of everything that is no container.

    >>> map_tree(lambda n: n + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    parts = opened(x)
    if parts is None:
        return leaf(x)
    return parts.build([map_tree(leaf, child) for child in parts.children])


def leaves(x: Any) -> list[Any]:
    """Everything in `x` that is no container, in order."""
    parts = opened(x)
    return [x] if parts is None else [leaf for child in parts.children for leaf in leaves(child)]


def named_leaves(x: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """`leaves` with the path of each: `[0]`, `added_cond_kwargs.time_ids`."""
    parts = opened(x)
    if parts is None:
        yield name, x
        return
    names = parts.names or [f"[{i}]" for i in range(len(parts.children))]
    for child_name, child in zip(names, parts.children, strict=True):
        dot = "." if name and parts.names else ""
        yield from named_leaves(child, f"{name}{dot}{child_name}")


def argument_name(call: tuple[tuple[Any, ...], dict[str, Any]], position: int) -> str:
    """The name of the plain value (or small host tensor) at `position` of `Signature.values`."""
    args, kwargs = call
    named = [*named_leaves(list(args), "argument "), *named_leaves(kwargs)]
    keyed = [n for n, x in named if not isinstance(x, torch.Tensor) or x.is_cpu]
    return keyed[position] if position < len(keyed) else f"value {position}"


def is_value(x: Any) -> bool:
    """Whether `x` is a plain value: equal values mean equal calls."""
    return isinstance(x, _VALUES)


def _place(call: Any, x: Any) -> str:
    args, kwargs = call if isinstance(call, tuple) and len(call) == 2 else (call, {})
    named = [*named_leaves(list(args), "argument "), *named_leaves(kwargs)]
    return next((name for name, leaf in named if leaf is x), "an argument")


def host_bytes(x: torch.Tensor) -> tuple[int, ...]:
    """The bytes of a small host tensor: part of the key, since recorded work bakes them in."""
    if x.numel() > SMALL_HOST_TENSOR:
        size = "x".join(map(str, x.shape))
        raise Uncapturable(f"a host tensor of {size} is an argument: move it to the device")
    return tuple(bytes_of(x).tolist())


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` as a flat uint8 tensor: comparing bytes, not numbers, sees NaN and -0."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _metadata(x: torch.Tensor, backend: Backend) -> tuple[Any, ...]:
    if type(x) not in backend.tensor_types and type(x) is not torch.Tensor:
        raise Uncapturable(f"an argument is a {type(x).__name__}, not a plain tensor")
    if x.layout is not torch.strided or x.is_conj() or x.is_neg():
        raise Uncapturable("an argument is a sparse, conjugated or negated view")
    device = x.device
    if device.type not in (backend.device_type, "cpu"):
        raise Uncapturable(f"an argument is on {device}")
    return (x.shape, x.stride(), x.dtype, device, x.requires_grad, misalignment(x, backend))


def misalignment(x: torch.Tensor, backend: Backend) -> int:
    """Bytes past an aligned address. A single element has no vectorised reads: 0, so that the
    timesteps of a schedule, views at ever other offsets, share one signature."""
    if x.is_cpu or x.numel() <= 1:
        return 0
    off = backend.address(x) % ALIGNMENT
    return off if off and distinct(x).numel() > 1 else 0


def distinct(x: torch.Tensor) -> torch.Tensor:
    """`x` without its repetitions: expanded dimensions (stride 0) cut to one element."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def overlaps(x: torch.Tensor) -> bool:
    """Whether two elements of `x` (without expanded dimensions) share memory."""
    dims = sorted((st, n) for n, st in zip(x.shape, x.stride(), strict=True) if n > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def like_in_memory(x: torch.Tensor, backend: Backend) -> torch.Tensor:
    """An uninitialised tensor with the shape, exact strides, dtype, device and alignment of `x`."""
    skipped = misalignment(x, backend) // x.element_size()
    reach = sum((n - 1) * st for n, st in zip(x.shape, x.stride(), strict=True))
    flat = torch.empty(skipped + 1 + max(reach, 0), dtype=x.dtype, device=x.device)
    # Not a view: its base would count as one more holder of the memory.
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        flat.untyped_storage(), skipped, x.size(), x.stride()
    )


class StaticInputs:
    """The runner's own copies of a call's tensors: what the recorded work reads.

    Copies reproduce strides (an expanded timestep stays expanded), dtype and alignment. Host
    tensors are copies too; their values are part of the key.

    >>> x = torch.ones(4, device=device)
    >>> static = StaticInputs([x], backend)
    >>> static.fill([x * 3])
    >>> static.tensors[0].tolist()
    [3.0, 3.0, 3.0, 3.0]
    """

    def __init__(self, tensors: list[torch.Tensor], backend: Backend) -> None:
        if any(overlaps(distinct(x)) for x in tensors):
            raise Uncapturable("an argument is a tensor whose elements overlap in memory")
        self.tensors = [like_in_memory(x, backend) for x in tensors]
        # Host tensors stay as they are: their values are part of the key.
        moving = [i for i, x in enumerate(self.tensors) if not x.is_cpu and x.numel()]
        self._moving = [(i, self.tensors[i].shape) for i in moving]
        self._targets = [distinct(self.tensors[i]).detach() for i in moving]
        for target, source in zip(self.tensors, tensors, strict=True):
            distinct(target.detach()).copy_(distinct(source))
        self.storages = {backend.storage(x).data_ptr(): i for i, x in enumerate(self.tensors)}

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Copies a call's tensors in, in the order of `Signature.tensors`."""
        if self._targets:
            sources = [
                tensors[i] if target.shape == shape else distinct(tensors[i])
                for (i, shape), target in zip(self._moving, self._targets, strict=True)
            ]
            with torch.no_grad():
                torch._foreach_copy_(self._targets, sources)

    def substitute(self, call: Any, tensors: list[torch.Tensor]) -> Any:
        """`call` with each tensor replaced by its static copy, all containers new."""
        copies = {id(x): static for x, static in zip(tensors, self.tensors, strict=True)}
        return map_tree(lambda x: copies.get(id(x), x), call)


class Edits:
    """What a forward does to the lists and dicts that it is given (some pop what they have used).

    Open it on the arguments before the call, `closed()` after it; `apply` then does the same to
    another call's arguments.

    >>> used = [1, 2]
    >>> edits = Edits(((used,), {}))
    >>> _ = used.pop(0)
    >>> theirs = [3, 4]
    >>> edits.closed().apply(((theirs,), {}))
    >>> theirs
    [4]
    """

    def __init__(self, call: Any) -> None:
        self._before = [(box, _contents(box)) for box in _boxes(call)]
        self._kept: list[tuple[int, list[int]]] = []

    def closed(self) -> Edits:
        """Compares. Raises `Uncapturable` if something was put in that was not there before."""
        for index, (box, before) in enumerate(self._before):
            now = _contents(box)
            if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
                continue
            places = {id(x): place for place, x in enumerate(before)}
            if any(id(x) not in places for x in now):
                raise Uncapturable(
                    "the forward puts something into a list or dict that it is given"
                )
            self._kept.append((index, [places[id(x)] for x in now]))
        self._before = []
        return self

    def apply(self, call: Any) -> None:
        """Leaves `call`'s lists and dicts as the recorded call left its own."""
        if not self._kept:
            return
        boxes = list(_boxes(call))
        for index, kept in self._kept:
            box = boxes[index]
            if isinstance(box, list):
                box[:] = [box[place] for place in kept]
            else:
                items = list(box.items())
                box.clear()
                box.update(items[place] for place in kept)


def _boxes(x: Any) -> Iterable[Any]:
    parts = opened(x)
    if parts is not None:
        if isinstance(x, (list, dict)):
            yield x
        for child in parts.children:
            yield from _boxes(child)


def _contents(box: Any) -> list[Any]:
    return list(box.values()) if isinstance(box, dict) else list(box)
