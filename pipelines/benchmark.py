"""`accel bench`: a whole pipeline eager and patched, in turns, in one process.

This module times and counts; drawing is `plotting`'s matter. Seconds are wall clock around one
call, the device synchronized before and after; memory is bytes of the device's allocator.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from accel.pipelines import machine, versions
from accel.pipelines.comparison import Comparison, compare
from accel.pipelines.console import OnPicture, unheard
from accel.pipelines.generation import Take, make, with_size
from accel.pipelines.picture import png_bytes
from accel.pipelines.subjects import Subject
from accel.pipelines.twin import twin

if TYPE_CHECKING:
    import torch

    from accel.patches.overview import Report
    from accel.patches.part import Capture

MOST_WARM_RUNS = 6


@dataclass
class Side:
    """One way of running the pipeline, and what was measured of it."""

    pipe: Any
    subject: Subject
    warm_up: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    pictures: list[list[bytes]] = field(default_factory=list)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    step_ms: float | None = None

    def timed(self) -> float:
        """Makes a picture, keeps its bytes, returns the seconds that the pipeline took."""
        device = self.subject.where.device
        machine.synchronize(device)
        started = time.perf_counter()
        take = make(self.pipe, self.subject.inputs)
        machine.synchronize(device)
        seconds = time.perf_counter() - started
        self.pictures.append([png_bytes(image) for image in take.images])
        return seconds

    def taken(self) -> Take:
        """Makes a picture with its latents, and notes how long a step takes."""
        clock = StepClock(self.subject.where.device)
        take = make(self.pipe, self.subject.inputs, on_step=clock, latents=True)
        self.step_ms = clock.milliseconds()
        return take

    def to_dict(self) -> dict[str, Any]:
        """What was measured, as plain data."""
        return {
            "median_s": median(self.seconds),
            "seconds": self.seconds,
            "warm_up_s": self.warm_up,
            "step_ms": self.step_ms,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
        }


class StepClock:
    """Tells the time between the ends of steps: by events on CUDA, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def __call__(self, done: int) -> None:
        if self._device.type == "cuda":
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> float | None:
        """The median step, or None where the pipeline tells of fewer than two."""
        machine.synchronize(self._device)
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            steps = [first.elapsed_time(second) for first, second in pairs]
        else:
            steps = [(second - first) * 1e3 for first, second in pairs]
        return median(steps) if steps else None


def bench(
    subject: Subject,
    *,
    repeats: int = 5,
    capture: Capture = "auto",
    on_picture: OnPicture = unheard,
) -> dict[str, Any]:
    """Measures `repeats` pictures of either way, in turns, after both have warmed up. `on_picture`
    hears what is about to run."""
    import accel

    eager = Side(subject.pipe, subject)
    with _memory_measured(eager):
        for _ in range(2):
            on_picture("eager, warming up")
            eager.warm_up.append(eager.timed())
    patched = Side(accel.patch(twin(subject.pipe), capture=capture), subject)
    with _memory_measured(patched):
        _warm_up(patched, on_picture)
    for index in range(repeats):
        # Each way goes first in half of the rounds, so that heat and clocks favour neither.
        for side in (eager, patched) if index % 2 == 0 else (patched, eager):
            on_picture(f"round {index + 1} of {repeats}")
            side.seconds.append(side.timed())
    on_picture("comparing")
    reference = eager.taken()
    comparison = compare(reference, patched.taken())
    settings = with_size(subject.pipe, subject.settings, reference.image)
    outcome = _result(eager, patched, comparison, accel.report(patched.pipe))
    return {"model": settings.model, "settings": settings.to_dict(), **outcome}


def _warm_up(side: Side, on_picture: OnPicture) -> None:
    """Runs until a picture brings no recording and no new eager call: text encoders and the VAE run
    once a picture, and are recorded at their third call."""
    import accel

    unsettled = True
    while unsettled and len(side.warm_up) < MOST_WARM_RUNS:
        before = _unsettled_calls(accel.report(side.pipe))
        on_picture("patched, warming up")
        side.warm_up.append(side.timed())
        unsettled = _unsettled_calls(accel.report(side.pipe)) != before


def _unsettled_calls(report: Report) -> int:
    parts = [part for part in report.parts if part.declined is None]
    return sum(part.captures + part.eager_calls for part in parts)


@contextlib.contextmanager
def _memory_measured(side: Side) -> Iterator[None]:
    """Notes the peaks of the device's allocator over its block; nothing on the CPU."""
    import torch

    device = side.subject.where.device
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield
    side.peak_bytes = torch.cuda.max_memory_allocated(device)
    side.reserved_bytes = torch.cuda.max_memory_reserved(device)


def _result(eager: Side, patched: Side, comparison: Comparison, report: Report) -> dict[str, Any]:
    subject = eager.subject
    settled, active = median(patched.seconds), report.inactive is None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": versions.installed("python"), **versions.made_with()},
        "device": machine.device_name(subject.where.device),
        "processor": machine.processor(),
        "eager": eager.to_dict(),
        "patched": {
            **patched.to_dict(),
            # Where nothing was patched, the same was timed twice: no result.
            "first_s": patched.warm_up[0] if active else None,
            "setup_s": sum(patched.warm_up) - settled * len(patched.warm_up) if active else None,
        },
        "ratio": median(eager.seconds) / settled if active else None,
        "pictures_equal": all(p == eager.pictures[0] for p in eager.pictures + patched.pictures),
        "latents_equal": comparison.latents_equal,
        "pixel_variance": comparison.pixel_variance,
        "proven": comparison.equal and comparison.proves_something,
        "inactive": report.inactive,
        "report": report.to_dict(),
    }
