"""Operators of the simulated device: each runs the CPU's kernel on views over the same bytes.

`Operator` is the general case, for eager work and for recordings. Which operators there are, and
the few that differ (host reads, copies between devices), is known to `tests.simulated.library`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.simulated import tensors
from tests.simulated.arena import Pool
from tests.simulated.device import Stream, card, scribble
from tests.simulated.segment import Step, flat
from tests.simulated.tensors import CPU, CPU_KEY, arena, host_view

aten = torch.ops.aten
_function_mode_is_on = torch._C._is_torch_function_mode_enabled
COPY_SCALARS = {"index_put", "_index_put_impl", "_unsafe_index_put"}
"""Operators that copy a host scalar to the device, which no recording can hold."""
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"}
_NEVER_DRAW = ("_scaled_dot_product", "_fused_sdp_choice")
MATRIX_PRODUCTS |= {"_scaled_mm", "_grouped_mm", "_addmm_activation"}


def _refuse_inference_tensors(written: list[Tensor]) -> None:
    """As torch itself does for single tensors, before the device is asked."""
    if any(x.is_inference() for x in written):
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode: not allowed")


class Operator:
    """One aten overload on the device.

    `host_scalars_only` is off for operators that take whole host tensors (indices).
    """

    host_scalars_only = True

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        self.name: str = schema.name.removeprefix("aten::").rstrip("_")
        self.overload = overload
        self.multiplies = self.name in MATRIX_PRODUCTS
        self.written = _written_arguments(schema)
        self.returned = [self.written.get(_alias(r)) for r in schema.returns]
        self.makes_new = any(place is None for place in self.returned) and bool(self.returned)
        self.resizes = any(isinstance(place, str) for place in self.written.values())
        self.draws = torch.Tag.nondeterministic_seeded in overload.tags and not (
            self.name.startswith(_NEVER_DRAW)  # on the CPU
        )
        self.writes_lists = self.name.startswith("_foreach") and schema.name.endswith("_")
        self.run = _seeded(overload) if self.draws else _redispatch(overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _function_mode_is_on():
            with torch._C.DisableTorchFunction():
                return self.call(args, kwargs)
        return self.call(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.writes_lists and not torch.is_inference_mode_enabled():
            _refuse_inference_tensors(args[0])
        stream = card.current_stream()
        workspace = card.workspace(stream) if self.multiplies else 0
        if stream.segment is not None:
            return self.record(stream, args, kwargs, workspace)
        views, named = self.lower(args), self.lower_named(kwargs)
        card.issued(stream, self.name)
        if workspace:
            scribble(workspace)
        result = self.run(*views, **named)
        if self.resizes:
            self.adopt_sizes(kwargs, named, arena.heap, recording=False)
        return self.raise_up(result, args, kwargs, arena.heap, None)

    def record(
        self, stream: Stream, args: tuple[Any, ...], kwargs: dict[str, Any], workspace: int
    ) -> Any:
        """Notes the operator down: results get memory and poison, nothing else is written."""
        segment = stream.segment
        assert segment is not None
        if segment.invalid:
            raise segment.refuse("the recording was spoilt before")
        if self.draws:  # no harm done
            raise RuntimeError(
                "Attempt to increase offset for a sim generator not in capture mode."
            )
        if self.name in COPY_SCALARS and any(isinstance(x, Tensor) and x.is_cpu for x in args):
            raise segment.refuse("a copy of a host tensor that is not pinned")
        result = None
        if self.makes_new or self._must_size(kwargs):
            result, written = self.rehearse(args, kwargs)
            if self.resizes:
                self.adopt_sizes(kwargs, written, segment.pool, recording=True)
        targets: list[Tensor | None] = []
        out = self.raise_up(result, args, kwargs, segment.pool, targets)
        views = [_frozen(x) for x in self.lower(args)]
        named = {key: _frozen(value) for key, value in self.lower_named(kwargs).items()}
        segment.steps.append(Step(self.name, self.run, views, named, targets, workspace))
        card.counters.recorded += 1
        card.clock.host += card.clock.host_cost(self.name)
        return out

    def rehearse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the operator would return: the CPU kernel's shapes and strides, with wrong values.

        And the views that stood for the arguments by name, `out=` among them.

        Reads the uncomputed memory as it is, but zeros for integers, which may be indices, and for
        probabilities; what the operator writes is written to a copy.
        """
        views = list(self.lower(args))
        named = self.lower_named(kwargs)
        for key in range(len(views)):
            views[key] = self._scratch(views[key], key in self.written.values())
        for name in named:
            named[name] = self._scratch(named[name], name in self.written.values())
        state = card.generator.get_state() if self.draws else None
        result = self.run(*views, **named)
        if state is not None:
            card.generator.set_state(state)
        return result, named

    def _scratch(self, x: Any, written: bool) -> Any:
        if isinstance(x, list):
            return [self._scratch(part, written) for part in x]
        if not isinstance(x, Tensor) or not tensors.in_arena(x):
            return x
        if written:
            return x.clone()
        if not self.draws and (x.is_floating_point() or x.is_complex()):
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CPU).zero_()

    def lower(self, args: tuple[Any, ...]) -> list[Any]:
        return [self._lower(x) for x in args]

    def lower_named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not kwargs:
            return kwargs
        if self.resizes:
            return {key: self._lower_fenced(value) for key, value in kwargs.items()}
        return {key: self._lower(value) for key, value in kwargs.items()}

    def _lower(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if not x.is_cpu:
                return host_view(x)
            if self.host_scalars_only and x.dim() > 0:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, "
                    f"but found at least two devices, sim:0 and cpu! (in {self.overload})"
                )
            return x
        if isinstance(x, (list, tuple)):
            return [self._lower(part) for part in x]
        if isinstance(x, torch.device):
            return CPU
        return x

    def _lower_fenced(self, x: Any) -> Any:
        return tensors.fenced_host_view(x) if isinstance(x, Tensor) else self._lower(x)

    def _must_size(self, kwargs: dict[str, Any]) -> bool:
        return self.resizes and any(
            isinstance(kwargs.get(str(place)), Tensor) and kwargs[str(place)].numel() == 0
            for place in self.written.values()
        )

    def adopt_sizes(
        self, kwargs: dict[str, Any], named: dict[str, Any], pool: Pool, *, recording: bool
    ) -> None:
        """Gives `out=` tensors the size that the kernel gave to their views."""
        for place in self.written.values():
            out, view = kwargs.get(str(place)), named.get(str(place))
            if out is None or view is None or out.shape == view.shape:
                continue
            storage = out.untyped_storage()
            grows = storage.nbytes() < view.untyped_storage().nbytes()
            if grows:
                storage = tensors.new_storage(pool, view.untyped_storage().nbytes())
            tensors.restride(out, storage, view)
            if recording and grows:
                _poison(host_view(out))
            elif not recording and not tensors.in_arena(view):
                host_view(out).copy_(view)

    def raise_up(
        self,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pool: Pool,
        targets: list[Tensor | None] | None,
    ) -> Any:
        """The kernel's results as tensors of the device.

        What the operator wrote in place is returned as the argument it is. New tensors hold the
        kernel's values or, where `targets` collects them for a recording, poison.
        """
        if not self.makes_new:
            given = [_at(place, args, kwargs) for place in self.returned]
            return given[0] if len(given) == 1 else (tuple(given) if given else None)
        if len(self.returned) == 1:
            return self._wrap(result, args, pool, targets)
        wrapped = []
        for place, part in zip(self.returned, result, strict=True):
            if place is None:
                wrapped.append(self._wrap(part, args, pool, targets))
            else:
                wrapped.append(_at(place, args, kwargs))
                if targets is not None:
                    targets.extend(None for _ in flat(part))
        return tuple(wrapped)

    def _wrap(
        self, result: Any, args: tuple[Any, ...], pool: Pool, targets: list[Tensor | None] | None
    ) -> Any:
        if isinstance(result, (list, tuple)):
            return [self._wrap(part, args, pool, targets) for part in result]
        if not isinstance(result, Tensor):
            if targets is not None:
                targets.append(None)
            return result
        if tensors.in_arena(result):
            if targets is not None:
                targets.append(None)
            owners = [x for x in flat(list(args)) if isinstance(x, Tensor)]
            return tensors.view_of(owners, result)
        out = tensors.new_tensor(pool, result.dtype, result.size(), result.stride())
        view = host_view(out)
        if targets is None:
            view.copy_(result)
        else:
            targets.append(view)
            _poison(view)
        return out


def _poison(view: Tensor) -> None:
    segment = card.current_stream().segment
    assert segment is not None
    segment.poison(view)


def _alias(argument: Any) -> frozenset[str] | None:
    info = argument.alias_info
    return frozenset(info.before_set) if info is not None and info.is_write else None


def _written_arguments(schema: Any) -> dict[frozenset[str] | None, int | str]:
    """Where the arguments are that the operator writes, by alias set."""
    places: dict[frozenset[str] | None, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        alias = _alias(argument)
        if alias is not None:
            places[alias] = argument.name if argument.kwarg_only else position
    return places


def _at(place: int | str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place] if isinstance(place, int) else kwargs[str(place)]


def _redispatch(overload: Any) -> Callable[..., Any]:
    """Calls the CPU's kernel straight, or, where a number stands for a tensor, the slower way."""
    inner = overload.redispatch
    places = [i for i, a in enumerate(overload._schema.arguments) if str(a.type) == "Tensor"]
    if len(places) < 2:
        return partial(inner, CPU_KEY)

    def run(*args: Any, **kwargs: Any) -> Any:
        for place in places:
            if place < len(args) and isinstance(args[place], (float, int, complex)):
                return overload(*args, **kwargs)
        return inner(CPU_KEY, *args, **kwargs)

    return run


def _seeded(overload: Any) -> Callable[..., Any]:
    """Runs the kernel on the device's random sequence. Not by lending it the host's generator:
    other threads draw from that in the meantime."""
    inner = _redispatch(overload)

    def with_generator(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= place and kwargs.get("generator") is None:
            kwargs["generator"] = card.generator
        return inner(*args, **kwargs)

    names = [argument.name for argument in overload._schema.arguments]
    if "generator" in names:
        place = names.index("generator")
        return with_generator
    return _dropout if overload.overloadpacket is aten.native_dropout else _refused(overload)


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """What the CPU's kernel does, which takes no generator."""
    if train is False or not x.numel():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool)
    mask.bernoulli_(1 - p, generator=card.generator)
    return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def _refused(overload: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{overload} draws from the host's generator: not on this device")

    return run


def _frozen(x: Any) -> Any:
    """A host scalar by its value now, as an argument of a kernel would be."""
    if isinstance(x, list):
        return [_frozen(part) for part in x]
    if isinstance(x, Tensor) and x.dim() == 0 and not tensors.in_arena(x):
        return x.clone()
    return x
