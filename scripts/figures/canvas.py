"""A small SVG canvas: boxes, texts, arrows. Knows nothing of what they mean.

Same calls, same bytes: no dates, no random ids. A text that would overlap another one, or leave the
picture, is an error, since nobody looks at a figure again that a script has redrawn.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

SANS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
WIDTH_OF = {SANS: 0.59, MONO: 0.605}
"""Average width of a character over the font's size, on the generous side."""
INK, QUIET, ALARM = "#1f2328", "#59636e", "#b3261e"


class Style(NamedTuple):
    """How a box is filled and outlined."""

    fill: str
    stroke: str
    dash: str = ""


SEGMENT = Style("#dbe9ff", "#2f6fd0")
RECORD = Style("#ffffff", "#2f6fd0", "5 3")
BREAK = Style("#ffe5cc", "#d06a12")
COPY = Style("#dcf2df", "#2a8540")
EAGER = Style("#eaecef", "#6b7480")
WAIT = Style("#ffffff", "#b8bfc6", "2 2")


@dataclass(frozen=True)
class Area:
    """A rectangle: left, top, width, height."""

    x: float
    y: float
    w: float
    h: float

    def meets(self, other: Area) -> bool:
        """Whether the two have a point in common."""
        across = self.x < other.x + other.w and other.x < self.x + self.w
        return across and self.y < other.y + other.h and other.y < self.y + self.h


class Canvas:
    """A picture of `width` by `height`, in pixels; `title` is what a screen reader says.

    >>> canvas = Canvas(200, 40, "A word")
    >>> canvas.text(10, 25, "word")
    >>> canvas.svg().count("<text")
    1
    >>> canvas.text(15, 25, "another")
    >>> canvas.svg()
    Traceback (most recent call last):
    ValueError: in 'A word': 'word' overlaps 'another'
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._marks: list[str] = []
        self._texts: list[tuple[str, Area]] = []

    def box(self, x: float, y: float, w: float, h: float, style: Style, radius: float = 3) -> None:
        """A rectangle with round corners."""
        dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
        self._marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:g}" '
            f'fill="{style.fill}" stroke="{style.stroke}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        anchor: str = "start",
        font: str = SANS,
        bold: bool = False,
        colour: str = INK,
    ) -> None:
        """One line of text; `x`, `y` is where it starts ("start"), ends ("end") or has its
        middle."""
        w = WIDTH_OF[font] * size * len(words) * (1.06 if bold else 1)
        left = x - {"start": 0, "middle": w / 2, "end": w}[anchor]
        self._texts.append((words, Area(left, y - 0.78 * size, w, size)))
        weight = ' font-weight="bold"' if bold else ""
        self._marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-family="{font}" font-size="{size:g}" '
            f'text-anchor="{anchor}"{weight} fill="{colour}">{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = QUIET) -> None:
        """A thin line."""
        self._marks.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
        )

    def arrow(self, *points: tuple[float, float], colour: str = QUIET) -> None:
        """A line through `points` with a head at the last."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._marks.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3" '
            f'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The picture. Raises ValueError if texts overlap or leave it."""
        page = Area(0, 0, self.width, self.height)
        for words, area in self._texts:
            inside = area.x >= page.x and area.x + area.w <= page.w and area.y >= page.y
            if not inside or area.y + area.h > page.h:
                raise ValueError(f"in {self.title!r}: {words!r} leaves the picture")
        for (one, here), (other, there) in itertools.combinations(self._texts, 2):
            if here.meets(there):
                raise ValueError(f"in {self.title!r}: {one!r} overlaps {other!r}")
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{QUIET}"/>'
            "</marker></defs>"
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="6" fill="#ffffff"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, marker, paper, *self._marks, "</svg>", ""])
