"""A mode in which a scheduler's reads of the device are answered by the host.

A scheduler's code runs as it is, on the device, operation by operation. Only where it asks the
device for a value (`item`, `if`, an index, `nonzero`), and the value follows exactly from the
tables that the host knows (scheduler_tables.py), the mode answers instead of waiting. Uploads do
not wait either. Knows nothing of any scheduler's formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel.patches.scheduler_tables import Known, upload

Thunk = Callable[[], Tensor]

# Operations that are the same on any IEEE device: no division (a division by a host number is a
# multiplication by its inverse on CUDA), no powers, no logarithms. The device runs them too.
_DUNDER = ("add", "radd", "sub", "rsub", "mul", "rmul", "eq", "ne", "ge", "gt", "le", "lt", "neg")
_EXACT = {"add", "sub", "subtract", "rsub", "mul", "multiply", "eq", "ne", "ge", "gt", "le", "lt"}
_EXACT |= {f"__{name}__" for name in _DUNDER} | {"floor", "neg", "abs", "clamp", "any", "all"}
_EXACT |= {"long", "int", "float", "double", "bool", "flatten", "unsqueeze", "squeeze"}
_EXACT |= {"logical_and", "logical_not", "__and__", "__or__", "__invert__"}
_READS = {"item", "tolist", "is_nonzero", "__bool__", "__int__", "__float__", "__index__"}


class Answering(TorchFunctionMode):
    """While it is on, reads of what follows from `values` are answered by the host.

    `may_solve` says that systems of equations need no check for being singular: the check is a
    read. One instance serves one call of a scheduler's method.
    """

    def __init__(self, tables: list[Known], may_solve: bool) -> None:
        super().__init__()
        self._tables, self._may_solve = tables, may_solve
        self._derived: dict[int, tuple[Tensor, Thunk]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        rule = _RULES.get(name)
        if rule is None or not args or "out" in kwargs:
            if self._derived and (_writes(name) or "out" in kwargs):
                self._forget_what_follows_from(kwargs.get("out", args[0] if args else None))
            return func(*args, **kwargs)
        return rule(self, func, args, kwargs)

    def thunk(self, x: Any) -> Thunk | None:
        """What computes the value of a device tensor on the host; None if nothing does."""
        if type(x) is not Tensor:
            return None
        if x.is_cpu:
            return lambda: x
        derived = self._derived.get(id(x))
        if derived is not None:
            return derived[1]
        if x.dim() > 1:
            return None
        for known in self._tables:
            if known.holds(x):
                return lambda: known.view_like(x, known.host())
        return None

    def note(self, x: Any, thunk: Thunk) -> Any:
        """Remembers how the value of `x` would be computed, should someone ask; returns `x`."""
        if type(x) is Tensor and not x.is_cpu:
            memory: list[Tensor] = []

            def once() -> Tensor:
                if not memory:
                    memory.append(thunk())
                return memory[0]

            self._derived[id(x)] = x, once
        return x

    def _forget_what_follows_from(self, written: Any) -> None:
        """Called when a tensor is about to be written to: the lazy values may follow from it."""
        if isinstance(written, Tensor) and not written.is_cpu:
            known = {table.storage for table in self._tables}
            known |= {x.untyped_storage()._cdata for x, _ in self._derived.values()}
            if written.untyped_storage()._cdata not in known:
                return
        self._derived.clear()

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        thunk = self.thunk(args[0])
        return func(*args, **kwargs) if thunk is None else func(thunk(), *args[1:], **kwargs)

    def _exact(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if type(result) is not Tensor or result.dim() > 1 or result.is_cpu:
            return result
        if "alpha" in kwargs or any(isinstance(x, Tensor) for x in kwargs.values()):
            return result  # a product and a sum at once round once on a GPU
        thunks = [(self.thunk(x) if isinstance(x, Tensor) else (lambda x=x: x)) for x in args]
        if None not in thunks:
            self.note(result, lambda: func(*(thunk() for thunk in thunks if thunk), **kwargs))
        return result

    def _getitem(self, func: Any, args: Any, kwargs: Any) -> Any:
        table, index = args
        if isinstance(index, Tensor) and index.dim() == 0 and not index.is_cpu:
            thunk = self.thunk(index)
            if thunk is not None and not index.is_floating_point() and index.dtype != torch.bool:
                index = int(thunk())  # as torch itself does, which asks the device
        if _is_list_of_positions(index) and type(table) is Tensor and not table.is_cpu:
            return torch.stack([table[i] for i in index])  # the list would be uploaded
        result = func(table, index)
        whole = self._derived.get(id(table))
        if whole is not None and not isinstance(index, (Tensor, tuple)):
            self.note(result, lambda: whole[1]()[index])
        return result

    def _unbind(self, func: Any, args: Any, kwargs: Any) -> Any:
        parts = func(*args, **kwargs)  # `for part in whole`
        whole = self._derived.get(id(args[0]))
        if whole is not None and args[0].dim() == 1:
            for place, part in enumerate(parts):
                self.note(part, lambda place=place: whole[1]()[place])  # type: ignore[misc]
        return parts

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        thunk = self.thunk(x)
        if thunk is None or x.is_cpu or x.dim() != 1 or len(args) > 1 or set(kwargs) - {"as_tuple"}:
            return func(*args, **kwargs)
        found = thunk().nonzero()
        places = [torch.full((), int(place), device=x.device) for place in found[:, 0]]
        flat = torch.stack(places) if places else torch.zeros(0, dtype=torch.long, device=x.device)
        if kwargs.get("as_tuple"):
            return (self.note(flat, lambda: found[:, 0]),)
        return self.note(flat.unsqueeze(1), lambda: found)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        if type(x) is not Tensor or "copy" in kwargs or x.requires_grad:
            return func(*args, **kwargs)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
        crosses = device is not None and device.type != x.device.type and memory_format is None
        if crosses and x.is_cpu and device.type != "meta":
            return self._upload(func, args, kwargs, device, dtype)
        thunk = self.thunk(x)
        if crosses and device.type == "cpu" and thunk is not None:
            return thunk().to(dtype or x.dtype, copy=True)
        result = func(*args, **kwargs)
        if thunk is not None:
            self.note(result, lambda: thunk().to(dtype or x.dtype))
        return result

    def _upload(
        self, func: Any, args: Any, kwargs: Any, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        x: Tensor = args[0]
        for known in self._tables:
            if known.source.is_cpu and known.holds(x):
                result = known.view_like(x, known.on(device)).to(dtype or x.dtype, copy=True)
                break
        else:
            try:
                result = upload(x, device, dtype)
            except RuntimeError:  # the memory cannot be pinned
                result = func(*args, **kwargs)
        if x.dim() <= 1:
            self.note(result, lambda: x.to(dtype or x.dtype))
        return result

    def _cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        thunk = None if len(args) > 1 or kwargs else self.thunk(args[0])
        return func(*args, **kwargs) if thunk is None or args[0].is_cpu else thunk().clone()

    def _solve(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._may_solve or set(kwargs) - {"left"} or len(args) != 2 or args[0].is_cpu:
            return func(*args, **kwargs)
        return torch.linalg.solve_ex(*args, **kwargs, check_errors=False).result


@functools.cache
def _writes(name: str) -> bool:
    """Whether a torch function of this name writes to an argument: `add_`, `__iadd__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _RULES)
    return name.endswith("_")


def _is_list_of_positions(index: Any) -> bool:
    return isinstance(index, list) and bool(index) and all(type(i) is int for i in index)


_RULES: dict[str, Callable[[Answering, Any, Any, Any], Any]] = {
    **dict.fromkeys(_EXACT, Answering._exact),
    **dict.fromkeys(_READS, Answering._read),
    "__getitem__": Answering._getitem,
    "unbind": Answering._unbind,
    "nonzero": Answering._nonzero,
    "to": Answering._to,
    "cpu": Answering._cpu,
    "linalg_solve": Answering._solve,
}
