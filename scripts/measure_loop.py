"""How much of a denoise loop the GPU works, by scheduler: 512 x 512, 30 steps, SDXL, and SD 3.5
for the flow scheduler, which SDXL cannot take.

    python scripts/measure_loop.py --output docs/benchmarks/schedulers.json

Each scheduler runs eager, patched with its own steps ("stock") and patched as `accel.patch` leaves
it ("sync-free"). "ms a step" is wall time over ten steps. "in flight, at least" is what one bare
graph of the denoiser takes, replayed in a row, over that: in the rest of a step the GPU copies
inputs and results, runs the scheduler's kernels, or nothing. (A profiler's trace cannot be had for
this: tracing makes graphs 5 % slower.) Pictures of all three are compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from measure_forward import bare_graph, denoiser_call, in_a_row
from result_file import write

import accel
from accel.patches.schedulers import install, take_off
from accel.pipelines import zoo
from accel.pipelines.twin import twin

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Euler": ("EulerDiscreteScheduler", {}),
    "EulerAncestral": ("EulerAncestralDiscreteScheduler", {}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {}),
    "DPM++ 2M SDE": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "UniPC": ("UniPCMultistepScheduler", {}),
    "DDIM": ("DDIMScheduler", {}),
    "LCM": ("LCMScheduler", {}),
    "PNDM": ("PNDMScheduler", {}),
    "DDPM": ("DDPMScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "TCD": ("TCDScheduler", {}),
    "FlowMatchEuler": ("FlowMatchEulerDiscreteScheduler", {}),
}
FLOW = {"FlowMatchEuler"}
REPEATS = 2
FIRST, LAST = 10, 20
"""Steps after which the clock starts and stops."""


class Loop:
    """Watches a denoise loop from its callback."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        if step in (FIRST, LAST):
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
        return {}

    @property
    def milliseconds(self) -> float:
        """Wall time of a step."""
        return (self.ends[-1] - self.ends[0]) * 1e3 / (LAST - FIRST)


def _picture(pipe: Any, settings: dict[str, Any], loop: Loop) -> np.ndarray:
    generator = torch.Generator("cuda").manual_seed(1)
    result = pipe(
        "a photo of a cat",
        generator=generator,
        output_type="np",
        callback_on_step_end=loop,
        **settings,
    )
    return np.asarray(result.images)


def _measured(pipe: Any, settings: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Milliseconds a step, and the picture."""
    loops = [Loop() for _ in range(REPEATS)]
    pictures = [_picture(pipe, settings, loop) for loop in loops]
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)
    return statistics.median(loop.milliseconds for loop in loops), pictures[0]


def measure(
    plain: Any, patched: Any, name: str, config: Any, settings: dict[str, Any], denoiser_ms: float
) -> dict[str, Any]:
    """One scheduler's row."""
    kind, options = SCHEDULERS[name]
    for pipe in (plain, patched):
        pipe.scheduler = getattr(diffusers, kind).from_config(config, **options)
    loop = Loop()
    expected = _picture(plain, settings, loop)
    _picture(patched, settings, Loop())
    after, one = _measured(patched, settings)
    take_off(patched.scheduler)
    before, other = _measured(patched, settings)
    install(patched.scheduler)
    rows = {"patched, stock steps": before, "patched, sync-free steps": after}
    return {
        "scheduler": name,
        "eager, ms a step": loop.milliseconds,
        **{f"{what}, ms a step": wall for what, wall in rows.items()},
        **{f"{what}, in flight, at least": denoiser_ms / wall for what, wall in rows.items()},
        "bytes equal": np.array_equal(one, expected) and np.array_equal(other, expected),
        "pixel variance": float(expected.astype("float64").var() * 255**2),
    }


def main() -> None:
    """Measures the schedulers named on the command line, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedulers", nargs="*", default=list(SCHEDULERS))
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here, which this measures")
    diffusers.utils.logging.set_verbosity_error()
    flow = [name for name in options.schedulers if name in FLOW]
    named = {"sdxl": [name for name in options.schedulers if name not in FLOW], "sd35m": flow}
    rows: list[dict[str, Any]] = []
    for model in filter(named.get, named):
        for row in rows_of(model, named[model]):
            print(json.dumps(row), flush=True)
            rows.append(row)
            facts = {"setting": "random weights, 512 x 512, 30 steps", "rows": rows}
            write(options.output, torch.device("cuda:0"), facts)


def rows_of(model: str, schedulers: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a model's schedulers, one after the other."""
    plain = zoo.build(model, device="cuda", dtype=zoo.dtype(model), seed=0)
    plain.set_progress_bar_config(disable=True)
    size = {"height": 512, "width": 512, "num_inference_steps": 30}
    settings = {**zoo.defaults(model), **size}
    denoiser, args, kwargs = denoiser_call(plain, settings)
    with torch.no_grad():
        denoiser_ms = in_a_row(bare_graph(lambda: denoiser(*args, **kwargs)).replay)
    patched = accel.patch(twin(plain))
    for _ in range(3):
        _picture(patched, settings, Loop())
    for name in schedulers:
        row = measure(plain, patched, name, plain.scheduler.config, settings, denoiser_ms)
        yield {"model": model, "bare graph, ms": denoiser_ms, **row}


if __name__ == "__main__":
    main()
