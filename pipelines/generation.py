"""From settings to a picture: the call's arguments, and the call itself.

A picture is made alone, with its own generator on the CPU: so it can be made again from its
settings, whatever else was asked for in the same run and whatever GPU made it first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel.pipelines.arguments import (
    call_defaults,
    guidance_argument,
    is_modular,
    name_of,
    refuse_unfit,
)
from accel.pipelines.console import OnStep
from accel.pipelines.errors import AccelError, BadInput
from accel.pipelines.settings import Settings

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True)
class Take:
    """One call of a pipeline: its pictures (a video's are its frames) and, if asked for, its
    latents before the VAE."""

    images: list[Image]
    latents: torch.Tensor | None = None

    @property
    def image(self) -> Image:
        """The first picture."""
        return self.images[0]


def completed(pipe: Any, settings: Settings) -> Settings:
    """The settings with the pipeline's own defaults written out, as far as its call shows them.

    A later version may have other defaults; a picture's settings should not depend on them.
    """
    known = call_defaults(pipe)
    steps, guidance = settings.steps, settings.guidance
    if steps is None and isinstance(known.get("num_inference_steps"), int):
        steps = known["num_inference_steps"]
    name = guidance_argument(known)
    if guidance is None and name and isinstance(known[name], int | float):
        guidance = float(known[name])
    return replace(settings, steps=steps, guidance=guidance)


def with_size(pipe: Any, settings: Settings, image: Image) -> Settings:
    """The settings with the picture's size where none was asked for and the call takes one."""
    if settings.width is None and {"width", "height"} <= call_defaults(pipe).keys():
        return replace(settings, width=image.width, height=image.height)
    return settings


def call_arguments(pipe: Any, settings: Settings) -> dict[str, Any]:
    """The keyword arguments of the call, without generator and output; `pipe` may be the class of a
    classic pipeline. Raises `BadInput` for what it has no argument for, or of another kind."""
    known = call_defaults(pipe)
    wanted = {
        ("a prompt", "prompt"): settings.prompt or (None if "prompt" not in known else ""),
        ("--negative-prompt", "negative_prompt"): settings.negative_prompt,
        ("--steps", "num_inference_steps"): settings.steps,
        ("--guidance", guidance_argument(known) or "guidance_scale"): settings.guidance,
        ("--size", "width"): settings.width,
        ("--size", "height"): settings.height,
    }
    for (option, name), value in wanted.items():
        if value is not None and name not in known:
            raise BadInput(f"{option}: {name_of(pipe)} takes no {name}; leave it out")
    refuse_unfit(pipe, settings.extra)
    named = {name: value for (_, name), value in wanted.items() if value is not None}
    return {**named, **{k: v for k, v in settings.extra.items() if v is not None}}


def make(
    pipe: Any, settings: Settings, *, on_step: OnStep | None = None, latents: bool = False
) -> Take:
    """Runs `pipe` once. `on_step` hears the number of finished steps where the pipeline tells them;
    with `latents` the take holds a copy of what the VAE was given.

    A pipeline that shows its latents neither at its steps nor among its results is called a second
    time, for the latents alone.
    """
    import torch

    arguments = call_arguments(pipe, settings)
    witness = _Witness(on_step, latents)
    if (on_step or latents) and "callback_on_step_end" in call_defaults(pipe):
        arguments["callback_on_step_end"] = witness
    generator = torch.Generator("cpu").manual_seed(settings.seed)
    if is_modular(pipe):
        made = pipe(**arguments, generator=generator, output=["images", "latents"])
        last = made["latents"] if latents else None
        return Take(_pictures(made["images"], pipe), None if last is None else last.clone())
    pictures = _pictures(_made(pipe(**arguments, generator=generator), pipe), pipe)
    if latents and witness.latents is None:
        arguments.pop("callback_on_step_end", None)
        generator = torch.Generator("cpu").manual_seed(settings.seed)
        witness.latents = _made(pipe(**arguments, generator=generator, output_type="latent"), pipe)
    return Take(pictures, witness.latents)


class _Witness:
    """A step callback that counts, and keeps the newest latents if it should."""

    def __init__(self, on_step: OnStep | None, keep: bool) -> None:
        self.latents: torch.Tensor | None = None
        self._on_step = on_step
        self._keep = keep

    def __call__(
        self, pipe: Any, index: int, timestep: Any, values: dict[str, Any]
    ) -> dict[str, Any]:
        if self._keep and values.get("latents") is not None:
            self.latents = values["latents"].detach().clone()
        if self._on_step is not None:
            self._on_step(index + 1)
        return {}


def _made(output: Any, pipe: Any) -> Any:
    for name in ("images", "frames"):
        if hasattr(output, name):
            return getattr(output, name)
    made = ", ".join(getattr(output, "keys", lambda: [type(output).__name__])())
    raise BadInput(f"{type(pipe).__name__} makes {made}, not pictures")


def _pictures(made: Any, pipe: Any) -> list[Image]:
    """The pictures among what a pipeline made: a list of them, or a list of lists of frames."""
    import numpy
    from PIL import Image

    if isinstance(made, list) and made and isinstance(made[0], list):
        made = made[0]
    if isinstance(made, numpy.ndarray) and made.ndim == 5:  # videos come as numbers from 0 to 1
        made = [Image.fromarray((frame * 255).round().astype("uint8")) for frame in made[0]]
    if not isinstance(made, list) or not made or not isinstance(made[0], Image.Image):
        raise AccelError(f"{type(pipe).__name__} returned {type(made).__name__}, not pictures")
    return made
