"""The `reference` backend: attention in plain torch, on any device, for every group.

Dense: every row looks at every key and a mask removes what it must not see. All shapes depend on
the bucket alone, so breaks and full graphs run the same kernels; slow and hungry for long prompts
(rows · keys numbers per head at a time). What other backends are tested against.
"""

from __future__ import annotations

import torch

from accel.prefill.attention import AttentionGroup, AttentionLayer, Room
from accel.prefill.batch import Batch


class ReferenceBackend:
    """Attends by matrix products and a softmax in float32.

    >>> backend = ReferenceBackend()
    >>> group = AttentionGroup(heads=4, kv_heads=2, head_dim=8, value_dim=8, scale=1.0)
    >>> backend.objection(group, static=True, paged=True) is None
    True
    """

    name = "reference"

    def objection(self, group: AttentionGroup, *, static: bool, paged: bool) -> str | None:
        """None: there is nothing that it cannot do."""
        return None

    def preparation(self, group: AttentionGroup) -> str | None:
        """None: there is nothing to compile."""
        return None

    def attention(self, room: Room) -> ReferenceAttention:
        """A new object for `room`."""
        return ReferenceAttention(room)


class ReferenceAttention:
    """One room's attention. The masks are made inside `run`, from the batch's device tensors: in a
    full graph they follow what the slots hold.

    >>> group = AttentionGroup(heads=1, kv_heads=1, head_dim=2, value_dim=2, scale=1.0)
    >>> room = Room(device, (group,), rows=4, slots=1, kv_bound=4)
    >>> attention = ReferenceAttention(room)
    >>> attention.plan(pack([Request((1, 2))], 4, device))
    >>> q = k = torch.zeros(4, 1, 2, device=device)
    >>> v = torch.arange(8.0).view(4, 1, 2).to(device)
    >>> out = torch.empty_like(v)
    >>> attention.run(AttentionLayer(0, group), q, k, v, out)
    >>> out[:2, 0].tolist()
    [[0.0, 1.0], [1.0, 2.0]]
    """

    workspace_bytes = 0

    def __init__(self, room: Room) -> None:
        self._room = room
        self._batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        """Nothing to prepare: remembers the batch."""
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
        batch, cache = self._batch, self._room.cache
        assert batch is not None, "plan() comes first"
        if batch.paged:
            assert cache is not None, "a paged batch needs a cache"
            k = cache.keys(layer.index).flatten(0, 1)[batch.kv_rows]
            v = cache.values(layer.index).flatten(0, 1)[batch.kv_rows]
        seen = visible(batch, k.shape[0], layer.group.window)
        shared = layer.group.heads // layer.group.kv_heads
        for head in range(layer.group.kv_heads):
            mine = slice(head * shared, (head + 1) * shared)
            sinks = None if layer.sinks is None else layer.sinks[mine]
            out[:, mine] = _attend(layer.group, q[:, mine], k[:, head], v[:, head], seen, sinks)


def visible(batch: Batch, keys: int, window: int | None) -> torch.Tensor:
    """`[bucket, keys]` boolean: which keys each row sees. Of padding: rows see nothing, keys are
    seen by nobody. Computed from the batch's device tensors.

    >>> visible(pack([Request((1, 2)), Request((3,))], 4, device), 4, None).long().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    slots = batch.device
    starts = slots.q_indptr.long()
    ends = slots.kv_indptr.long() if batch.paged else starts
    row, key = (torch.arange(n, device=ends.device) for n in (batch.bucket, keys))
    owner = torch.bucketize(row, starts[1:], right=True)
    holder = torch.bucketize(key, ends[1:], right=True)
    place = key - ends[holder.clamp(max=batch.slots - 1)]
    behind = batch.positions[0][:, None] - place[None, :]
    seen = (owner[:, None] == holder[None, :]) & (owner < batch.slots)[:, None] & (behind >= 0)
    return seen if window is None else seen & (behind < window)


def _attend(
    group: AttentionGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`[rows, heads, value_dim]` of the query heads that share one key head."""
    scores = torch.einsum("rhd,kd->hrk", q.float(), k.float()) * group.scale
    if group.softcap is not None:
        scores = group.softcap * torch.tanh(scores / group.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # Rows of padding see nothing: their softmax is NaN, which the runner clears.
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hrk,kd->rhd", weights, v.float()).to(group.dtype)
