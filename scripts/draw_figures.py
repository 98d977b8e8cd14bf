"""Draws the figures of `docs/how-it-works.md`: same code, same bytes.

    python scripts/draw_figures.py --output docs/figures

Small forwards run on the simulated device of the tests, through the engine as it is; the figures
show what their graphs, reports and the device's fake clock say. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from figures import calls, decisions, memory, timeline
from figures.canvas import Canvas

FIGURES: dict[str, Callable[[], Canvas]] = {
    "timeline": timeline.timeline,
    "recording": calls.recording,
    "replay": calls.replay,
    "variants": calls.variants,
    "memory": memory.memory,
    "decisions": decisions.decisions,
}


def draw(folder: Path) -> list[Path]:
    """Writes every figure into `folder`, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in FIGURES.items():
        path = folder / f"{name}.svg"
        path.write_text(figure().svg(), encoding="utf-8")
        written.append(path)
    return written


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    for path in draw(folder):
        print(path)


if __name__ == "__main__":
    main()
