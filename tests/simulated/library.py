"""Which aten operators the simulated device has, and the ones that are not just a kernel on bytes.

Composite operators are left to torch, so that they fall apart as on any real device. Views are
torch's own kernels on the device's tensors. Whatever asks the host for a value, or copies between
host and device, is counted, and refused while the stream records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.simulated import autocast, tensors
from tests.simulated.attention import scaled_dot_product_attention
from tests.simulated.device import card
from tests.simulated.operators import Operator
from tests.simulated.tensors import CPU_KEY, SIM, host_view

aten = torch.ops.aten
_set: Any = aten.set_.source_Storage_storage_offset.redispatch
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_FOREIGN = ("sparse", "nested", "quantize", "mkldnn", "cudnn", "miopen", "nnpack", "sym_")
_LEFT_TO_TORCH = {
    "detach",
    "lift",
    "resize_as_",
    "set",
    "set_data",
    "copy",
    "_lazy_clone",
    "resize",
}
# Their output's shape, or their validity, depends on values, and torch has no tag for it.
_VALUE_DEPENDENT = {"masked_select", "nonzero", "bincount", "unique_consecutive", "multinomial"}
_VALUE_DEPENDENT |= {"_unique", "_unique2", "unique_dim", "unique_dim_consecutive", "histc"}


class ValueDependent(Operator):
    """An operator whose output's shape the host must wait for."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        card.read_by_host(card.current_stream(), self.name)
        return super().call(args, kwargs)


class Indexing(Operator):
    """Indexing by tensors: masks are turned into positions, host indices are uploaded."""

    host_scalars_only = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        indices = [x for x in args[1] if x is not None]
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
        if masks and not _fills(args, masks):
            card.read_by_host(card.current_stream(), f"{self.name} with a mask")
        if any(x.is_cpu for x in indices):
            _upload(f"{self.name} with indices of the host")
        return super().call(args, kwargs)


class Copy(Operator):
    """`copy_` within the device, and between it and the host."""

    host_scalars_only = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, source = args[0], args[1]
        if target.is_cpu and source.numel():
            card.read_by_host(card.current_stream(), "a copy to the host")
        elif source.is_cpu and target.numel():
            _upload("a copy from the host")
        return super().call((target, source), {})


class ToCopy(Operator):
    """`_to_copy`, seen when the source or the destination is on the device."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].is_cpu:  # torch's own: an empty tensor of the device, and `copy_`
            return self.run(*args, **kwargs)
        destination = kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        kwargs.pop("pin_memory", None)
        if destination is None or destination.type == SIM.type:
            return super().call(args, kwargs)
        if destination.type == "meta":
            return self.run(host_view(args[0]), **kwargs, device=destination)
        stream = card.current_stream()
        if args[0].numel():
            card.read_by_host(stream, "a copy to the host")
        card.issued(stream, self.name)
        result = self.run(host_view(args[0]), **kwargs)
        return result if destination.type == "cpu" else result.to(destination)


def _fills(args: tuple[Any, ...], masks: list[Tensor]) -> bool:
    """Whether `index_put_` is a `masked_fill_` with a number: no positions needed."""
    if len(args) < 3 or len(masks) != 1 or sum(x is not None for x in args[1]) != 1:
        return False
    return bool(args[2].is_cpu and args[2].numel() == 1)


def _upload(what: str) -> None:
    stream = card.current_stream()
    if stream.segment is not None:
        raise stream.segment.refuse(what)
    card.counters.uploads += 1


def _value_of(tensor: Tensor) -> Any:
    with tensors.quiet():
        card.read_by_host(card.current_stream(), "_local_scalar_dense")
        return aten._local_scalar_dense.default.redispatch(CPU_KEY, host_view(tensor))


def _equal(left: Tensor, right: Tensor) -> bool:
    with tensors.quiet():
        card.read_by_host(card.current_stream(), "equal")
        return torch.equal(host_view(left), host_view(right))


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    with tensors.quiet():
        format_ = memory_format or torch.contiguous_format
        like = torch.empty(size, dtype=dtype, device="meta", memory_format=format_)
        return _uninitialised(like.dtype, like.size(), like.stride())


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    with tensors.quiet():
        return _uninitialised(dtype or torch.get_default_dtype(), size, stride)


def _uninitialised(dtype: torch.dtype, size: Any, stride: Any) -> Tensor:
    stream = card.current_stream()
    out = tensors.new_tensor(card.pool_of(stream), dtype, size, stride)
    if stream.segment is not None:
        stream.segment.poison(host_view(out))
    return out


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    with tensors.quiet():
        format_ = memory_format or torch.contiguous_format
        like = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=format_)
        needed = like.numel() * like.itemsize
        storage = tensor.untyped_storage()
        if tensor.storage_offset() * like.itemsize + needed > storage.nbytes():
            pool = card.pool_of(card.current_stream())
            old, storage = storage, tensors.new_storage(pool, needed)
            if old.nbytes():
                kept = tensors.bytes_at(old.data_ptr(), min(old.nbytes(), needed))
                tensors.bytes_at(storage.data_ptr(), kept.numel()).copy_(kept)
        tensors.restride(tensor, storage, like)
        return tensor


def _set_storage(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    count = storage.nbytes() // tensor.dtype.itemsize
    _set(CPU_KEY, tensor, storage, 0, (count,), (1,))
    return tensor


def _set_tensor(tensor: Tensor, source: Tensor) -> Tensor:
    _set(
        CPU_KEY,
        tensor,
        source.untyped_storage(),
        source.storage_offset(),
        source.size(),
        source.stride(),
    )
    return tensor


def _set_nothing(tensor: Tensor) -> Tensor:
    return _set_storage(tensor, tensors.new_storage(tensors.arena.heap, 0))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return target.copy_(source, non_blocking)


def _zeros_that_cost_memory(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=SIM)


def _of_the_torch_kind(overload: Any) -> Callable[..., Any]:
    """torch's own kernel, on the device's tensors: for what touches sizes and strides only."""

    def view(*args: Any, **kwargs: Any) -> Any:
        return overload.redispatch(CPU_KEY, *args, **kwargs)

    return view


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _value_of,
    "equal": _equal,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "set_.source_Storage": _set_storage,
    "set_.source_Tensor": _set_tensor,
    "set_": _set_nothing,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "_efficientzerotensor": _zeros_that_cost_memory,
    "record_stream": lambda tensor, stream: None,
}


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every operator that the device has a kernel for, and the kernel."""
    for qualified in torch._C._dispatch_get_all_op_names():
        if not qualified.startswith("aten::"):
            continue
        name = qualified.removeprefix("aten::")
        packet, _, overload_name = name.partition(".")
        try:
            overload = getattr(getattr(aten, packet), overload_name or "default")
        except (AttributeError, RuntimeError):
            continue
        kernel = _kernel_for(qualified, name, packet, overload)
        if kernel is not None:
            yield name, kernel


def _kernel_for(qualified: str, name: str, packet: str, overload: Any) -> Callable[..., Any] | None:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if packet == "copy_":
        return Copy(overload)
    if packet == "_to_copy" and not overload._overloadname.endswith("out"):
        return ToCopy(overload)
    if packet in _LEFT_TO_TORCH or any(word in packet for word in _FOREIGN):
        return None
    on_cpu = _has_kernel(qualified, "CPU")
    schema = overload._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return _of_the_torch_kind(overload) if on_cpu else None
    if torch.Tag.inplace_view in overload.tags:
        return _of_the_torch_kind(overload) if on_cpu else None
    if not on_cpu and not _worth_a_kernel(qualified, overload):
        return None
    return _kind_of(packet, overload)(overload)


def _worth_a_kernel(qualified: str, overload: Any) -> bool:
    """Whether torch would compose this operator out of others one by one, where one kernel does."""
    schema = overload._schema
    explicit = _has_kernel(qualified, "CompositeExplicitAutograd")
    explicit |= _has_kernel(qualified, "CompositeExplicitAutogradNonFunctional")
    if not explicit or _has_kernel(qualified, "CompositeImplicitAutograd"):
        return False
    if overload._overloadname.endswith("out") or any(a.name == "device" for a in schema.arguments):
        return False
    takes = any("Tensor" in str(a.type) for a in schema.arguments)
    gives = any("Tensor" in str(r.type) for r in schema.returns) or schema.is_mutable
    return takes and gives


def _kind_of(packet: str, overload: Any) -> type[Operator]:
    if packet in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"):
        return Indexing
    if packet in ("_unsafe_index_put", "_index_put_impl"):
        return Indexing
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    if packet.rstrip("_") in _VALUE_DEPENDENT or tags & set(overload.tags):
        return ValueDependent
    return Operator


def install() -> list[torch.library.Library]:
    """Registers the kernels. They stay as long as the libraries returned."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels():
        library.impl(name, kernel, "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", scaled_dot_product_attention, key)
    # Pinned host memory: accepted, and ordinary.
    library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    return [library, autocast.install(library)]
