"""How much of a denoise loop the GPU works, by scheduler: SDXL, 512 x 512, 30 steps.

    python scripts/measure_loop.py --output docs/benchmarks/schedulers.json

Each scheduler runs eager, patched with its own steps ("stock") and patched as `accel.patch` leaves
it ("sync-free"). "in flight" is the share of the time between the first and the last kernel of ten
steps in which a kernel or a graph was on the GPU, from the profiler's trace; "ms a step" is wall
time of the same steps without the profiler. Pictures of all three are compared byte for byte.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

import accel
from accel.patches.schedulers import find_schedulers, install, take_off
from accel.pipelines import zoo
from accel.pipelines.machine import nvidia_driver, processor
from accel.pipelines.versions import made_with

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
FIRST, LAST = 10, 20
"""Steps after which clock and profiler start and stop."""


class Loop:
    """Watches a denoise loop from its callback."""

    def __init__(self, profiler: Any = None) -> None:
        self.ends: list[float] = []
        self._profiler = profiler

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        if step in (FIRST, LAST):
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            if self._profiler is not None:
                (self._profiler.start if step == FIRST else self._profiler.stop)()
        return {}

    @property
    def milliseconds(self) -> float:
        """Wall time of a step."""
        return (self.ends[-1] - self.ends[0]) * 1e3 / (LAST - FIRST)


def in_flight(events: list[dict[str, Any]]) -> float:
    """The share of the time from the first to the last work on the GPU in which there was any. All
    kernels of one graph launch count as one piece of work."""
    pieces: dict[Any, tuple[float, float]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin, end = event["ts"], event["ts"] + event["dur"]
            launch = event["args"]["correlation"]
            first, last = pieces.get(launch, (begin, end))
            pieces[launch] = min(first, begin), max(last, end)
    spans = sorted(pieces.values())
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0])


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


def _share(pipe: Any, settings: dict[str, Any]) -> float:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    _picture(pipe, settings, Loop(profiler))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return in_flight(json.loads(path.read_text())["traceEvents"])


def _measured(
    pipe: Any, settings: dict[str, Any], repeats: int = 3
) -> tuple[dict[str, float], np.ndarray]:
    loops = [Loop() for _ in range(repeats)]
    pictures = [_picture(pipe, settings, loop) for loop in loops]
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)
    figures = {"ms a step": statistics.median(loop.milliseconds for loop in loops)}
    return figures | {"in flight": _share(pipe, settings)}, pictures[0]


def measure(pipe: Any, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One scheduler's row."""
    kind, options = SCHEDULERS[name]
    stock = pipe.scheduler
    pipe.scheduler = getattr(diffusers, kind).from_config(stock.config, **options)
    eager, expected = _measured(pipe, settings, repeats=1)
    accel.patch(pipe)
    for _ in range(3):
        _picture(pipe, settings, Loop())
    for scheduler in find_schedulers(pipe).values():
        take_off(scheduler)
    before, one = _measured(pipe, settings)
    for scheduler in find_schedulers(pipe).values():
        install(scheduler)
    after, other = _measured(pipe, settings)
    accel.unpatch(pipe)
    pipe.scheduler = stock
    return {
        "scheduler": name,
        "eager": eager,
        "patched, stock steps": before,
        "patched, sync-free steps": after,
        "bytes equal": np.array_equal(one, expected) and np.array_equal(other, expected),
        "pixel variance": float(expected.astype("float64").var() * 255**2),
    }


def main() -> None:
    """Measures the schedulers named on the command line, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedulers", nargs="*", default=list(SCHEDULERS))
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    pipe = zoo.build("sdxl", device="cuda", dtype=zoo.dtype("sdxl"), seed=0)
    pipe.set_progress_bar_config(disable=True)
    settings = {**zoo.defaults("sdxl"), "num_inference_steps": 30}
    rows = []
    for name in options.schedulers:
        try:
            rows.append(measure(pipe, name, settings))
        except Exception as error:
            rows.append({"scheduler": name, "error": f"{type(error).__name__}: {error}"})
        print(json.dumps(rows[-1]), flush=True)
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": nvidia_driver(),
        "processor": processor(),
        "versions": made_with(),
        "model": "SDXL, random weights, 512 x 512, 30 steps",
        "rows": rows,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
