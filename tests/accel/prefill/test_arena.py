"""Pieces in which a forward's tensors find places: on paper, and as the allocator does."""

from __future__ import annotations

import random

import pytest
import torch

from accel.graph import BreakableGraph, capture
from accel.memory import Pool
from accel.prefill.arena import SMALL, UNIT, WORTH, Event, fit, peak, pieces
from accel.prefill.memory_plan import Lives, _pieces, drawn_out

MIB = 2**20


def layers(count: int, rows: float = 1) -> list[Event]:
    """The large tensors of so many layers of Qwen3-4B for 8,192 rows, or a part of these, in MiB,
    in the order in which they were seen: what a layer is given outlives it, and the two large ones
    of a gated unit come last."""
    events: list[Event] = []

    def born(*sizes: int) -> list[int]:
        first = sum(nbytes >= 0 for _, nbytes in events)
        events.extend((first + i, round(size * rows * MIB)) for i, size in enumerate(sizes))
        return [first + i for i in range(len(sizes))]

    def died(*numbers: int) -> None:
        events.extend((number, -1) for number in numbers)

    embedded, *_ = born(40, 2, 2)
    hidden = embedded
    for _ in range(count):
        normed, projected, q = born(40, 64, 64)
        died(projected)
        projected, k = born(16, 16)
        died(projected)
        v, turned, turned_k = born(16, 64, 16)
        died(q, k)
        out, projected = born(64, 40)
        died(out, turned, turned_k, v, normed)
        [middle] = born(40)
        died(projected)
        normed, gate, up = born(40, 152, 152)
        died(up)
        [down] = born(40)
        died(gate, normed)
        [after] = born(40)
        died(down, middle, *([] if hidden == embedded else [hidden]))
        hidden = after
    return events


def drawn(seed: int) -> list[Event]:
    """Births and deaths at random."""
    draw, events, alive, born = random.Random(seed), list[Event](), list[int](), 0
    for _ in range(60):
        if alive and draw.random() < 0.45:
            events.append((alive.pop(draw.randrange(len(alive))), -1))
        else:
            events.append((born, draw.choice([2, 3, 5, 8, 13, 21]) * MIB))
            alive.append(born)
            born += 1
    return events


def test_a_gated_unit_has_a_piece_of_its_own() -> None:
    events = layers(3)
    found = pieces(events)
    assert found[0] == 2 * 152 * MIB and sum(found) <= peak(events) * 33 // 32
    assert not fit(events, [sum(found)])  # in one piece of that size the two find no place


def test_fewer_rows_find_places_in_the_same_pieces() -> None:
    """What is cut from the smallest block that is large enough may be another block for them."""
    passes = [layers(3, rows / 32) for rows in range(32, 16, -1)]
    assert not all(fit(events, pieces(passes[0])) for events in passes)
    found = pieces(*passes)
    assert all(fit(events, found) for events in passes)
    assert sum(found) <= peak(passes[0]) * 17 // 16


def test_more_layers_need_no_more() -> None:
    assert pieces(layers(12)) == pieces(layers(3))


@pytest.mark.parametrize("seed", range(8))
def test_all_tensors_find_places(seed: int) -> None:
    events = drawn(seed)
    found = pieces(events)
    assert fit(events, found) and peak(events) <= sum(found) <= 2 * peak(events)


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_such_as_the_allocator_takes_as_they_are(seed: int) -> None:
    """Smaller ones it takes as 20 MiB."""
    found = pieces(drawn(seed))
    assert all(size % UNIT == 0 and size >= WORTH for size in found)


def test_the_last_piece_has_room_for_what_ops_need_while_they_run() -> None:
    assert pieces([(0, 320 * MIB)]) == [330 * MIB]


def test_small_tensors_are_no_neighbours() -> None:
    small = [(number, SMALL) for number in range(100, 200)]
    events = layers(2)
    assert pieces([*small, *events]) == pieces(events)
    assert pieces(small) == [0] and pieces([]) == [0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the simulated device looks elsewhere")
@pytest.mark.parametrize(
    "passes",
    [
        [layers(3)],
        [layers(3, rows / 32) for rows in range(32, 16, -1)],
        *([drawn(seed)] for seed in range(1, 4)),
    ],
)
def test_the_allocator_finds_the_same_places(passes: list[list[Event]]) -> None:
    """It takes memory in whole blocks of 2 MiB; without the pieces it takes more."""
    device, found = torch.device("cuda:0"), pieces(*passes)
    assert taken(passes, found, device) <= sum(-(-n // (2 * MIB)) * 2 * MIB for n in found)
    assert taken(passes, [], device) > taken(passes, found, device)


def taken(passes: list[list[Event]], sizes: list[int], device: torch.device) -> int:
    """Bytes that a pool reserves for recordings of these births and deaths."""
    pool, graphs = Pool(device), list[BreakableGraph]()
    with pool.entered():
        pool.anchor(*sizes)
    for events in passes:
        alive = dict[int, torch.Tensor]()
        graphs.append(BreakableGraph(pool))
        with torch.no_grad(), capture(graphs[-1]):
            for number, nbytes in events:
                if nbytes < 0:
                    del alive[number]
                else:
                    alive[number] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            alive.clear()
    reserved = pool.bytes()
    pool.close()
    return reserved


def test_lives_are_noted_in_order(device: torch.device) -> None:
    with Lives() as noted:
        x = torch.zeros(256, device=device)
        y = x.view(2, -1) + 1
        del x
        y.add_(1)
    assert noted.events == [(0, 1024), (1, 1024), (0, -1)]


def test_what_grows_with_the_rows_is_drawn_out() -> None:
    few = [(0, 7), (1, 96), (2, 64), (1, -1), (2, -1)]
    many = [(0, 128), (1, 192), (0, -1), (2, 7)]
    assert drawn_out(few, many, 5, 0.5) == [(0, 640), (1, 960), (0, -1), (2, 7)]


def test_a_pass_that_makes_more_than_the_other_changes_little() -> None:
    """A workspace that only one of them makes is none of the tensors that grow."""
    events = layers(3)
    half = [(number, nbytes // 2 if nbytes > 0 else nbytes) for number, nbytes in events]
    workspace = (1000, 8 * MIB + 12)
    wanted = peak(events) * 4
    alike = _pieces(half, events, [4.0, 3.0], 0.5, wanted)
    assert len(alike) == 2
    assert _pieces([workspace, *half], events, [4.0, 3.0], 0.5, wanted) == alike
    step = wanted // 32
    assert sum(_pieces(half, [workspace, *events], [4.0, 3.0], 0.5, wanted)) <= sum(alike) + step


def test_what_does_not_add_up_is_one_piece() -> None:
    assert _pieces(layers(2), layers(3), [4.0], 0.3, 123 * MIB) == [123 * MIB]
