"""`accel generate`: from an order to files, with everything that can be refused refused first."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.pipelines import outputs, picture
from accel.pipelines.console import OnStep, note, stdout_kept_clean, steps_shown
from accel.pipelines.errors import BadInput
from accel.pipelines.models import Trust
from accel.pipelines.prompts import refuse_broken, settings_for
from accel.pipelines.settings import Lora, Settings, parse_size

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
class Prepared:
    """A pipeline ready to make the pictures that are `wanted`."""

    pipe: Any
    wanted: list[Settings]
    made_with: dict[str, Any]


def fulfil(order: Order) -> dict[str, Any]:
    """Makes and writes the pictures of `order`; returns what was made as plain data."""
    if order.mode not in MODES:
        raise BadInput(f"--mode {order.mode}: choose from {', '.join(MODES)}")
    base, made_with = _base(order)
    wanted = settings_for(base, order.prompts, order.number, _seed(order, base))
    paths = outputs.paths_for(order.output, wanted)
    with stdout_kept_clean(order.stdout_is_json):
        ready = _prepared(order, base, wanted)
        now = {**ready.made_with, **_fingerprints(ready.wanted[0])}
        _note_differences({**made_with, **_fingerprints(base)}, now)
        made = [*_write_all(ready, paths, tell=not order.stdout_is_json)]
        report = _report(ready.pipe, order.mode)
    return {"pictures": made, "made_with": ready.made_with, "mode": order.mode, "report": report}


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


def _prepared(order: Order, base: Settings, wanted: list[Settings]) -> Prepared:
    from accel.pipelines import subjects
    from accel.pipelines.arguments import call_defaults

    subject = subjects.load_model(base, order.device, trust=order.trust, quiet=order.quiet)
    if "num_frames" in call_defaults(subject.pipe):
        raise BadInput(f"{base.model} makes videos; accel generate makes pictures")
    chosen = [replace(subject.settings, prompt=s.prompt, seed=s.seed) for s in wanted]
    subjects.tell(chosen)
    if len(order.prompts) > 1 and not any(" " in prompt for prompt in order.prompts):
        note(f"{len(order.prompts)} prompts of one word each: quotes make a sentence one prompt")
    pipe = subject.pipe
    if order.mode != "off":
        import accel

        pipe = accel.patch(pipe, mode=order.mode)
    return Prepared(pipe, chosen, _made_with(subject))


def _write_all(ready: Prepared, paths: list[Path], *, tell: bool) -> Iterator[dict[str, Any]]:
    with steps_shown(len(paths), ready.wanted[0].steps) as on_step:
        for index, (settings, path) in enumerate(zip(ready.wanted, paths, strict=True)):
            made = _write_one(ready, settings, path, on_step(index))
            if tell:
                size, seed = f"{made['width']}x{made['height']}", settings.seed
                print(f"{path}: {size}, seed {seed}, {made['seconds']:.2f} s", flush=True)
            yield made


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
    return {
        "pipeline": type(subject.pipe).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "model": subject.fingerprint,
        "device": machine.device_name(subject.where.device),
        **versions.made_with(),
    }


def _fingerprints(settings: Settings) -> dict[str, Any]:
    """Of each LoRA that has one: what a person names has none before it is loaded."""
    return {f"LoRA {lora.path}": lora.fingerprint for lora in settings.loras if lora.fingerprint}


def _note_differences(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Says why a picture made again may differ."""
    for name, value in then.items():
        if now.get(name) != value:
            note(
                f"the picture was made with {name} {value}, here it is {now.get(name)}: "
                "it may come out different"
            )


def _report(pipe: Any, mode: str) -> dict[str, Any] | None:
    if mode == "off":
        return None
    import accel

    report: dict[str, Any] = accel.report(pipe).to_dict()
    return report
