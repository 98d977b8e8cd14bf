"""A benchmark's result drawn: seconds of every picture, eager beside patched. Knows matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"patched": "#2a7f62", "eager": "#9aa0a6"}
"""Of the bars, by way."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws `result` (from `benchmark.bench`) into the file `path`; its ending picks the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
    ratio = result["ratio"]
    ways = ["eager"] if ratio is None else ["patched", "eager"]  # None: nothing is captured
    for row, way in enumerate(ways):
        measured = result[way]
        axes.barh(row, measured["median_s"], color=COLOURS[way], height=0.6)
        axes.plot(measured["seconds"], [row] * len(measured["seconds"]), "k|", markersize=12)
        axes.annotate(f" {measured['median_s']:.3g} s", (measured["median_s"], row), va="center")
    axes.set_yticks(range(len(ways)), ways)
    axes.set_xlabel("seconds per picture (bar: median, ticks: single pictures)")
    axes.set_xlim(0, 1.2 * max(second for way in ways for second in result[way]["seconds"]))
    outcome = "not accelerated here" if ratio is None else f"{ratio:.2f}x"
    axes.set_title(f"{title(result)}: {outcome}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def title(result: dict[str, Any]) -> str:
    """What was measured, in one line.

    >>> title({"model": "zimage", "device": "A GPU", "settings": {"width": 512, "height": 512,
    ...     "steps": 9, "dtype": "bfloat16"}})
    'zimage 512x512, 9 steps, bfloat16, A GPU'
    """
    settings = result["settings"]
    size = f" {settings['width']}x{settings['height']}" if settings.get("width") else ""
    steps = f", {settings['steps']} steps" if settings.get("steps") else ""
    return f"{result['model']}{size}{steps}, {settings['dtype']}, {result['device']}"
