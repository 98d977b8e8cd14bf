"""`bench`, `verify` and `explain` from start to end: subject, work, table or JSON, result file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel.pipelines import (
    acceleration,
    benchmark,
    checking,
    explaining,
    picture,
    plotting,
    subjects,
    tables,
)
from accel.pipelines.console import OnPicture, note, print_json, status_shown, stdout_kept_clean
from accel.pipelines.errors import BadInput
from accel.pipelines.models import Trust
from accel.pipelines.names import refuse_unknown
from accel.pipelines.outputs import refuse_unwritable
from accel.pipelines.prompts import parse_extra
from accel.pipelines.settings import Lora, parse_size

if TYPE_CHECKING:
    from accel.patches.part import Capture

Work = Callable[[subjects.Choice, OnPicture], dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """What is studied, how it is called, and where the result goes."""

    model: str
    wishes: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    capture: str = "auto"
    trust: Trust = field(default_factory=Trust)
    output: Path | None = None
    json: bool = False
    debug: bool = False


def wishes(
    prompt: str | None,
    size: str | None,
    steps: int | None,
    guidance: float | None,
    negative_prompt: str | None,
    seed: int,
    extra: Sequence[str] | None,
    dtype: str | None,
    loras: Sequence[str] | None,
) -> dict[str, Any]:
    """Settings as far as the command line named them; None elsewhere."""
    width, height = parse_size(size) if size is not None else (None, None)
    return {
        "prompt": prompt,
        "width": width,
        "height": height,
        "steps": steps,
        "guidance": guidance,
        "negative_prompt": negative_prompt,
        "seed": seed,
        "extra": parse_extra(extra or ()) or None,
        "dtype": dtype,
        "loras": tuple(Lora.parse(lora) for lora in loras or ()) or None,
    }


def bench(study: Study, *, repeats: int, plot: Path | None) -> bool:
    """Whether the pictures were equal and varied."""
    if plot is not None:
        _refuse_undrawable(plot)

    capture = _capture(study)

    def work(choice: subjects.Choice, say: OnPicture) -> dict[str, Any]:
        acceleration.tell_missing(choice.where.device, "two times the same is timed")
        return benchmark.bench(choice.load(), repeats=repeats, capture=capture, on_picture=say)

    result = _conduct(study, work, tables.print_bench)
    if plot is not None:
        plotting.draw(result, plot)
        note(f"drew {plot}")
    return bool(result["proven"])


def verify(study: Study, *, runs: int) -> bool:
    """Whether every run gave the same latents and the same bytes."""

    capture = _capture(study)

    def work(choice: subjects.Choice, say: OnPicture) -> dict[str, Any]:
        acceleration.tell_missing(choice.where.device, "eager runs are compared with each other")
        return checking.verify(choice.load(), runs=runs, capture=capture, on_picture=say)

    return bool(_conduct(study, work, tables.print_check)["equal"])


def explain(study: Study, *, runs: int) -> None:
    """Draws what happened to every part."""

    capture = _capture(study)

    def work(choice: subjects.Choice, say: OnPicture) -> dict[str, Any]:
        missing = acceleration.missing(choice.where.device)
        if missing is not None:
            return explaining.inactive(choice, missing)
        return explaining.explain(choice.load(), runs=runs, capture=capture, on_picture=say)

    _conduct(study, work, tables.print_explanation)


def _conduct(study: Study, work: Work, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if study.output is not None:
        refuse_unwritable(study.output)
    with stdout_kept_clean(study.json), status_shown() as say:
        say(f"loading {study.model}")
        choice = subjects.choose(
            study.model, study.wishes, study.device, trust=study.trust, quiet=not study.debug
        )
        subjects.tell([choice.settings])
        result = {"command": shlex.join(["accel", *sys.argv[1:]]), **work(choice, say)}
    if study.json:
        print_json(result)
    else:
        show(result)
    if study.output is not None:
        content = json.dumps(result, indent=2, default=str) + "\n"
        picture.write(study.output, content.encode())
        note(f"wrote {study.output}")
    return result


def _capture(study: Study) -> Capture:
    refuse_unknown("--capture", study.capture, ("auto", "always"))
    return cast("Capture", study.capture)


def _refuse_undrawable(path: Path) -> None:
    endings = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in endings:
        raise BadInput(f"--plot {path}: a plot ends in {', '.join(endings)}")
    refuse_unwritable(path, "--plot")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
