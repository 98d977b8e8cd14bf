"""Whether graphs that live for one call pay under model CPU offload: SD 1.5, 512 x 512.

    python scripts/measure_offload.py --output docs/benchmarks/offload.json

`enable_model_cpu_offload` brings every part to the GPU for one call of the pipeline, to another
place each time, so a recording holds for the rest of that call at most. `accel.patch` declines
such parts. Here it runs as it is, and with that veto lifted, so that each picture records its own
graphs; eager, and a pipeline that stays on the GPU, stand beside it. "loop" is wall time from the
end of the first step to the end of the last, the recording included. Pictures are compared byte
for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from result_file import write

import accel
from accel.patches import state
from accel.patches.part import Capture
from accel.pipelines import zoo

STEPS = (4, 10, 30, 50)
PICTURES = 5
VETO = "CPU offload"


class Watch:
    """The denoise loop's clock, and the picture it belongs to."""

    def __init__(self, pipe: Any, settings: dict[str, Any], seed: int) -> None:
        self._ends: list[float] = []
        generator = torch.Generator("cpu").manual_seed(seed)
        begin = time.perf_counter()
        result = pipe(
            "a photo of a cat",
            generator=generator,
            output_type="np",
            callback_on_step_end=self._step,
            **settings,
        )
        self.picture = np.asarray(result.images)  # on the host: the device is done
        self.seconds = time.perf_counter() - begin

    def _step(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        if step in (0, pipe.num_timesteps - 1):
            tensors["latents"].sum().item()  # waits
            self._ends.append(time.perf_counter())
        return {}

    @property
    def loop(self) -> float:
        """Seconds from the first step's end to the last one's."""
        return self._ends[-1] - self._ends[0]


@contextlib.contextmanager
def veto_lifted() -> Iterator[None]:
    """Parts under model CPU offload may be recorded: what a later call finds moved is stale."""
    plain = state._veto_of

    def veto(*args: Any) -> str | None:
        reason = plain(*args)
        return None if reason is not None and reason.startswith(VETO) else reason

    with mock.patch.object(state, "_veto_of", veto):
        yield


def measured(pipe: Any, settings: dict[str, Any], pictures: int) -> tuple[dict[str, float], Any]:
    """Median seconds, and the last picture. A first picture is drawn for nothing."""
    watches = [Watch(pipe, settings, seed) for seed in range(pictures + 1)][1:]
    row = {
        "picture, s": statistics.median(watch.seconds for watch in watches),
        "loop, s": statistics.median(watch.loop for watch in watches),
    }
    return row, watches[-1].picture


def denoiser_counts(pipe: Any) -> dict[str, Any]:
    """What became of the denoiser's calls."""
    part = accel.report(pipe)["unet"]
    reasons = [reason for reason, _ in part.reasons.most_common(3)]
    return {
        "recorded": part.captures,
        "replayed": part.replays,
        "eager": part.eager_calls,
        "reasons": reasons,
    }


def measure(
    build: Callable[[], Any],
    device: str,
    settings: dict[str, Any],
    pictures: int,
    capture: Capture = "auto",
) -> list[dict[str, Any]]:
    """One row for each way to run the pipeline, all with the same number of steps."""
    rows, expected = [], None
    for placed, patched, lifted in (
        ("on the device", False, False),
        ("on the device", True, False),
        ("offload", False, False),
        ("offload", True, False),
        ("offload", True, True),
    ):
        pipe = build()
        pipe.set_progress_bar_config(disable=True)
        pipe.to(device)
        if patched:
            accel.patch(pipe, capture=capture, text_encoder=False, vae=False)
        if placed == "offload":
            pipe.enable_model_cpu_offload(device=device)
        with veto_lifted() if lifted else contextlib.nullcontext():
            row, picture = measured(pipe, settings, pictures)
        expected = picture if expected is None else expected
        way = "graphs for one call" if lifted else "patched" if patched else "eager"
        rows.append(
            {
                "steps": settings["num_inference_steps"],
                "weights": placed,
                "run": way,
                **row,
                "bytes equal": bool(np.array_equal(picture, expected)),
                **(denoiser_counts(pipe) if patched else {}),
            }
        )
        accel.unpatch(pipe)
    return rows


def main() -> None:
    """Measures the numbers of steps named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", type=int, default=list(STEPS))
    parser.add_argument("--pictures", type=int, default=PICTURES, help="of each row, timed")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here, which this measures")
    diffusers.utils.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for steps in options.steps:
        settings = {**zoo.defaults("sd15"), "num_inference_steps": steps}

        def build() -> Any:
            return zoo.build("sd15", device="cuda", dtype=zoo.dtype("sd15"), seed=0)

        rows += measure(build, "cuda", settings, options.pictures)
        for row in rows[-5:]:
            print(json.dumps(row), flush=True)
        facts = {"model": "SD 1.5, random weights, 512 x 512", "rows": rows}
        write(options.output, torch.device("cuda:0"), facts)


if __name__ == "__main__":
    main()
