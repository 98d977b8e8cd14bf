"""How much of a denoise loop the GPU works, by scheduler: SDXL, 512 x 512, 30 steps.

    python scripts/measure_loop.py --output docs/benchmarks/schedulers.json

Each scheduler runs eager, patched with its own steps ("stock") and patched as `accel.patch` leaves
it ("sync-free"). "ms a step" is wall time over ten steps. "in flight, at least" is what the patched
denoiser takes alone, queued in a row, over that: in the rest of a step the GPU runs the scheduler's
kernels or nothing. (A profiler's trace cannot be had for this: tracing makes graphs 5 % slower.)
Pictures of all three are compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from measure_forward import denoiser_call, in_a_row
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
REPEATS = 3
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
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    plain = zoo.build("sdxl", device="cuda", dtype=zoo.dtype("sdxl"), seed=0)
    plain.set_progress_bar_config(disable=True)
    settings = {**zoo.defaults("sdxl"), "num_inference_steps": 30}
    patched = accel.patch(twin(plain))
    for _ in range(3):
        _picture(patched, settings, Loop())
    denoiser, args, kwargs = denoiser_call(patched, settings)
    with torch.no_grad():
        denoiser_ms = in_a_row(lambda: denoiser(*args, **kwargs))
    rows, config = [], plain.scheduler.config
    for name in options.schedulers:
        try:
            rows.append(measure(plain, patched, name, config, settings, denoiser_ms))
        except Exception as error:
            rows.append({"scheduler": name, "error": f"{type(error).__name__}: {error}"})
        print(json.dumps(rows[-1]), flush=True)
        facts = {"model": "SDXL, random weights, 512 x 512, 30 steps", "rows": rows}
        write(options.output, torch.device("cuda:0"), facts)


if __name__ == "__main__":
    main()
