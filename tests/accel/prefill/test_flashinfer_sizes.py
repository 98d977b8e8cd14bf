"""No batch's plan needs more memory than is set aside: against the planner's own steps."""

from __future__ import annotations

import random

import pytest

from accel.prefill.attention import AttentionGroup
from accel.prefill.flashinfer_sizes import plan_bytes, split_bytes, tile_rows

GROUPS = [
    AttentionGroup(heads, kv_heads, dim, dim, 1.0, window)
    for heads, kv_heads, dim, window in [
        (32, 8, 128, None),
        (64, 8, 64, 128),
        (8, 4, 256, None),
        (16, 16, 128, None),
    ]
]


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def aligned(nbytes: int) -> int:
    return ceil(nbytes, 16) * 16


def drawn(draw: random.Random, rows: int, slots: int) -> list[int]:
    """Lengths of live requests, then sentinels."""
    live = draw.randint(1, min(slots, rows))
    cuts = sorted(draw.sample(range(1, rows), live - 1)) if live > 1 else []
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    return lengths + [0] * (slots - live)


def splits(
    group: AttentionGroup, lengths: list[int], keys: list[int], tile: int, processors: int
) -> tuple[bool, int]:
    """Whether fa2 splits keys, and into how many blocks of work, outside of graphs: the smallest
    chunk of at least 128 keys with which the blocks fit the processors twice."""
    shared, most = group.heads // group.kv_heads, 2 * processors // group.kv_heads
    if group.window is not None:
        keys = [min(n, group.window - 1 + tile) for n in keys]

    def blocks(chunk: int) -> int:
        pairs = zip(lengths, keys, strict=True)
        return sum(ceil(n * shared, tile) * ceil(max(k, 1), chunk) for n, k in pairs)

    longest = max(*keys, 1)
    chunk = next((c for c in range(128, longest) if blocks(c) <= most), max(longest, 128))
    return chunk < longest, blocks(chunk)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("processors", [20, 132])
def test_fa2_outside_of_graphs(group: AttentionGroup, processors: int) -> None:
    draw = random.Random(3)
    rows, slots = 512, 6
    room = {"rows": rows, "slots": slots, "processors": processors}
    enough = split_bytes(group, static=False, **room)
    for _ in range(20):
        lengths = [n for n in drawn(draw, draw.randint(slots, rows), slots) if n]
        keys = [n + draw.choice([0, 0, 700]) for n in lengths]
        packed = sum(lengths) * (group.heads // group.kv_heads) // len(lengths)
        tile = tile_rows(AttentionGroup(1, 1, group.head_dim, group.value_dim, 1.0), packed)
        split, blocks = splits(group, lengths, keys, tile, processors)
        sums = 4 * group.heads * blocks * tile
        assert not split or aligned(sums * group.value_dim) + aligned(sums) <= enough
        numbers = 3 * aligned(4 * blocks) + 4 * (slots + 1) + 4 * (sum(lengths) + 1) + blocks + 64
        assert numbers <= plan_bytes(group, "fa2", **room)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows, slots", [(64, 16), (64, 128), (512, 16), (8192, 16)])
def test_fa2_in_graphs(group: AttentionGroup, rows: int, slots: int) -> None:
    processors, shared = 132, group.heads // group.kv_heads
    longest = (rows - slots + 1) % 2**32 * shared
    tile = tile_rows(AttentionGroup(1, 1, group.head_dim, group.value_dim, 1.0), longest)
    padded = max(2 * processors // group.kv_heads, ceil(rows * shared, tile) + slots - 1)
    sums = 4 * group.heads * padded * tile
    room = {"rows": rows, "slots": slots, "processors": processors}
    needed = aligned(sums * group.value_dim) + aligned(sums)
    assert needed <= split_bytes(group, static=True, **room) <= 1.02 * needed + 2**14
    numbers = 3 * aligned(4 * padded) + 4 * (slots + 1) + 4 * (rows + 1) + padded + 96
    assert numbers <= plan_bytes(group, "fa2", **room)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows, slots", [(64, 16), (512, 200), (8192, 16)])
def test_fa3(group: AttentionGroup, rows: int, slots: int) -> None:
    draw = random.Random(5)
    tile = 192 if group.value_dim == 64 else 128
    enough = plan_bytes(group, "fa3", rows=rows, slots=slots, processors=132)
    in_graphs = (ceil(rows, tile) + slots - 1) * group.heads
    for _ in range(20):
        lengths = drawn(draw, draw.randint(1, rows), slots)
        works = sum(ceil(n, tile) for n in lengths) * group.heads
        assert works <= in_graphs
        assert 7 * aligned(4 * in_graphs) + aligned(4 * 133) <= enough
