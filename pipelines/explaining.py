"""`accel explain`: what happens to every part of a pipeline in a few short runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.pipelines.console import OnPicture, unheard
from accel.pipelines.generation import make
from accel.pipelines.subjects import Choice, Subject

if TYPE_CHECKING:
    from accel.patches.part import Capture


def explain(
    subject: Subject, *, runs: int = 4, capture: Capture = "auto", on_picture: OnPicture = unheard
) -> dict[str, Any]:
    """Runs the patched pipeline `runs` times (parts that run once a picture, text encoders and the
    VAE, are recorded at their third call) and returns the report with
    what it is about, as plain data."""
    import accel

    pipe = accel.patch(subject.pipe, capture=capture)
    for index in range(runs):
        on_picture(f"run {index + 1} of {runs}")
        make(pipe, subject.inputs)
    settings = subject.settings
    report = accel.report(pipe).to_dict()
    return {"model": settings.model, "settings": settings.to_dict(), "report": report}


def inactive(choice: Choice, why: str) -> dict[str, Any]:
    """The same where nothing can be recorded: `why`, without loading or running anything."""
    from accel.patches.overview import Report

    settings, report = choice.settings, Report(inactive=why).to_dict()
    return {"model": settings.model, "settings": settings.to_dict(), "report": report}
