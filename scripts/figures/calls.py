"""Figures of single calls: the recording, a replay that fits, replays that do not."""

from __future__ import annotations

from figures.canvas import ALARM, QUIET, Canvas
from figures.scene import Call, calls
from figures.tiles import GAP, Tile, draw_row, draw_tile, height_of, tiles_of

WIDTH, MARGIN = 880, 16


def recording() -> Canvas:
    """Call 2: segments are recorded above and run below, breaks run in between."""
    call = calls()[1]
    tiles = tiles_of(call)
    canvas = Canvas(WIDTH, 310, "Recording: a segment closes at a break and runs before it")
    left, top, below = MARGIN + 60, 44, 172
    width = (WIDTH - left - MARGIN - GAP * (len(tiles) - 1)) / len(tiles)
    _heading(canvas, call, "recorded while it runs")
    _lane(canvas, top + 40, "recorded,", "not run yet")
    _lane(canvas, below + 40, "runs", "for real")
    for i, tile in enumerate(tiles):
        x = left + i * (width + GAP)
        y = top if tile.kind == "record" else below
        draw_tile(canvas, tile, x, y, width)
        if tile.kind == "record":
            bottom = top + height_of(tile, width)
            turn = x + width + GAP + width / 2
            canvas.arrow((x + width, bottom - 12), (turn, bottom - 12), (turn, below - 2))
    graph = call.variants[0].graph
    told = ", ".join(f"{b.kind} break at {b.where.rpartition('/')[2]}" for b in graph.breaks)
    canvas.text(left, 298, f"The report afterwards: {graph.segments} segments, {told}.", size=11.5)
    return canvas


def replay() -> Canvas:
    """Call 3: another tensor, the same answer to the host read."""
    call = calls()[2]
    tiles = tiles_of(call)
    canvas = Canvas(WIDTH, 216, "Replay: input copied in, segments and breaks, result copied out")
    _heading(canvas, call, "replayed")
    left = MARGIN
    width = (WIDTH - 2 * MARGIN - GAP * (len(tiles) - 1)) / len(tiles)
    notes = {
        "input": ["into the", "static input"],
        "buffer": ["into the", "boundary buffer"],
        "result": ["the caller's own"],
        "break 1": ["guard: recorded", "False, so go on"],
        "break 2": ["Python runs", "again"],
    }
    draw_row(canvas, tiles, left, 44, width)
    for i, tile in enumerate(tiles):
        middle = left + i * (width + GAP) + width / 2
        for k, note in enumerate(notes.get(tile.title, ["one launch"])):
            canvas.text(middle, 166 + 14 * k, note, size=11, anchor="middle", colour=QUIET)
    canvas.text(left, 206, _launches(call), size=11.5)
    return canvas


def _launches(call: Call) -> str:
    eager = len(calls()[0].trace.phases[0].names)
    one_by_one = sum(len(p.names) for p in call.trace.phases if p.kind != "segment")
    segments = sum(p.kind == "segment" for p in call.trace.phases)
    return (
        f"Eagerly this call issues {eager} ops one by one; here it issues {one_by_one}, "
        f"copies included, and launches {segments} segments."
    )


def variants() -> Canvas:
    """Calls 4 to 7: another answer to the host read, and the old one again."""
    shown = calls()[3:7]
    canvas = Canvas(WIDTH, 560, "A guard that misses: eager, then a second variant")
    told = [
        "variant 1 misses its guard; this call runs eagerly",
        "misses again; what the call does is recorded as variant 2",
        "variant 2 fits and is replayed",
        "variant 2, used last, is tried first and misses; variant 1 fits",
    ]
    most = max(len(_merged(tiles_of(call))) for call in shown)
    width = (WIDTH - 2 * MARGIN - GAP * (most - 1)) / most
    y = 8.0
    for call, words in zip(shown, told, strict=True):
        _heading(canvas, call, words, y)
        tiles = _merged(tiles_of(call))
        high = draw_row(canvas, tiles, MARGIN, y + 28, width)
        for i, tile in enumerate(tiles):
            if tile.missed:
                x = MARGIN + i * (width + GAP) + width / 2
                under = y + 28 + height_of(tile, width) + 13
                canvas.text(x, under, "miss", size=11, anchor="middle", bold=True, colour=ALARM)
        y += high + 50
    return canvas


def _merged(tiles: list[Tile]) -> list[Tile]:
    """A recorded segment and its first run as one tile; long eager lists in words."""
    merged = []
    for i, tile in enumerate(tiles):
        if tile.kind == "segment" and i and tiles[i - 1].kind == "record":
            continue
        if tile.kind == "eager":
            tile = Tile("eager", "eager", [f"all {len(tile.lines)}", "ops"])
        merged.append(tile)
    return merged


def _heading(canvas: Canvas, call: Call, words: str, y: float = 8) -> None:
    canvas.text(MARGIN, y + 16, f"Call {call.number}, x = {call.value:g}:", size=13, bold=True)
    canvas.text(MARGIN + 126, y + 16, words, size=13)


def _lane(canvas: Canvas, y: float, *words: str) -> None:
    for i, line in enumerate(words):
        canvas.text(MARGIN - 6, y + 14 * i, line, size=11, colour=QUIET)
