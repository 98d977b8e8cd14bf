"""Figure of memory: where in the pool recorded ops write, what is kept there, who owns the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accel.breaks import Break
from accel.recorded import Recorded
from figures.canvas import (
    BREAK,
    COPY,
    EAGER,
    MONO,
    QUIET,
    SEGMENT,
    Canvas,
    Style,
)
from figures.scene import calls
from tests.simulated.tensors import arena

WIDTH, LEFT, MAP, ROW = 880, 190, 360, 17


@dataclass
class Stretch:
    """Bytes of the pool: `begin` counts from the pool's first."""

    begin: int
    size: int
    kept: bool = False


@dataclass
class Row:
    """A step of a graph: an op that writes, or a break that reads."""

    name: str
    stretches: list[Stretch]
    is_break: bool = False


def memory() -> Canvas:
    """The example's two variants in their one pool."""
    variants = calls()[-1].variants
    tables = [_rows_of(variant) for variant in variants]
    top = max(s.begin + s.size for rows in tables for row in rows for s in row.stretches)
    canvas = Canvas(WIDTH, 446, "Memory: the pool, weak aliases, boundary buffers, who owns what")
    canvas.text(16, 24, "The pool: where recorded ops write", size=13, bold=True)
    y = 48.0
    for number, rows in enumerate(tables, start=1):
        written = sum(s.size for row in rows if not row.is_break for s in row.stretches)
        highest = max(s.begin + s.size for row in rows for s in row.stretches)
        canvas.text(16, y, f"variant {number}", size=12, bold=True)
        told = f"{written:,} bytes written, in {highest:,} bytes of pool"
        canvas.text(LEFT, y, told, size=11, colour=QUIET)
        y = _draw_map(canvas, rows, y + 8, MAP / top) + 22
    _legend(canvas, 420)
    _owners(canvas, variants[0])
    return canvas


def _rows_of(variant: Recorded) -> list[Row]:
    pool = arena.pools[variant.graph.pool.id]
    base = min(pool.slabs)
    rows: list[Row] = []
    steps: list[Any] = variant.graph.steps
    for step in steps:
        if isinstance(step, Break):
            given = [x for x in step._args if isinstance(x, torch.Tensor)]
            reads = [Stretch(x.data_ptr() - base, x.nbytes) for x in given]
            rows.append(Row(step.what.removeprefix("aten::"), reads, is_break=True))
        else:
            rows.extend(_row_of_op(op, base, variant) for op in step.steps)
    return rows


def _row_of_op(op: Any, base: int, variant: Recorded) -> Row:
    kept = {storage - base for storage in variant._results.storages}
    targets = [(x.data_ptr() - base, x.nbytes) for x in op.targets if x is not None]
    closing: Any = variant.graph.steps[-1]
    last = op is closing.steps[-1]
    return Row(op.name, [Stretch(at, size, last and at in kept) for at, size in targets])


def _draw_map(canvas: Canvas, rows: list[Row], y: float, scale: float) -> float:
    for row in rows:
        canvas.text(LEFT - 8, y + 12, row.name, size=11, anchor="end", font=MONO)
        canvas.line(LEFT, y + ROW, LEFT + MAP, y + ROW, "#e4e7ea")
        for stretch in row.stretches:
            style = COPY if stretch.kept else SEGMENT
            style = Style("none", BREAK.stroke, "4 2") if row.is_break else style
            x, w = LEFT + stretch.begin * scale, max(stretch.size * scale, 3)
            canvas.box(x, y + 2, w, ROW - 4, style, radius=2)
        y += ROW
    return y


def _legend(canvas: Canvas, y: float) -> None:
    entries = (
        (SEGMENT, "free again when Python let go of it"),
        (COPY, "the result: kept, and copied out"),
        (Style("none", BREAK.stroke, "4 2"), "read by a break, through a weak alias"),
    )
    x = 16.0
    for style, words in entries:
        canvas.box(x, y - 11, 16, 13, style, radius=2)
        canvas.text(x + 22, y, words, size=11)
        x += 46 + 6.5 * len(words)


def _owners(canvas: Canvas, variant: Recorded) -> None:
    breaks = [step for step in variant.graph.steps if isinstance(step, Break)]
    buffers = sum(x.nbytes for step in breaks for x in step.buffers)
    inputs = sum(x.nbytes for x in variant._static.tensors)
    canvas.text(586, 24, "Outside the pool", size=13, bold=True)
    owned = (
        (COPY, f"static input, {inputs:,} bytes a variant", "owned by the recording"),
        (BREAK, f"boundary buffer, {buffers:,} bytes", "owned by its break"),
        (EAGER, "weights: no copy", "owned by the module; address watched"),
        (EAGER, "tables from caches, constants", "owned by the model too: held"),
        (Style("#ffffff", COPY.stroke), "results", "copies, owned by the caller"),
    )
    y = 42.0
    for style, what, whose in owned:
        canvas.box(586, y, 278, 46, style)
        canvas.text(598, y + 19, what, size=12, bold=True)
        canvas.text(598, y + 36, whose, size=11, colour=QUIET)
        y += 58
