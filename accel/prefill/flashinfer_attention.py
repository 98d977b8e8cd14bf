"""The `flashinfer` backend: FlashInfer's batch prefill kernels, fa3 on Hopper and fa2 elsewhere.

Ragged kernels where nothing has a prefix, paged ones otherwise. Half precision; windows, soft-cap,
latent attention without prefixes; sinks through the log-sum-exp that the kernels return, since they
ignore the argument of that name. Which kernels are compiled is in flashinfer_kernels.py, how much
memory they need in flashinfer_sizes.py.

fa3 computes a row the same way in whatever batch and plan, so breaks and full graphs agree bit for
bit. fa2 splits keys among idle processors, by a plan of its own for graphs: there they agree up to
rounding.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from accel.prefill.attention import AttentionGroup, AttentionLayer, Room, Unsupported
from accel.prefill.batch import Batch
from accel.prefill.flashinfer_kernels import (
    DIMS,
    Kernel,
    compiled,
    generation_for,
    kernel_for,
    missing_tool,
    package,
)
from accel.prefill.flashinfer_sizes import plan_bytes, split_bytes

_log = logging.getLogger("accel")
UNUSED = 16
"""Bytes of a workspace that is asked for and not written: fa3 never splits keys."""


@dataclass(frozen=True)
class Gpu:
    """What kernels and memory depend on."""

    capability: tuple[int, int]
    processors: int

    @classmethod
    def at(cls, device: torch.device) -> Gpu:
        """The GPU of a device. Raises `Unsupported` if it is none."""
        if device.type != "cuda":
            raise Unsupported(f"FlashInfer needs CUDA, the model is on {device}")
        properties = torch.cuda.get_device_properties(device)
        return cls((properties.major, properties.minor), properties.multi_processor_count)


class FlashInferBackend:
    """Attends with FlashInfer. Raises `Unsupported` where it is absent or the GPU is too old.

    Belongs to one runner: its full graphs share one workspace, as they never run side by side.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        self.gpu = Gpu.at(device)
        if self.gpu.capability < (8, 0):
            raise Unsupported("FlashInfer's half precision needs compute capability 8.0")
        self.package = package()
        self.generation = generation_for(self.gpu.capability)
        self._workspace: torch.Tensor | None = None
        self._known: set[Kernel] = set()

    def objection(self, group: AttentionGroup, *, static: bool, paged: bool) -> str | None:
        """As `AttentionBackend.objection`."""
        if group.dtype not in (torch.float16, torch.bfloat16):
            return f"no {str(group.dtype).removeprefix('torch.')}, only half precision"
        if (dims := (group.head_dim, group.value_dim)) not in DIMS:
            known = ", ".join(str(key) for key, value in DIMS if key == value)
            return f"no head dimensions {dims[0]} and {dims[1]}, only {known} or 192 and 128"
        if paged and group.head_dim != group.value_dim:
            return "no pages with values narrower than keys"
        if group.heads % group.kv_heads:
            return f"{group.heads} heads cannot share {group.kv_heads} key heads evenly"
        if (tool := missing_tool()) and not compiled(self._kernel(group)):
            return f"its kernels must be compiled and {tool} is not installed"
        return None

    def preparation(self, group: AttentionGroup) -> str | None:
        """Compiling, unless the group's kernel is there."""
        if self._has(self._kernel(group)):
            return None
        return "compiles a kernel first, a minute or more: `accel doctor --prepare` does it ahead"

    def attention(self, room: Room) -> FlashInferAttention:
        """A new object for `room`. Logs one line if its first plan will compile kernels."""
        for group in room.groups:
            if why := self.objection(group, static=room.static, paged=room.paged):
                raise Unsupported(why)
        kernels = dict.fromkeys(map(self._kernel, room.groups))
        missing = [kernel for kernel in kernels if not self._has(kernel)]
        if missing:
            words = "attention='flashinfer' compiles %d kernels now, a minute or more each: %s"
            _log.warning(words, len(missing), "; ".join(map(str, missing)))
        self._known.update(missing)
        return FlashInferAttention(self, room)

    def workspace(self, room: Room) -> tuple[torch.Tensor, int]:
        """Bytes for what split kernels leave to each other, shared by all objects that they suffice
        for, and how many were taken anew. Older objects keep what they have: graphs have captured
        its address."""
        needed = UNUSED
        if self.generation == "fa2":
            needed = max(self._split_bytes(group, room) for group in room.groups)
        held, taken = self._workspace, 0
        if held is None or held.numel() < needed:
            held, taken = torch.empty(needed, dtype=torch.uint8, device=room.device), needed
            self._workspace = held
        return held, taken

    def _split_bytes(self, group: AttentionGroup, room: Room) -> int:
        return split_bytes(
            group,
            rows=room.rows,
            slots=room.slots,
            processors=self.gpu.processors,
            static=room.static,
        )

    def _kernel(self, group: AttentionGroup) -> Kernel:
        return kernel_for(group, self.generation)

    def _has(self, kernel: Kernel) -> bool:
        """Asks ninja once: a hundred milliseconds are much beside a capture."""
        if kernel not in self._known and compiled(kernel):
            self._known.add(kernel)
        return kernel in self._known


class FlashInferAttention:
    """One room's attention: a wrapper of FlashInfer's, and with it a plan, per attention group.

    In a static room only the kernels of its kind are made, and all that they read stays in place.
    """

    def __init__(self, backend: FlashInferBackend, room: Room) -> None:
        self._backend, self._room = backend, room
        self._batch: Batch | None = None
        self._planned: Any = None
        self._known: tuple[bool, torch.Tensor] | None = None
        """What is planned for: whether pages are read, and the numbers of all requests."""
        self._float_workspace, self._took = backend.workspace(room)
        self._wrappers: dict[tuple[AttentionGroup, bool], Wrapper] = {}
        if room.static:
            for group in room.groups:
                self._wrapper(group, room.paged)

    def plan(self, batch: Batch) -> None:
        """As `Attention.plan`: on the current stream, without waiting for more of it than the plan
        before this one. A plan depends on lengths and pages alone, and runs leave it as it is: for
        the same ones it holds."""
        self._batch = batch
        if self._knows(batch):
            return
        if self._planned is not None:
            # Its numbers leave a pinned buffer that is about to be overwritten.
            self._planned.synchronize()
        self._known = None
        try:
            for group in self._room.groups:
                self._wrapper(group, batch.paged).plan(batch)
            self._known = batch.paged, batch.host.flat.clone()
        finally:
            self._planned = event_now(self._room.device)

    def _knows(self, batch: Batch) -> bool:
        if self._known is None:
            return False
        paged, numbers = self._known
        return paged == batch.paged and torch.equal(numbers, batch.host.flat)

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As `Attention.run`. The kernels take as many rows as were planned: in a full graph all,
        since it is captured with the largest batch, elsewhere the real ones."""
        batch, cache = self._batch, self._room.cache
        assert batch is not None, "plan() comes first"
        real = slice(batch.tokens)
        keys_values: tuple[Any, ...] = aligned(k[real]), aligned(v[real])
        if batch.paged:
            assert cache is not None, "a paged batch needs a cache"
            keys_values = ((cache.keys(layer.index), cache.values(layer.index)),)
        wrapper = self._wrapper(layer.group, batch.paged).flashinfer
        attended, queries = out[real], aligned(q[real])
        if layer.sinks is None:
            wrapper.run(queries, *keys_values, out=attended)
            return
        _, log_sum = wrapper.run(queries, *keys_values, out=attended, return_lse=True)
        attended.mul_(share_without_sink(log_sum, layer.sinks))

    @property
    def workspace_bytes(self) -> int:
        """As `Attention.workspace_bytes`. What several share is counted for the first of them."""
        return self._took + sum(wrapper.nbytes for wrapper in self._wrappers.values())

    def _wrapper(self, group: AttentionGroup, paged: bool) -> Wrapper:
        if (group, paged) not in self._wrappers:
            made = Wrapper(self._backend, self._room, group, paged, self._float_workspace)
            self._wrappers[group, paged] = made
        return self._wrappers[group, paged]


class Wrapper:
    """One of FlashInfer's wrapper objects: what is planned for a group, ragged or paged."""

    def __init__(
        self,
        backend: FlashInferBackend,
        room: Room,
        group: AttentionGroup,
        paged: bool,
        float_workspace: torch.Tensor,
    ) -> None:
        self._backend, self._room, self._group, self._paged = backend, room, group, paged
        self._float_workspace = float_workspace
        self._buffers = _static_buffers(room, paged) if room.static else {}
        kind = "Paged" if paged else "Ragged"
        make = getattr(backend.package, f"BatchPrefillWith{kind}KVCacheWrapper")
        self.flashinfer = make(
            float_workspace,
            "NHD",
            use_cuda_graph=room.static,
            backend=backend.generation,
            **self._buffers,
        )
        self._plan_bytes = 0
        self._make_room_for(room.rows, room.slots)

    @property
    def nbytes(self) -> int:
        """Device memory that is this wrapper's own, in bytes."""
        lengths = 4 * 32768 if self._paged else 0  # one that FlashInfer makes in any case
        return self._plan_bytes + lengths + sum(x.nbytes for x in self._buffers.values())

    def plan(self, batch: Batch) -> None:
        """Plans a batch. Every number that kernels would guess is given. Page numbers are those on
        the device, so that their copy into a graph's buffer does not wait; without a graph they
        stay where they are given, and nobody promises that kernels read them from any address."""
        group, host = self._group, batch.host
        if not self._room.static:
            self._make_room_for(batch.bucket, host.slots)
        places = [host.kv_indptr]
        if self._paged:
            pages = batch.device.page_indices[: len(host.page_indices)]
            pages = pages if self._room.static else pages.clone()
            places = [host.page_indptr, pages, host.last_page_len]
        heads = [group.heads, group.kv_heads, group.head_dim]
        self.flashinfer.plan(
            host.q_indptr,
            *places,
            *heads,
            *([self._page_size] if self._paged else []),
            head_dim_vo=group.value_dim,
            causal=True,
            window_left=-1 if group.window is None else group.window - 1,
            logits_soft_cap=group.softcap,
            sm_scale=group.scale,
            q_data_type=group.dtype,
            kv_data_type=group.dtype,
            o_data_type=group.dtype,
            non_blocking=True,
        )

    @property
    def _page_size(self) -> int:
        assert self._room.cache is not None, "a paged batch needs a cache"
        return self._room.cache.page_size

    def _make_room_for(self, rows: int, slots: int) -> None:
        """Replaces FlashInfer's own buffers for plans, 8 MiB on the device and 8 pinned, by ones of
        the size that is needed, or larger ones by and by. The plan before has left the pinned one;
        the device's goes back to the allocator, so no stream may still read it."""
        backend = self._backend
        needed = plan_bytes(
            self._group,
            backend.generation,
            rows=rows,
            slots=slots,
            processors=backend.gpu.processors,
        )
        if needed <= self._plan_bytes:
            return
        if self._plan_bytes:
            event_now(self._room.device).synchronize()
        workspace = torch.empty(needed, dtype=torch.uint8, device=self._room.device)
        self.flashinfer.reset_workspace_buffer(self._float_workspace, workspace)
        self._plan_bytes = needed


def _static_buffers(room: Room, paged: bool) -> dict[str, torch.Tensor]:
    """What plans for a graph are copied to. Every request may have one page that is not full."""

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=room.device)

    if not paged:
        return {name: zeros(room.slots + 1) for name in ("qo_indptr_buf", "kv_indptr_buf")}
    assert room.cache is not None, "a paged room needs a cache"
    return {
        "qo_indptr_buf": zeros(room.slots + 1),
        "paged_kv_indptr_buf": zeros(room.slots + 1),
        "paged_kv_indices_buf": zeros(-(-room.kv_bound // room.cache.page_size) + room.slots),
        "paged_kv_last_page_len_buf": zeros(room.slots),
    }


def event_now(device: torch.device) -> Any:
    """An event behind all that is queued on the current stream of `device`."""
    return torch.cuda.current_stream(device).record_event()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, `[rows, heads, dim]` in half precision, or a copy: kernels read vectors of 16 bytes, and
    Hopper's copy engine knows no rows in the same place.

    >>> x = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    >>> aligned(x) is x, aligned(x.transpose(0, 1)).stride()
    (True, (64, 128, 1))
    >>> aligned(x[:, :1].expand(4, 2, 64)).stride()
    (128, 64, 1)
    """
    rows, heads, last = x.stride()
    fits = rows % 8 == heads % 8 == x.storage_offset() % 8 == 0 and rows and heads and last == 1
    # `contiguous` would leave the strides of a tensor with one row or one head as they are.
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def share_without_sink(log_sum: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, 1]`: exp(l) / (exp(l) + exp(sink)) = sigmoid(l - sink), where l is the natural
    log-sum-exp of the scores; `log_sum`, `[rows, heads]`, is that to base 2.

    >>> share_without_sink(torch.tensor([[1.0]]), torch.tensor([math.log(2)]))
    tensor([[[0.5000]]])
    """
    return torch.sigmoid(log_sum * math.log(2) - sinks.float())[:, :, None]
