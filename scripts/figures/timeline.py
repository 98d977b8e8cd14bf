"""Figure of time: host and device, eager and replayed; once the host is slow, once the device."""

from __future__ import annotations

from figures.canvas import COPY, EAGER, MONO, QUIET, SEGMENT, WAIT, Canvas
from figures.scene import Race, race
from figures.trace import Trace

WIDTH, LEFT, RIGHT, BAR = 880, 128, 16, 20
ISSUE = 8e-6
LIGHT, HEAVY = 3e-6, 16e-6
"""Seconds: what an op costs the host to issue, and the device to run. Prices of the fake clock."""
PRICES = "Prices of the simulated device's clock: the shape of the matter, not a measurement."
COPIES = {"copy", "_foreach_copy", "clone"}


def timeline() -> Canvas:
    """Twelve ops: small ones, where the host is the bottleneck, and big ones, where it is not."""
    small, big = race(ISSUE, LIGHT), race(ISSUE, HEAVY)
    canvas = Canvas(WIDTH, 464, "Host and device over time, eager and replayed")
    end = max(s.end for r in (small, big) for t in (r.eager, r.replayed) for s in t.spans)
    scale = (WIDTH - LEFT - RIGHT) / end
    y = 24.0
    for race_, words in ((small, "Small kernels"), (big, "Big kernels")):
        _heading(canvas, race_, words, y)
        _pair(canvas, race_.eager, "eager", y + 14, scale)
        _pair(canvas, race_.replayed, "replayed", y + 88, scale)
        y += 190
    assert small.declined is None and big.declined is not None
    verdict, figures_ = big.declined.split(": ")
    canvas.text(16, y - 18, f"Big kernels are declined: {verdict}", size=12)
    canvas.text(16, y - 2, f"({figures_}).", size=12)
    _legend(canvas, y + 24)
    canvas.text(16, y + 48, PRICES, size=11, colour=QUIET)
    return canvas


def _heading(canvas: Canvas, race_: Race, words: str, y: float) -> None:
    told = f"{words}: {race_.host * 1e6:g} µs of host and {race_.device * 1e6:g} µs of device an op"
    canvas.text(16, y, told, size=13, bold=True)


def _pair(canvas: Canvas, trace: Trace, words: str, y: float, scale: float) -> None:
    """Two bars, host above device, and when both are done."""
    canvas.text(16, y + BAR + 6, words, size=12)
    for lane, name in enumerate(("host", "device")):
        top = y + lane * (BAR + 4)
        canvas.text(LEFT - 8, top + 15, name, size=11, anchor="end", colour=QUIET)
        for span in trace.spans:
            if span.end <= span.begin or (span.kind in ("op", "segment")) != (lane == 1):
                continue
            style = WAIT if span.kind == "wait" else EAGER
            style = SEGMENT if span.kind in ("segment", "launch") else style
            style = COPY if span.name in COPIES else style
            x, w = LEFT + span.begin * scale, (span.end - span.begin) * scale
            canvas.box(x, top, w, BAR, style, radius=1.5)
    end = max(span.end for span in trace.spans)
    foot, x = y + 2 * BAR + 4, LEFT + end * scale
    canvas.line(x, y - 2, x, foot + 4)
    canvas.text(x, foot + 16, f"{end * 1e6:.0f} µs", size=11, anchor="end", font=MONO)


def _legend(canvas: Canvas, y: float) -> None:
    entries = (
        (EAGER, "an op, issued by the host or run"),
        (SEGMENT, "a segment of 12 ops, launched or run"),
        (COPY, "input or result copied"),
        (WAIT, "the host waits"),
    )
    x = 16.0
    for style, words in entries:
        canvas.box(x, y - 12, 16, 14, style, radius=1.5)
        canvas.text(x + 22, y, words, size=11)
        x += 44 + 6.5 * len(words)
