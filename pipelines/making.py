"""`accel generate`: from an order to files, with everything that can be refused refused first."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.pipelines import outputs, picture
from accel.pipelines.console import OnStep, note, notes_held, stdout_kept_clean, steps_shown
from accel.pipelines.errors import BadInput
from accel.pipelines.models import Trust
from accel.pipelines.names import refuse_unknown
from accel.pipelines.prompts import refuse_broken, settings_for
from accel.pipelines.settings import Lora, Settings, parse_size
from accel.pipelines.spreading import ALONE, Team

if TYPE_CHECKING:
    from accel.pipelines.subjects import Subject

MODES = ("exact", "off")


@dataclass(frozen=True)
class Order:
    """What a person asked for. `changes` are settings fields, None where nothing was said."""

    prompts: Sequence[str] = ()
    source: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    size: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    loras: Sequence[str] = ()
    seed: int | None = None
    number: int = 1
    output: str | None = None
    device: str = "auto"
    mode: str = "exact"
    trust: Trust = field(default_factory=Trust)
    quiet: bool = True
    stdout_is_json: bool = False


@dataclass(frozen=True)
class Plan:
    """All pictures of an order, in order, and where each goes."""

    base: Settings
    wanted: list[Settings]
    paths: list[Path]
    source_made_with: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A pipeline ready to make the pictures that are `wanted`, each at its path."""

    pipe: Any
    wanted: list[tuple[Settings, Path]]
    made_with: dict[str, Any]


def fulfil(order: Order, team: Team = ALONE) -> dict[str, Any] | None:
    """Makes and writes the pictures of `order`; returns what was made as plain data. In a `team`
    this process makes its share; all hear of all pictures, the report is each one's own, and a
    process without a share returns None."""
    plan = team.decided(lambda: _plan(order))
    others = not team.is_main
    with stdout_kept_clean(order.stdout_is_json or others):
        with notes_held(others):
            ready = team.each(lambda: _prepared(order, plan, team))
        tell = _tell_nobody if order.stdout_is_json else _tell
        made = team.collected(_write_all(ready, shown=team.is_main), tell)
    if ready is None:
        return None
    report = _report(ready.pipe, order.mode)
    # Where nothing could be accelerated, the pictures were made as with --mode off.
    mode = "off" if report is None or report["inactive"] is not None else order.mode
    return {"pictures": made, "made_with": ready.made_with, "mode": mode, "report": report}


def _plan(order: Order) -> Plan:
    refuse_unknown("--mode", order.mode, MODES)
    base, made_with = _base(order)
    wanted = settings_for(base, order.prompts, order.number, _seed(order, base))
    return Plan(base, wanted, outputs.paths_for(order.output, wanted), made_with)


def _base(order: Order) -> tuple[Settings, dict[str, Any]]:
    """The settings that all pictures share, and what the source picture was made with."""
    settings = Settings()
    made_with: dict[str, Any] = {}
    if order.source is not None:
        settings, made_with = picture.read_settings(order.source)
    elif not order.prompts:
        raise BadInput(
            'no prompt: accel generate "a red circle on a blue background", or --prompts'
        )
    refuse_broken(order.changes.get("negative_prompt") or "", "--negative-prompt")
    if "num_images_per_prompt" in order.extra:
        raise BadInput("--set num_images_per_prompt: --number makes several pictures of a prompt")
    width, height = parse_size(order.size) if order.size is not None else (None, None)
    loras = tuple(Lora.parse(text) for text in order.loras) or None
    extra = {**settings.extra, **order.extra}
    changes = {**order.changes, "width": width, "height": height, "loras": loras, "extra": extra}
    return settings.changed(**changes), made_with


def _seed(order: Order, base: Settings) -> int | None:
    if order.seed is None and order.source is not None:
        return base.seed
    return order.seed


def _prepared(order: Order, plan: Plan, team: Team) -> Prepared | None:
    """The pipeline and this process's share; None where there is none for it to make."""
    if not team.share(plan.paths):
        return None
    from accel.pipelines import acceleration, subjects

    base, device = plan.base, team.device(order.device)
    choice = subjects.choose_model(base, device, trust=order.trust, quiet=order.quiet)
    if choice.kind is not None:
        _refuse_videos(choice.kind, base.model)
    if order.mode != "off":
        acceleration.tell_missing(choice.where.device)
    subject = choice.load()
    _refuse_videos(subject.pipe, base.model)
    chosen = [replace(subject.settings, prompt=s.prompt, seed=s.seed) for s in plan.wanted]
    subjects.tell(chosen)
    if len(order.prompts) > 1 and not any(" " in prompt for prompt in order.prompts):
        note(f"{len(order.prompts)} prompts of one word each: quotes make a sentence one prompt")
    pipe = subject.pipe
    if order.mode != "off":
        import accel

        pipe = accel.patch(pipe, mode=order.mode)
    made_with = _made_with(subject)
    then = {**plan.source_made_with, **_fingerprints(base)}
    _note_differences(then, {**made_with, **_fingerprints(subject.settings)})
    return Prepared(pipe, team.share([*zip(chosen, plan.paths, strict=True)]), made_with)


def _refuse_videos(pipe: Any, name: str) -> None:
    from accel.pipelines.arguments import call_defaults

    if "num_frames" in call_defaults(pipe):
        raise BadInput(f"{name} makes videos; accel generate makes pictures")


def _write_all(ready: Prepared | None, *, shown: bool) -> Generator[dict[str, Any], None, None]:
    if ready is None:
        return
    with steps_shown(len(ready.wanted), ready.wanted[0][0].steps, shown=shown) as on_step:
        for index, (settings, path) in enumerate(ready.wanted):
            yield _write_one(ready, settings, path, on_step(index))


def _tell(made: dict[str, Any]) -> None:
    size, seed = f"{made['width']}x{made['height']}", made["settings"]["seed"]
    print(f"{made['path']}: {size}, seed {seed}, {made['seconds']:.2f} s", flush=True)


def _tell_nobody(made: dict[str, Any]) -> None:
    """For callers that write the whole of it as JSON."""


def _write_one(ready: Prepared, settings: Settings, path: Path, on_step: OnStep) -> dict[str, Any]:
    from accel.pipelines.generation import make, with_size
    from accel.pipelines.subjects import as_called

    started = time.perf_counter()
    image = make(ready.pipe, as_called(settings), on_step=on_step).image
    seconds = time.perf_counter() - started
    settings = with_size(ready.pipe, settings, image)
    if image.size != (settings.width or image.width, settings.height or image.height):
        asked = f"{settings.width}x{settings.height}"
        note(f"{asked} asked for, but the model made {image.width}x{image.height}")
    content = picture.png_bytes(image, settings, ready.made_with)
    picture.write(path, content)
    return {
        "path": str(path),
        "width": image.width,
        "height": image.height,
        "seconds": seconds,
        "sha256": hashlib.sha256(content).hexdigest(),
        "settings": settings.to_dict(),
    }


def _made_with(subject: Subject) -> dict[str, Any]:
    """What besides the settings decides the pixels."""
    from accel.pipelines import machine, versions

    scheduler = getattr(subject.pipe, "scheduler", None)
    threads = machine.threads(subject.where.device)
    return {
        "pipeline": type(subject.pipe).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "model": subject.fingerprint,
        "device": machine.device_name(subject.where.device),
        **({} if threads is None else {"threads": threads}),
        **versions.made_with(),
    }


def _fingerprints(settings: Settings) -> dict[str, Any]:
    """Of each LoRA that has one: what a person names has none before it is loaded."""
    return {f"LoRA {lora.path}": lora.fingerprint for lora in settings.loras if lora.fingerprint}


def _note_differences(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Says why a picture made again may differ."""
    for name, value in then.items():
        if name == "threads" and name not in now:
            continue  # on a GPU, which the device's line tells
        if now.get(name) != value:
            remedy = f"; {_setting(value)} before the command sets that"
            note(
                f"the picture was made with {name} {value}, here it is {now.get(name)}: "
                f"it may come out different{remedy if name == 'threads' else ''}"
            )


def _setting(threads: Any) -> str:
    """What makes torch take so many threads. MKL, which torch asks, allows no more than there are
    cores unless told that it may not choose."""
    from accel.pipelines import machine

    more = isinstance(threads, int) and threads > machine.cores()
    return f"OMP_NUM_THREADS={threads}{' MKL_DYNAMIC=FALSE' if more else ''}"


def _report(pipe: Any, mode: str) -> dict[str, Any] | None:
    if mode == "off":
        return None
    import accel

    report: dict[str, Any] = accel.report(pipe).to_dict()
    return report
