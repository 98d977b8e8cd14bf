"""The `torch` backend: the varlen flash kernel that torch ships, on CUDA, in half precision.

No soft-cap. Head dimensions to 256, odd ones padded with zeros; values narrower than keys likewise.
Sinks come in through the log-sum-exp that the kernel returns. Cached keys are gathered to packed
rows first: the kernel reads no pages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from accel.prefill.attention import AttentionGroup, AttentionLayer, Room, Unsupported
from accel.prefill.batch import Batch

_flash: Any = torch.ops.aten._flash_attention_forward
WIDEST = 256
"""The largest head dimension of the kernel; all must be multiples of 8."""


class TorchBackend:
    """Attends with `aten::_flash_attention_forward`. Raises `Unsupported` where that is missing."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise Unsupported(f"torch's flash kernel needs CUDA, the model is on {device}")
        if torch.cuda.get_device_capability(device) < (8, 0):
            raise Unsupported("torch's flash kernel needs compute capability 8.0")
        if not torch.backends.cuda.is_flash_attention_available():
            raise Unsupported("this torch was built without flash attention")

    def objection(self, group: AttentionGroup, *, static: bool, paged: bool) -> str | None:
        """As `AttentionBackend.objection`."""
        if group.dtype not in (torch.float16, torch.bfloat16):
            return f"no {str(group.dtype).removeprefix('torch.')}, only half precision"
        if group.softcap is not None:
            return "no soft-cap"
        if max(group.head_dim, group.value_dim) > WIDEST:
            return f"no head dimension above {WIDEST}"
        return None

    def preparation(self, group: AttentionGroup) -> str | None:
        """None: the kernel comes with torch."""
        return None

    def attention(self, room: Room) -> TorchAttention:
        """A new object for `room`."""
        for group in room.groups:
            if why := self.objection(group, static=room.static, paged=room.paged):
                raise Unsupported(why)
        return TorchAttention(room)


class TorchAttention:
    """One room's attention. It has nothing to plan: lengths are read on the device.

    The longest query and key lengths are host numbers; both are always the bounds of the bucket, so
    that a break and a full graph launch the same kernels.
    """

    workspace_bytes = 0

    def __init__(self, room: Room) -> None:
        self._room = room
        self._batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        """Remembers the batch."""
        self._batch = batch

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As `Attention.run`."""
        batch, cache, group = self._batch, self._room.cache, layer.group
        assert batch is not None, "plan() comes first"
        ends = batch.device.q_indptr
        if batch.paged:
            assert cache is not None, "a paged batch needs a cache"
            k = cache.keys(layer.index).flatten(0, 1)[batch.kv_rows]
            v = cache.values(layer.index).flatten(0, 1)[batch.kv_rows]
            ends = batch.device.kv_indptr
        width = -(-max(group.head_dim, group.value_dim) // 8) * 8
        attended, log_sum, *_ = _flash(
            *(_widened(x, width) for x in (q, k, v)),
            batch.device.q_indptr,
            ends,
            batch.bucket,
            k.shape[0],
            0.0,
            True,
            False,
            scale=group.scale,
            window_size_left=None if group.window is None else group.window - 1,
            window_size_right=None if group.window is None else 0,
        )
        if layer.sinks is not None and log_sum.dim() != 2:
            raise Unsupported("this torch returns its log-sum-exp request by request")
        if layer.sinks is not None:
            attended = attended * _share_without_sink(log_sum, layer.sinks, len(q))
        out.copy_(attended[..., : group.value_dim])


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _share_without_sink(log_sum: torch.Tensor, sinks: torch.Tensor, rows: int) -> torch.Tensor:
    """`[rows, heads, 1]`: exp(l) / (exp(l) + exp(sink)) = sigmoid(l - sink), where l is the natural
    log-sum-exp of the scores, `[heads, rows]` (newer kernels pad its rows)."""
    away = log_sum[:, :rows].float() - sinks.float()[:, None]
    return away.sigmoid().t()[:, :, None]
