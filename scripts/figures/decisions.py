"""Figure of decisions: what becomes of a call, and on what grounds."""

from __future__ import annotations

from accel.entry import BARRED_CALLS, HOST_SLACK, JUDGED_REPLAYS, LEAST_GAIN, VARIANTS
from figures.canvas import BREAK, EAGER, QUIET, RECORD, SEGMENT, Canvas, Style

WIDTH = 880
DECLINED = Style("#fde7e5", "#b3261e")


def decisions() -> Canvas:
    """The states of a signature in a runner; the numbers are the runner's own."""
    canvas = Canvas(
        WIDTH, 380, "What becomes of a call: eager, timed, recorded, replayed, declined"
    )
    top, low = 44, 230
    _state(canvas, 16, top, EAGER, "eager", "a module's first call:", "kernels load, caches fill")
    _state(
        canvas, 246, top, EAGER, "eager, timed", "a signature's first call:", "who waits for whom?"
    )
    _state(
        canvas, 476, top, RECORD, "recorded", "runs once, as segments", "and breaks: result right"
    )
    _state(canvas, 706, top, SEGMENT, "replayed", "every further call", "that its guards fit", 158)
    for x in (200, 430):
        canvas.arrow((x, top + 35), (x + 44, top + 35))
    canvas.arrow((660, top + 35), (704, top + 35))
    canvas.text(223, top - 12, "next call", size=11, anchor="middle", colour=QUIET)
    canvas.text(453, top - 12, "next call", size=11, anchor="middle", colour=QUIET)
    canvas.text(683, top - 12, "next call", size=11, anchor="middle", colour=QUIET)
    _state(
        canvas,
        246,
        low,
        DECLINED,
        "declined",
        "eager from now on,",
        "the reason in the report",
        232,
    )
    _state(
        canvas,
        566,
        low,
        BREAK,
        "miss",
        "1st eager, 2nd recorded,",
        f"and so on: {VARIANTS} variants",
        174,
    )
    _to_declined(canvas, top + 70, low)
    canvas.arrow((790, top + 70), (790, 190), (690, 190), (690, low - 2))
    canvas.text(782, 146, "a guard or the", size=11, anchor="end", colour=QUIET)
    canvas.text(782, 160, "state differs", size=11, anchor="end", colour=QUIET)
    canvas.arrow((596, low), (596, top + 72))
    canvas.text(604, 146, "next miss", size=11, colour=QUIET)
    _notes(canvas)
    return canvas


def _state(
    canvas: Canvas, x: float, y: float, style: Style, name: str, one: str, two: str, w: float = 184
) -> None:
    canvas.box(x, y, w, 70, style, radius=8)
    middle = x + w / 2
    canvas.text(middle, y + 21, name, size=13, anchor="middle", bold=True)
    canvas.text(middle, y + 41, one, size=11, anchor="middle")
    canvas.text(middle, y + 57, two, size=11, anchor="middle")


def _to_declined(canvas: Canvas, top: float, low: float) -> None:
    canvas.arrow((300, top), (300, low - 2))
    canvas.text(292, 146, "the device lags by", size=11, anchor="end", colour=QUIET)
    slack = f"{HOST_SLACK:.0%} or more of its time"
    canvas.text(292, 160, slack, size=11, anchor="end", colour=QUIET)
    canvas.arrow((500, top), (500, 176), (440, 176), (440, low - 2))
    canvas.text(432, 146, "it cannot be", size=11, anchor="end", colour=QUIET)
    canvas.text(432, 160, "replayed rightly", size=11, anchor="end", colour=QUIET)


def _notes(canvas: Canvas) -> None:
    gain = f"{LEAST_GAIN - 1:.0%}"
    notes = (
        f"A recording that gains less than {gain} over its first {JUDGED_REPLAYS} replays is "
        "dropped and the signature declined.",
        "Weights that moved, or a table that the model replaced: recorded anew at once.",
        f"More than {2 * VARIANTS} misses in a row, or no room under memory_limit: eager for "
        f"{BARRED_CALLS} calls, then another try.",
    )
    for i, note in enumerate(notes):
        canvas.text(16, 330 + 18 * i, note, size=11.5)
