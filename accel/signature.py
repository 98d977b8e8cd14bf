"""A call's tree of arguments: hashable key, tensor leaves, static inputs.

Knows how arguments and results are put together (lists, tuples, dicts, dataclasses, tensors, plain
values) and how a call's tensors are copied into the runner's own. Does not know what is recorded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from accel.backend import Backend
from accel.layout import ALIGNMENT, bytes_of, distinct, like_in_memory, misalignment, overlaps

SMALL_HOST_TENSOR = 64
"""Elements: up to here a host tensor is part of the key by value."""

_OF_PYTHON = (types.NoneType, bool, int, float, complex, str, bytes, range, types.EllipsisType)
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_VALUES = (*_OF_PYTHON, *_OF_TORCH, enum.Enum)
_PLAIN = frozenset((types.NoneType, bool, int, str))
_LEAVES = _PLAIN | {torch.Tensor, torch.nn.Parameter, float}
"""Common types that are no containers, told at a glance."""

Place = tuple[Any, ...]
"""Where in a tree: the names and numbers on the way there."""


class Uncapturable(Exception):
    """A call that cannot be keyed; the message says which argument and why.

    >>> signature(((object(),), {}), backend)
    Traceback (most recent call last):
    accel.signature.Uncapturable: argument [0] is a object, whose contents may change
    """


class Signature(NamedTuple):
    """What the recorded work depends on in a call's arguments.

    `shapes` holds the tree and the tensors' metadata, `values` the plain values in tree order;
    these two are the key. `tensors` are the tensor leaves, each object once.

    >>> call = (1,), {"scale": 2.0}
    >>> key = signature(call, backend)
    >>> [argument_name(call, place) for place in key.places], key.tensors
    (['argument [0]', 'scale'], [])
    """

    shapes: tuple[Any, ...]
    values: tuple[Any, ...]
    tensors: list[torch.Tensor]

    @property
    def places(self) -> list[int]:
        """Which node of the tree each of the values is: a plain one, or a tensor on the host."""
        found = enumerate(self.shapes)
        return [n for n, x in found if x is None or (isinstance(x, tuple) and x[0] == "cpu")]


def signature(call: Any, backend: Backend) -> Signature:
    """Keys `call`, an `(args, kwargs)`. Raises `Uncapturable` for what cannot be keyed.

    >>> one, two = (signature(((x, 2), {}), backend) for x in torch.ones(2, 4, device=device))
    >>> one.shapes == two.shapes, one.values
    (True, ((<class 'int'>, 2),))
    """
    shapes: list[Any] = []
    values: list[Any] = []
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] = {}  # lists and dicts by their node's number, tensors by their own
    ahead = [call]
    while ahead:  # `nodes`, written out: a launch waits for this, and finds caches cold
        x = ahead.pop()
        kind = type(x)
        if kind in _PLAIN:  # most of what is no tensor
            shapes.append(None)
            values.append((kind, x))
        elif kind is tuple or kind is dict or kind is list:  # the common ones, without `opened`
            first = None if kind is tuple else seen.setdefault(id(x), len(shapes))
            names, children = ((*x,), x.values()) if kind is dict else (len(x), x)
            shapes.append((kind, names, first))
            ahead.extend(reversed(children))
        elif kind not in _LEAVES and (container := opened(x)) is not None:
            if getattr(x, "__dict__", None):
                _refuse_unseen(x, container, call, len(shapes))
            first = seen.setdefault(id(x), len(shapes)) if isinstance(x, (list, dict)) else None
            shapes.append((kind, container.names, first))
            ahead.extend(reversed(container.children))
        elif id(x) in seen:
            shapes.append(seen[id(x)])
        elif isinstance(x, torch.Tensor):
            seen[id(x)] = len(tensors)
            tensors.append(x)
            shapes.append(_metadata(x, backend))
            if shapes[-1][0] == "cpu":
                values.append(host_bytes(x))
        elif isinstance(x, torch.Generator):
            shapes.append(kind)  # a recording that draws from one is refused
        elif isinstance(x, _VALUES):
            values.append((kind, repr(x) if isinstance(x, (float, complex)) else x))  # 0.0 == -0.0
            shapes.append(None)
        else:
            what = f"{argument_name(call, len(shapes))} is a {kind.__name__}"
            raise Uncapturable(f"{what}, whose contents may change")
    return Signature(tuple(shapes), tuple(values), tensors)


def _refuse_unseen(x: Any, container: Container, call: Any, number: int) -> None:
    """Raises `Uncapturable` if `x`, a container and the node of that number in `call`, has an
    attribute that is none of its items or fields, nor None."""
    for name, value in vars(x).items():
        if value is not None and name not in container.names:
            what = f"{argument_name(call, number)}, a {type(x).__name__},"
            raise Uncapturable(f"{what} carries {name!r} beside what is in it")


def argument_name(call: Any, number: int) -> str:
    """The argument that is the node of that number in `call`, an `(args, kwargs)`, in words.

    >>> call = (5,), {"extra": {"steps": [6]}}
    >>> argument_name(call, 2), argument_name(call, 6)
    ('argument [0]', 'extra.steps[0]')
    """
    places = (place for place, _, _ in nodes(call))
    keyword, *path = next(itertools.islice(places, number, None))
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return name.removeprefix(".") if keyword else f"argument {name}"


class Container(NamedTuple):
    """A container's children, their names or numbers, and how to build its like from others.

    >>> opened({"a": 1}).names
    ('a',)
    """

    children: Sequence[Any]
    names: Sequence[Any]
    build: Callable[[list[Any]], Any]


def opened(x: Any) -> Container | None:
    """Takes a container apart; None if `x` is none that can be put together again.

    >>> opened([1, 2]).build([3, 4]), opened(5)
    ([3, 4], None)
    """
    kind = type(x)
    if kind in _LEAVES:
        return None
    if kind is list or kind is tuple:
        return Container(x, range(len(x)), kind)
    if kind is slice:
        return Container((x.start, x.stop, x.step), range(3), lambda parts: slice(*parts))
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return Container(x, range(len(x)), lambda parts: kind(*parts))
    if isinstance(x, dict):
        names = tuple(x)
        return Container(tuple(x.values()), names, lambda c: _like(x, operator.setitem, names, c))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        found = {}
        for field in dataclasses.fields(x):
            with contextlib.suppress(Exception):  # some refuse to tell
                found[field.name] = getattr(x, field.name)
        names, children = tuple(found), list(found.values())
        return Container(children, names, lambda c: _like(x, object.__setattr__, names, c))
    return None


def _like(x: Any, put: Callable[..., None], names: Sequence[Any], children: list[Any]) -> Any:
    """A copy of `x`, of its type and with its attributes, with other children."""
    like = copy.copy(x)
    for name, child in zip(names, children, strict=True):
        put(like, name, child)
    return like


def nodes(x: Any) -> Iterator[tuple[Place, Any, Container | None]]:
    """Everything in `x`, containers before what is in them, in order: (place, node, opened).

    >>> [(place, node) for place, node, _ in nodes({"a": [1]})]
    [((), {'a': [1]}), (('a',), [1]), (('a', 0), 1)]
    """
    ahead: list[tuple[Place, Any]] = [((), x)]
    while ahead:
        place, node = ahead.pop()
        container = opened(node)
        yield place, node, container
        if container is not None:
            inside = zip(container.names, container.children, strict=True)
            ahead.extend(reversed([((*place, name), child) for name, child in inside]))


def leaves(x: Any) -> list[Any]:
    """Everything in `x` that is no container, in order.

    >>> leaves({"a": [1, 2], "b": (3,)})
    [1, 2, 3]
    """
    return [node for _, node, container in nodes(x) if container is None]


def map_tree(leaf: Callable[[Any], Any], x: Any) -> Any:
    """`x` built anew with `leaf(...)` in place of everything that is no container. A list or dict
    that is there twice is one in the result, too: it can be changed.

    >>> map_tree(lambda n: n + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    return _mapped(leaf, x, {})


def _mapped(leaf: Callable[[Any], Any], x: Any, boxes: dict[int, Any]) -> Any:
    """`boxes` are the lists and dicts that were met so far. (A nested function that calls itself
    would keep them until garbage is collected.)"""
    container = opened(x)
    if container is None:
        return leaf(x)
    if id(x) in boxes:
        return boxes[id(x)]
    made = container.build([_mapped(leaf, child, boxes) for child in container.children])
    if isinstance(x, (list, dict)):
        boxes[id(x)] = made
    return made


def is_value(x: Any) -> bool:
    """Whether `x` is a plain value: equal values mean equal calls.

    >>> is_value(1.5), is_value([])
    (True, False)
    """
    return isinstance(x, _VALUES)


def host_bytes(x: torch.Tensor) -> tuple[int, ...]:
    """The bytes of a small host tensor: part of the key, since recorded work bakes them in.

    >>> host_bytes(torch.tensor([1, 2], dtype=torch.uint8))
    (1, 2)
    """
    if x.numel() > SMALL_HOST_TENSOR:
        size = "x".join(map(str, x.shape))
        raise Uncapturable(f"a host tensor of {size} is an argument: move it to the device")
    return tuple(bytes_of(x).tolist())


def _metadata(x: torch.Tensor, backend: Backend) -> tuple[Any, ...]:
    if type(x) not in backend.tensor_types:
        raise Uncapturable(f"an argument is a {type(x).__name__}, not a plain tensor")
    dtype, device = x.dtype, x.device
    if x.layout is not torch.strided or (dtype.is_complex and x.is_conj()) or x.is_neg():
        raise Uncapturable("an argument is a sparse, conjugated or negated view")
    if x.__dict__:
        raise Uncapturable(f"an argument is a tensor that carries {next(iter(x.__dict__))!r}")
    if (where := _type(device)) not in (backend.device_type, "cpu"):
        raise Uncapturable(f"an argument is on {device}")
    off = backend.address(x) % ALIGNMENT and misalignment(x, backend)
    return (where, device, x.shape, x.stride(), dtype, x.requires_grad, off)


_type = functools.cache(operator.attrgetter("type"))
"""A device's: torch makes the text anew each time."""


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
        self.tensors = [like_in_memory(x, backend).requires_grad_(x.requires_grad) for x in tensors]
        self._alike: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
        self._repeats = any(0 in x.stride() for x in tensors)
        for i, x in enumerate(self.tensors):
            if not x.is_cpu and x.numel():  # host tensors stay: their values are part of the key
                numbers, targets = self._alike.setdefault(x.dtype, ([], []))
                numbers.append(i)
                targets.append(distinct(x).detach())
        for target, source in zip(self.tensors, tensors, strict=True):
            distinct(target.detach()).copy_(distinct(source))
        self.storages = {backend.storage(x).data_ptr(): i for i, x in enumerate(self.tensors)}

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Copies a call's tensors in, in the order of `Signature.tensors`. Torch copies tensors of
        one dtype by one kernel, others one by one. Past autograd, whose layers are a fifth of the
        time that this takes the host when caches are cold: the device waits for it."""
        with torch._C._AutoDispatchBelowAutograd():
            for numbers, targets in self._alike.values():
                theirs = map(tensors.__getitem__, numbers)
                sources = map(distinct, theirs) if self._repeats else theirs
                torch._foreach_copy_(targets, list(sources))

    def substitute(self, call: Any, tensors: list[torch.Tensor]) -> Any:
        """`call` with each tensor replaced by its static copy, all containers new."""
        copies = {id(x): static for x, static in zip(tensors, self.tensors, strict=True)}
        return map_tree(lambda x: copies.get(id(x), x), call)


class Edits:
    """What a forward does to the lists and dicts that it is given (some pop what they have used).

    Open it on the arguments before the call, close it after that; `apply` then does the same to
    another call's arguments.

    >>> used = [1, 2]
    >>> edits = Edits(((used,), {}))
    >>> _ = used.pop(0)
    >>> edits.close()
    >>> theirs = [3, 4]
    >>> edits.apply(((theirs,), {}))
    >>> theirs
    [4]
    """

    def __init__(self, call: Any) -> None:
        self._before = [(x, _contents(x)) for x in _containers(call)]
        self._kept: list[tuple[int, list[int]]] = []
        self._alive = leaves(call)  # so that no new thing takes an old one's identity

    def close(self) -> None:
        """Compares. Raises `Uncapturable` if something was put in that was not there before, or if
        a dataclass was changed."""
        for number, (x, before) in enumerate(self._before):
            now = _contents(x)
            if now == before:
                continue
            if not isinstance(x, (list, dict)):
                raise Uncapturable(f"the forward changes a {type(x).__name__} it is given")
            if not set(now) <= set(before):
                raise Uncapturable("the forward puts something into a list or dict it is given")
            self._kept.append((number, [before.index(item) for item in now]))
        self._before, self._alive = [], []

    def apply(self, call: Any) -> None:
        """Leaves `call`'s lists and dicts as the recorded call left its own."""
        containers = _containers(call) if self._kept else []
        for number, kept in self._kept:
            box = containers[number]
            items = list(box.items() if isinstance(box, dict) else box)
            box.clear()
            (box.update if isinstance(box, dict) else box.extend)(items[place] for place in kept)


def _containers(x: Any) -> list[Any]:
    """In order. A list or dict that is there twice counts once: `signature` tells it, too."""
    found = (node for _, node, container in nodes(x) if container is not None)
    once = {id(box) if isinstance(box, (list, dict)) else object(): box for box in found}
    return list(once.values())


def _contents(x: Any) -> list[Any]:
    found = None if isinstance(x, dict) else opened(x)
    return identities(x if found is None else found.children)


def identities(box: Any) -> list[Any]:
    """What is in a list, set or dict, to be compared without asking the things themselves.

    >>> one, other = [0.0], [-0.0]
    >>> one == other, identities(one) == identities(other), identities(one) == identities(one[:])
    (True, False, True)
    """
    return [(n, id(x)) for n, x in box.items()] if isinstance(box, dict) else [id(x) for x in box]
