"""How much memory FlashInfer's plans and split kernels need: arithmetic that its planner does, too.

Too little of it is an error in `plan`, too much is memory that a model could use. Formulas from the
planner of 0.6.13 (`attention/scheduler.cuh`): upper bounds over all batches of a room.
"""

from __future__ import annotations

from accel.prefill.attention import AttentionGroup

SLACK = 4096
"""Bytes for alignment: a plan has ten arrays at most, each aligned to 16."""


def tile_rows(group: AttentionGroup, rows: int) -> int:
    """Packed rows (tokens times query heads per key head) that a block of fa2 takes, if one request
    has `rows` tokens. Wide heads have smaller tiles.

    >>> group = AttentionGroup(heads=8, kv_heads=2, head_dim=128, value_dim=128, scale=1.0)
    >>> tile_rows(group, 100), tile_rows(group, 5), tile_rows(group, 2)
    (128, 64, 16)
    """
    packed = rows * (group.heads // group.kv_heads)
    if packed > 64 and group.value_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def split_bytes(
    group: AttentionGroup, *, rows: int, slots: int, processors: int, static: bool
) -> int:
    """fa2's partial results where keys are split among blocks: float32 values and one sum per tile
    row. Graphs are always planned split, other batches only while there are idle processors.

    heads · tiles · tile · (value_dim + 1) · 4, where tiles is at most ceil(rows · group / tile) +
    slots - 1, or two blocks per processor and key head.

    >>> group = AttentionGroup(heads=32, kv_heads=8, head_dim=128, value_dim=128, scale=1.0)
    >>> split_bytes(group, rows=8192, slots=16, processors=132, static=True) >> 20
    546
    >>> split_bytes(group, rows=8192, slots=16, processors=132, static=False) >> 20
    66
    """
    shared = group.heads // group.kv_heads
    # The planner takes rows - slots + 1 for the longest request, which wraps around below zero.
    tile = tile_rows(group, rows - slots + 1 if static and rows >= slots else 2**20)
    tiles = max(1, 2 * processors // group.kv_heads)
    if static:
        tiles = max(tiles, -(-rows * shared // tile) + slots - 1)
    return group.heads * tiles * tile * (group.value_dim + 1) * 4 + SLACK


def plan_bytes(
    group: AttentionGroup, generation: str, *, rows: int, slots: int, processors: int
) -> int:
    """What a plan writes: int32 numbers per tile of work.

    >>> group = AttentionGroup(heads=32, kv_heads=8, head_dim=128, value_dim=128, scale=1.0)
    >>> plan_bytes(group, "fa3", rows=8192, slots=16, processors=132)
    75412
    """
    if generation == "fa3":
        tile = 192 if group.value_dim == 64 else 128
        works = (-(-rows // tile) + slots - 1) * group.heads
        return 7 * 4 * works + 4 * (processors + 1) + SLACK
    shared, smallest_tile = group.heads // group.kv_heads, 16
    tiles = -(-rows * shared // smallest_tile) + slots - 1
    tiles = max(tiles, 2 * processors // group.kv_heads)
    return (3 * 4 + 1) * tiles + 4 * (slots + 1) + 4 * (rows + 1) + SLACK
