"""What a command works on: the zoo, the demo model, a folder or a hub id, as a pipeline that runs.

This module puts together what `models`, `loading`, `zoo` and `demo` know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from accel.pipelines import hollow, loading
from accel.pipelines.arguments import call_defaults, guidance_argument
from accel.pipelines.console import note
from accel.pipelines.errors import BadInput, explained
from accel.pipelines.generation import call_arguments, completed
from accel.pipelines.models import ZOO, Model, Trust, is_hub_id, resolve, sought
from accel.pipelines.names import instead
from accel.pipelines.settings import Settings

PROMPT = "a red circle on a blue background"

SMALLEST_DEMO = 192
"""Pixels a side below which the demo model draws little but background. It was trained at 256; at
192 it loses some things, from 320 on it draws more of them than were asked for."""


@dataclass(frozen=True)
class Subject:
    """A pipeline on its device, not patched yet, and the settings it is called with.

    `fingerprint` tells the weights apart; the zoo's are random and have none.
    """

    pipe: Any
    settings: Settings
    where: loading.Placement
    fingerprint: str | None = None

    @property
    def inputs(self) -> Settings:
        """The settings as the pipeline is called with them."""
        return as_called(self.settings)


@dataclass(frozen=True)
class Choice:
    """What a command is about, before its weights are loaded: it is there, and its class takes the
    arguments, as far as that shows. `kind` is that class, None for a modular pipeline or one that
    brings code of its own."""

    settings: Settings
    where: loading.Placement
    kind: Any
    load: Callable[[], Subject]


def choose_model(
    settings: Settings, device: str, *, trust: Trust | None = None, quiet: bool = True
) -> Choice:
    """The pipeline that `settings` name: demo, a folder or a hub id. Raises `BadInput` for
    arguments that the pipeline does not take; so does loading it, for what only shows then."""
    model_of = sought(settings.model, partial(resolve, settings.model, trust))
    if settings.model == "demo":
        settings = _with_demo_defaults(settings)
    loras = loading.identified(settings.loras)
    where = loading.placement(device, settings.dtype)
    model = model_of()
    if quiet:
        loading.quiet()
    settings = settings.changed(dtype=where.dtype_name, loras=loras)
    kind = _pipeline_class(model)
    if kind is not None:
        call_arguments(kind, settings)
        hollow.refuse_size_of_saved(kind, model, settings)
        settings = completed(kind, settings)

    def load() -> Subject:
        pipe = loading.load(model, where, trust=trust, loras=loras)
        call_arguments(pipe, settings)
        return Subject(pipe, completed(pipe, settings), where, model.fingerprint)

    return Choice(settings, where, kind, load)


def choose(
    name: str,
    wishes: dict[str, Any],
    device: str = "auto",
    *,
    trust: Trust | None = None,
    quiet: bool = True,
) -> Choice:
    """What `name` stands for, the zoo included; `wishes` are settings, None where none was said."""
    settings = Settings(model=name, prompt=PROMPT)
    if name == "demo" or is_hub_id(name) or os.path.exists(os.path.expanduser(name)):
        return choose_model(settings.changed(**wishes), device, trust=trust, quiet=quiet)
    if name not in ZOO:
        choice = f"the zoo has {', '.join(ZOO)}; else give demo, a folder or a hub id, owner/name"
        meant = instead(name, (*ZOO, "demo"), choice)
        raise BadInput(f"no such model folder: {name}; {meant}")
    return _from_zoo(settings, wishes, device, trust=trust, quiet=quiet)


def _from_zoo(
    settings: Settings, wishes: dict[str, Any], device: str, *, trust: Trust | None, quiet: bool
) -> Choice:
    from accel.pipelines import zoo
    from accel.pipelines.recipe import stock_class
    from accel.pipelines.zoo_configs import RECIPES

    loras = loading.identified(wishes.get("loras") or ())
    where = loading.placement(device, wishes.get("dtype") or "auto")
    if where.device.type == "cuda" and wishes.get("dtype") in (None, "auto"):
        where = replace(where, dtype=zoo.dtype(settings.model))
    if quiet:
        loading.quiet()
    recipe = RECIPES[settings.model]
    kind = stock_class(recipe.pipeline)
    settings = _named(kind, settings, zoo.defaults(settings.model))
    settings = settings.changed(**wishes | {"loras": loras, "dtype": where.dtype_name})
    call_arguments(kind, settings)
    hollow.refuse_size_of_recipe(kind, recipe, settings)
    settings = completed(kind, settings)

    def load() -> Subject:
        try:
            pipe = zoo.build(settings.model, where.device, where.dtype, seed=0)
        except Exception as error:
            raise explained(error) from error
        loading.hide_progress(pipe)
        loading.activate(pipe, loras, trust)
        return Subject(pipe, settings, where)

    return Choice(settings, where, kind, load)


def _named(pipe: Any, settings: Settings, arguments: dict[str, Any]) -> Settings:
    """The settings that say what the call's `arguments` say."""
    names = {
        "height": "height",
        "width": "width",
        "negative_prompt": "negative_prompt",
        "num_inference_steps": "steps",
        guidance_argument(call_defaults(pipe)): "guidance",
    }
    known = {names[name]: value for name, value in arguments.items() if name in names}
    extra = {name: value for name, value in arguments.items() if name not in names}
    return replace(settings, extra=extra, **known)


def _pipeline_class(model: Model) -> Any:
    """The class of a classic stock pipeline, None for any other."""
    import diffusers

    name = model.index["_class_name"]
    kind = getattr(diffusers, name, None) if isinstance(name, str) and not model.modular else None
    known = isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)
    return kind if known else None


def _with_demo_defaults(settings: Settings) -> Settings:
    from accel.pipelines import demo

    width, height = settings.width or demo.SIZE, settings.height or demo.SIZE
    if min(width, height) < SMALLEST_DEMO:
        raise BadInput(
            f"--size {width}x{height}: the demo model was trained at {demo.SIZE}x{demo.SIZE} and "
            f"draws little but background below {SMALLEST_DEMO} pixels a side"
        )
    return replace(
        settings,
        steps=demo.DEFAULT_STEPS if settings.steps is None else settings.steps,
        guidance=demo.DEFAULT_GUIDANCE if settings.guidance is None else settings.guidance,
        width=width,
        height=height,
    )


def as_called(settings: Settings) -> Settings:
    """The settings with the prompt as the model understands it: the demo model knows few words."""
    if settings.model != "demo":
        return settings
    from accel.pipelines import demo

    return replace(settings, prompt=demo.translate(settings.prompt))


def tell(wanted: Iterable[Settings]) -> None:
    """Says on stderr what the model will not draw as asked: one line each, and once."""
    for line in dict.fromkeys(line for settings in wanted for line in _remarks(settings)):
        note(line)


def _remarks(settings: Settings) -> Iterator[str]:
    if settings.model != "demo":
        return
    from accel.pipelines import demo

    told = demo.notice(settings.prompt)
    if told is not None:
        yield told
    if (settings.width, settings.height) != (demo.SIZE, demo.SIZE):
        yield (
            f"the demo model was trained at {demo.SIZE}x{demo.SIZE}: at {settings.width}x"
            f"{settings.height} expect things missing, misshapen or too many"
        )
