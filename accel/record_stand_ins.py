"""Stand-ins for functions of torch while a call is recorded: they make visible what no dispatch
mode sees.

Knows what of torch takes data from the host to the device on the quiet. What becomes of that data
it does not know (record.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import autograd
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._device import _device_constructors

from accel.graph import Refused, current_recording
from accel.item_slots import patched
from accel.signature import map_tree

_alone = threading.RLock()


@contextlib.contextmanager
def visible_host_data(whole: Callable[[Any, str], Any]) -> Iterator[None]:
    """Makes visible what no dispatch mode sees: `torch.tensor(data, device=...)`, which becomes
    building on the host and a copy, and lists as indices.

    Functions of torch have stand-ins for as long as a thread records, one thread at a time; in the
    others these do as the originals. (A `TorchFunctionMode` would see the calls too, and each
    `x.shape`: 2 µs an access.) `whole` makes those of functions that are recorded as one op.

    >>> from accel.graph import BreakableGraph, capture
    >>> from accel.memory import Pool
    >>> with capture(BreakableGraph(Pool(device)), automatic=False):
    ...     with visible_host_data(getattr):
    ...         torch.Tensor.new_tensor.__module__
    'accel.record_stand_ins'
    """
    with _alone, contextlib.ExitStack() as stack:
        stack.enter_context(_unknown_to_torch())
        ones = [(owner, name, whole(owner, name)) for owner, name in _WHOLE]
        ones += [(layers, "F", _functional(whole)) for layers in _LAYERS]
        for owner, name, stand_in in (*_STAND_INS, *ones):
            stack.enter_context(_standing_in(owner, name, stand_in))
        items = (_indexed(_ITEM, whole(_BASE, "__getitem__")), _indexed(_SET_ITEM, _SET_ITEM))
        stack.enter_context(patched(torch.Tensor, __getitem__=items[0], __setitem__=items[1]))
        yield


@contextlib.contextmanager
def _unknown_to_torch() -> Iterator[None]:
    """Torch asks once what its functions are, and would take stand-ins for them: in any thread,
    for a compiler say. What it asks for meanwhile it has to ask for again."""
    _device_constructors()  # asked for at each call with a default device
    before = {asked for asked in _asked_once() if asked.cache_info().currsize}
    try:
        yield
    finally:
        for asked in _asked_once():
            if asked not in before:
                asked.cache_clear()


def _asked_once() -> list[Any]:
    rules = sys.modules.get("torch._dynamo.trace_rules")
    names = "get_testing_overrides", "_get_overridable_functions", "_get_tensor_methods"
    asked = [getattr(torch.overrides, name, None) for name in names]
    asked += [getattr(rules, n, None) for n in ("get_torch_obj_rule_map", "get_tensor_method")]
    return [one for one in asked if hasattr(one, "cache_clear")]


@contextlib.contextmanager
def _standing_in(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Puts a stand-in in place, which TorchScript takes for the original, in any thread. What
    someone has put there meanwhile stays."""
    original, own = getattr(owner, name), name in vars(owner)
    if stand_in is original:
        yield
        return
    known = torch.jit._builtins._get_builtin_table()
    if id(original) in known:
        known[id(stand_in)] = known[id(original)]
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        known.pop(id(stand_in), None)
        if getattr(owner, name, None) is stand_in:
            setattr(owner, name, original) if own else delattr(owner, name)


def _functional(whole: Callable[[Any, str], Any]) -> types.ModuleType:
    """What torch's own layers find in place of `torch.nn.functional`, which stays as it is: others
    compare its functions with those that they are told of, in any thread."""
    actual, seen = torch.nn.functional, types.ModuleType("torch.nn.functional")
    originals = types.SimpleNamespace(linear=actual.linear, conv2d=actual.conv2d)
    stand_ins = {name: (x, whole(originals, name)) for name, x in vars(originals).items()}

    def find(name: str) -> Any:
        found = getattr(actual, name)  # the forward may put another in its place
        original, stand_in = stand_ins.get(name, (None, None))
        return stand_in if found is original else found

    vars(seen)["__getattr__"] = find
    return seen


def _from_data(original: Any) -> Any:
    """`original(data, ..., device=...)` as building on the host and a copy that can be seen."""

    @functools.wraps(original)
    def build(data: Any, *args: Any, **kwargs: Any) -> Any:
        recording, device = current_recording(), kwargs.get("device")
        empty = isinstance(data, list) and not data  # how torch itself asks for its default device
        if recording is None or empty or isinstance(data, torch.Tensor):
            return original(data, *args, **kwargs)
        device = torch.get_default_device() if device is None else torch.device(device)
        data = map_tree(_on_host, data)
        if device.type == "cpu":
            return original(data, *args, **kwargs)
        host = original(data, *args, **{**kwargs, "device": "cpu"})
        if isinstance(data, (list, tuple, int, float, complex)):
            recording.adopt([host])
        return host.to(device)

    return build


def _on_host(x: Any) -> Any:
    """Numbers on the device among data: torch would read them where no mode sees it."""
    return x.cpu() if isinstance(x, torch.Tensor) and not x.is_cpu else x


def _new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    if current_recording() is None:
        return torch._C.TensorBase.new_tensor(self, data, **kwargs)
    return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})


def _indexed(original: Any, plainly: Any) -> Any:
    """`__getitem__` or `__setitem__`, `plainly`, with lists of numbers made tensors where that can
    be seen."""

    @functools.wraps(original)
    def item(self: torch.Tensor, index: Any, *value: Any) -> Any:
        if not self.is_cpu and current_recording() is not None:
            index = _on_device(index, self.device)
        told = self, index, *value
        if has_torch_function(told):  # torch would tell it of the stand-in
            return handle_torch_function(original, told, *told)
        return plainly(self, index, *value)

    return item


def _text(self: torch.Tensor, **options: Any) -> str:
    """Torch turns modes off while it reads the numbers: a read that no recording survives."""
    if not self.is_cpu and current_recording() is not None:
        raise Refused("the forward prints a tensor or makes it part of a text")
    return _REPR(self, **options)


def _refusing(original: Any, why: str) -> Any:
    """`original`, but no recording that calls it is used."""

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if current_recording() is not None:
            raise Refused(why)
        return original(*args, **kwargs)

    return refuse


def _on_device(index: Any, device: torch.device) -> Any:
    if isinstance(index, tuple):
        return tuple(_on_device(part, device) for part in index)
    if isinstance(index, list) and index and all(type(i) in (int, bool) for i in index):
        return torch.tensor(index, device=device)
    return index


def fitting(name: str, tensors: set[Any]) -> Callable[[Any], bool]:
    """Whether the arguments of a function of `_WHOLE` are plain ones, the first a tensor of one of
    the types `tensors`: of some nothing else is asked for that torch would read unseen.

    >>> x, kinds = torch.ones(2, device=device), {torch.Tensor}
    >>> [fitting("view", kinds)((x, size)) for size in (2, x)], fitting("cat", kinds)(([x, x], 0))
    ([True, False], True)
    >>> fitting("__getitem__", kinds)((x, (0, None))), fitting("__getitem__", kinds)((x, x))
    (True, False)
    """
    if name == "__getitem__":
        return lambda given: type(given[0]) in tensors and _is_basic(given[1])
    if name in _OF_SEVERAL:
        return lambda given: (
            type(given[0]) in (list, tuple)
            and tensors.issuperset(map(type, given[0]))
            and _SIZES.issuperset(map(type, given[1:]))
        )
    others = _SIZES if name in _SHAPED else {torch.dtype} if name == "to" else tensors | _PLAIN
    return lambda given: type(given[0]) in tensors and others.issuperset(map(type, given[1:]))


def _is_basic(index: Any) -> bool:
    """Whether an index is of numbers, slices and such alone: it computes nothing."""
    return all(
        _SIZES.issuperset((type(part.start), type(part.stop), type(part.step)))
        if type(part) is slice
        else type(part) in _INDICES
        for part in (index if type(index) is tuple else (index,))
    )


_SIZES = {int, bool, torch.Size, types.NoneType}
"""Not tuples, in which there may be tensors: torch reads such a size on the device."""
_INDICES = {int, types.NoneType, types.EllipsisType}
_PLAIN = {types.NoneType, bool, int, float, tuple, torch.Size}
_BASE = torch._C.TensorBase
_ITEM, _SET_ITEM = _BASE.__getitem__, _BASE.__setitem__

_SHAPES = "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "chunk"
VIEWS = frozenset((*_SHAPES, "view_as_complex", "view_as_real", "__getitem__"))
"""What computes nothing."""
_SHAPED = frozenset((*_SHAPES, "reshape", "flatten", "mean"))
"""What is asked for by sizes or dimensions."""
_OF_SEVERAL = "cat", "stack"
_LAYERS = (torch.nn.modules.linear, torch.nn.modules.conv)
_FUNCTIONS = "group_norm", "layer_norm", "rms_norm", "rsqrt", "view_as_complex", "view_as_real"
_METHODS = "reshape", "flatten", "contiguous", "to", "float", "pow", "mean", "tanh"
OPERATORS = "__neg__", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"
_WHOLE: list[tuple[Any, str]] = [
    (torch._C._nn, "silu"),
    *((torch, name) for name in (*_FUNCTIONS, *_OF_SEVERAL)),
    *((torch.Tensor, name) for name in (*_SHAPES, *_METHODS, *OPERATORS)),
]
"""What most ops of most models are, with the linear layers and convolutions of `_LAYERS`, and
indexing. Not those that others keep, compare or replace: activations that a layer is made with in
another thread, say, or `scaled_dot_product_attention`."""
_BACKWARD = "_engine_run_backward"
"""What computes gradients: in a thread that does not record, so unseen."""
_REPR: Callable[..., str] = torch.Tensor.__repr__
_STAND_INS: list[tuple[Any, str, Any]] = [
    (torch, "tensor", _from_data(torch.tensor)),
    (torch, "as_tensor", _from_data(torch.as_tensor)),
    (torch, "asarray", _from_data(torch.asarray)),
    (torch.Tensor, "new_tensor", _new_tensor),
    (torch.Tensor, "__repr__", _text),
    (torch, "manual_seed", _refusing(torch.manual_seed, "the forward seeds random generators")),
    (autograd, _BACKWARD, _refusing(getattr(autograd, _BACKWARD), "the forward differentiates")),
]
