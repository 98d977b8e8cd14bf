"""A pipeline without weights: enough of it to ask which sizes it takes.

Only a pipeline's own code knows that, and it asks the configurations of its parts: the VAE's
factor, the patches of the denoiser. So the class is put together from parts whose parameters have
shapes and no memory, and is called: it refuses a size before it does anything else. There is no
text encoder and no part does its work, so a call never gets far. What cannot be built or told like
this is not refused here; the whole pipeline is asked all the same, later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.pipelines.errors import explained, is_about_size
from accel.pipelines.generation import call_arguments
from accel.pipelines.models import Model
from accel.pipelines.settings import Settings

if TYPE_CHECKING:
    from accel.pipelines.recipe import Recipe


def refuse_size_of_saved(kind: Any, model: Model, settings: Settings) -> None:
    """Raises `BadInput` where the pipeline class `kind` with the configurations in `model` does not
    take the size in `settings`."""
    if settings.width is not None:
        _refuse(lambda: _built(kind, {**_options(model), **_saved_parts(model)}), settings)


def refuse_size_of_recipe(kind: Any, recipe: Recipe, settings: Settings) -> None:
    """The same for a recipe of the zoo."""
    if settings.width is not None:
        _refuse(lambda: _built(kind, {**recipe.options, **_recipe_parts(recipe)}), settings)


def _refuse(build: Callable[[], Any], settings: Settings) -> None:
    try:
        pipe = build()
        pipe(**call_arguments(pipe, settings))
    except Exception as error:  # a class may ask anything of parts that are not there
        if is_about_size(error):
            raise explained(error) from error


def _built(kind: Any, parts: Mapping[str, Any]) -> Any:
    wanted = inspect.signature(kind.__init__).parameters.values()
    needed = {p.name: None for p in wanted if p.default is p.empty and p.name != "self"}
    known = {p.name for p in wanted}
    pipe = kind(**needed | {name: part for name, part in parts.items() if name in known})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _saved_parts(model: Model) -> dict[str, Any]:
    """The scheduler, and diffusers' modules without weights."""
    import diffusers

    parts: dict[str, Any] = {}
    for name, (library, kind) in model.components.items():
        folder = model.folder / name
        if (folder / f"{library}.py").is_file():
            raise LookupError(f"{name} is of a class of its own, which may count otherwise")
        found: Any = getattr(diffusers, kind, None) if library == "diffusers" else None
        if _is_a(found, diffusers.ModelMixin):
            parts[name] = _idle(partial(_from_config, found, str(folder)))
        elif _is_a(found, diffusers.SchedulerMixin):
            parts[name] = found.from_pretrained(str(folder))
    return parts


def _is_a(found: Any, base: Any) -> bool:
    return isinstance(found, type) and issubclass(found, base)


def _from_config(kind: Any, folder: str) -> Any:
    return kind.from_config(kind.load_config(folder))


def _options(model: Model) -> dict[str, Any]:
    """What the index says of the pipeline besides its parts."""
    plain = model.index.items()
    return {k: v for k, v in plain if not k.startswith("_") and not isinstance(v, list)}


def _recipe_parts(recipe: Recipe) -> dict[str, Any]:
    import diffusers

    from accel.pipelines.recipe import stock_class

    parts: dict[str, Any] = {
        name: _idle(part.make)
        for name, part in recipe.parts.items()
        if issubclass(stock_class(part.kind), diffusers.ModelMixin)
    }
    scheduler = stock_class(recipe.scheduler.kind)(**recipe.scheduler.config)
    return {"scheduler": scheduler, **parts}


def _idle(make: Callable[[], Any]) -> Any:
    """The module that `make` builds, without memory, and refusing to work."""
    import torch

    def work(*arguments: object, **options: object) -> None:
        raise NotImplementedError("a part without weights was asked to work")

    with torch.device("meta"):
        module = make()
    for method in ("forward", "encode", "decode"):
        setattr(module, method, work)
    return module
