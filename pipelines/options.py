"""The options that several commands share, with their help. Words only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from accel.pipelines.errors import BadInput


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise BadInput(f"--guidance {value}: this has to be a finite number")
    return value


MOST_STEPS = 100_000
"""No scheduler was trained with as many; their tables for a slip of the finger fill the memory."""

MOST_PICTURES = 100_000
"""Of one prompt, all of which are planned ahead."""

EXIT_CODES = (
    "Exit codes: 0 done, 1 something failed or differs, 2 the input cannot be served, "
    "130 interrupted."
)
MODEL_HELP = "demo, a pipeline folder, or a hub id (owner/name)."
SUBJECT_HELP = (
    "A name of the zoo (real sizes, random weights), demo, a pipeline folder or a hub id."
)

Subject = Annotated[str, typer.Argument(help=SUBJECT_HELP, show_default=False)]
Prompt = Annotated[str | None, typer.Argument(help="What the picture shows.", show_default=False)]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Where the noise starts.")]
Size = Annotated[
    str | None,
    typer.Option("--size", metavar="WIDTH[xHEIGHT]", help="Pixels: 512 or 768x512."),
]
Steps = Annotated[
    int | None, typer.Option("--steps", min=1, max=MOST_STEPS, help="Denoising steps.")
]
Guidance = Annotated[
    float | None,
    typer.Option("--guidance", help="How strongly the prompt steers.", callback=_finite),
]
Negative = Annotated[
    str | None, typer.Option("--negative-prompt", help="What the picture should not show.")
]
Extra = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any further argument of the call (JSON)."),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Loras = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="PATH[:SCALE]", help="A LoRA; may be given several times."),
]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Load weights that may run code when loaded.")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that ships with the model.")
]
Capture = Annotated[
    str,
    typer.Option("--capture", help="auto (only what pays) or always."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and library warnings.")]
ResultFile = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result there as JSON.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw the result there (.png, .svg, .pdf).")
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Timed pictures of either way.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Patched pictures, one after another.")]
