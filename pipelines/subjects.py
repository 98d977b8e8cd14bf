"""What a command works on: the zoo, the demo model, a folder or a hub id, as a pipeline that runs.

This module puts together what `models`, `loading`, `zoo` and `demo` know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel.pipelines import loading
from accel.pipelines.console import note
from accel.pipelines.errors import BadInput, explained
from accel.pipelines.generation import call_arguments, call_defaults, completed, guidance_argument
from accel.pipelines.models import Trust, is_hub_id, resolve
from accel.pipelines.settings import Settings

PROMPT = "a red circle on a blue background"


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


def load_model(
    settings: Settings, device: str, *, trust: Trust | None = None, quiet: bool = True
) -> Subject:
    """The pipeline that `settings` name: demo, a folder or a hub id. Raises `BadInput` for
    arguments that the pipeline does not take."""
    if not is_hub_id(settings.model):
        resolve(settings.model, trust)  # a typing mistake is answered before torch is loaded
    loras = loading.identified(settings.loras)
    where = loading.placement(device, settings.dtype)
    model = resolve(settings.model, trust)
    if quiet:
        loading.quiet()
    pipe = loading.load(model, where, trust=trust, loras=loras)
    if settings.model == "demo":
        settings = _with_demo_defaults(settings)
    call_arguments(pipe, settings)
    settings = completed(pipe, settings.changed(dtype=where.dtype_name, loras=loras))
    return Subject(pipe, settings, where, model.fingerprint)


def obtain(
    name: str,
    wishes: dict[str, Any],
    device: str = "auto",
    *,
    trust: Trust | None = None,
    quiet: bool = True,
) -> Subject:
    """What `name` stands for, the zoo included; `wishes` are settings, None where none was said."""
    settings = Settings(model=name, prompt=PROMPT)
    if name == "demo" or is_hub_id(name) or Path(name).expanduser().exists():
        return load_model(settings.changed(**wishes), device, trust=trust, quiet=quiet)
    from accel.pipelines import zoo

    if name not in zoo.names():
        raise BadInput(f"no such model folder: {name}; the zoo has {', '.join(zoo.names())}")
    return _from_zoo(settings, wishes, device, trust=trust, quiet=quiet)


def _from_zoo(
    settings: Settings, wishes: dict[str, Any], device: str, *, trust: Trust | None, quiet: bool
) -> Subject:
    from accel.pipelines import zoo

    loras = loading.identified(wishes.get("loras") or ())
    where = loading.placement(device, wishes.get("dtype") or "auto")
    if where.device.type == "cuda" and wishes.get("dtype") in (None, "auto"):
        where = replace(where, dtype=zoo.dtype(settings.model))
    if quiet:
        loading.quiet()
    try:
        pipe = zoo.build(settings.model, where.device, where.dtype, seed=0)
    except Exception as error:
        raise explained(error) from error
    loading.hide_progress(pipe)
    loading.activate(pipe, loras, trust)
    settings = _named(pipe, settings, zoo.defaults(settings.model)).changed(
        **wishes | {"loras": loras}
    )
    call_arguments(pipe, settings)
    return Subject(pipe, completed(pipe, replace(settings, dtype=where.dtype_name)), where)


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


def _with_demo_defaults(settings: Settings) -> Settings:
    from accel.pipelines import demo

    return replace(
        settings,
        steps=demo.DEFAULT_STEPS if settings.steps is None else settings.steps,
        guidance=demo.DEFAULT_GUIDANCE if settings.guidance is None else settings.guidance,
        width=settings.width or demo.SIZE,
        height=settings.height or demo.SIZE,
    )


def as_called(settings: Settings, *, tell: bool = False) -> Settings:
    """The settings with the prompt as the model understands it: the demo model knows few words, and
    with `tell` one line says which were replaced."""
    if settings.model != "demo":
        return settings
    from accel.pipelines import demo

    told = demo.notice(settings.prompt)
    if tell and told is not None:
        note(told)
    return replace(settings, prompt=demo.translate(settings.prompt))
