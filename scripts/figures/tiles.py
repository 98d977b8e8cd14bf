"""Tiles: a call's phases as small boxes in a row, time from left to right."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from accel.breaks import Break
from accel.graph import BreakableGraph
from figures.canvas import (
    ALARM,
    BREAK,
    COPY,
    EAGER,
    INK,
    MONO,
    RECORD,
    SEGMENT,
    WIDTH_OF,
    Canvas,
    Style,
)
from figures.scene import Call
from figures.trace import Phase, place

GAP, TITLE_HEIGHT, LINE_HEIGHT, SIZE = 6, 20, 14, 11
STYLES: dict[str, Style] = {
    "record": RECORD,
    "segment": SEGMENT,
    "break": BREAK,
    "copy": COPY,
    "eager": EAGER,
}


@dataclass
class Tile:
    """A box: its kind chooses the colour, `lines` are ops and values, `missed` marks a guard that
    did not fit."""

    kind: str
    title: str
    lines: list[str] = field(default_factory=list)
    missed: bool = False


def tiles_of(call: Call) -> list[Tile]:
    """What happened during `call`, in order."""
    graphs = [variant.graph for variant in call.variants]
    tiles: list[Tile] = []
    for phase in call.trace.phases:
        tiles.extend(_tiles_of_phase(phase, graphs))
    return tiles


def _tiles_of_phase(phase: Phase, graphs: list[BreakableGraph]) -> list[Tile]:
    if phase.kind == "eager":
        return _tiles_of_eager(phase.names)
    graph = next(g for g in graphs if phase.subject in g.steps)
    number = place(graph, phase.subject)
    if phase.kind in ("record", "segment"):
        return [Tile(phase.kind, f"segment {number}", phase.names)]
    step: Break = phase.subject
    what = step.what.removeprefix("aten::")
    names, copied = phase.names, phase.names[-1:] == ["copy"]
    lines = [what] + (names[:-1] if copied else names)
    if phase.value is not None:
        lines.append(f"= {phase.value}")
    tiles = [Tile("break", f"break {number}", lines, phase.missed is not None)]
    return tiles + ([Tile("copy", "buffer", ["copy"])] if copied else [])


def _tiles_of_eager(names: list[str]) -> list[Tile]:
    if names in (["copy"], ["_foreach_copy"]):
        return [Tile("copy", "input", names)]
    if names == ["clone"]:
        return [Tile("copy", "result", names)]
    return [Tile("eager", "eager", names)] if names else []


def wrapped(name: str, width: float) -> list[str]:
    """`name` in lines that fit `width` pixels, broken at underscores.

    >>> wrapped("_local_scalar_dense", 60)
    ['_local_', 'scalar_', 'dense']
    """
    room, lines = int(width / (WIDTH_OF[MONO] * SIZE)), [""]
    for part in re.findall(r"_*[^_]+_?(?=[^_]|$)|.+", name):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("")
        lines[-1] += part
    return lines


def height_of(tile: Tile, width: float) -> float:
    """Pixels that `tile` is high when it is `width` wide."""
    lines = sum(len(wrapped(line, width - 8)) for line in tile.lines)
    return TITLE_HEIGHT + LINE_HEIGHT * lines + 5


def draw_tile(canvas: Canvas, tile: Tile, x: float, y: float, width: float) -> None:
    """Draws `tile` with its top left corner at `x`, `y`."""
    canvas.box(x, y, width, height_of(tile, width), STYLES[tile.kind])
    middle = x + width / 2
    canvas.text(middle, y + 15, tile.title, size=10.5, anchor="middle", bold=True)
    lines = [part for line in tile.lines for part in wrapped(line, width - 8)]
    for i, line in enumerate(lines):
        told = line.startswith("= ")
        colour = ALARM if tile.missed and told else INK
        baseline = y + TITLE_HEIGHT + LINE_HEIGHT * i + 11
        canvas.text(
            middle, baseline, line, size=SIZE, anchor="middle", font=MONO, bold=told, colour=colour
        )


def draw_row(canvas: Canvas, tiles: list[Tile], x: float, y: float, width: float) -> float:
    """Draws `tiles` side by side, each `width` wide; returns the height of the highest."""
    for i, tile in enumerate(tiles):
        draw_tile(canvas, tile, x + i * (width + GAP), y, width)
    return max(height_of(tile, width) for tile in tiles)
