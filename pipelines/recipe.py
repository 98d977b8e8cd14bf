"""A pipeline's parts list, and how a complete stock pipeline is put together from it.

Knows diffusers' and transformers' classes by name only, imports them when a recipe is built, and
fills their weights at random. Which recipes exist is written in `zoo_configs` and `tiny_recipes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel.pipelines.hushing import no_word_on_torchvision
from accel.pipelines.names import instead
from accel.pipelines.random_weights import count_unbuilt, materialize, on_meta


@dataclass(frozen=True)
class Part:
    """One component with weights: a diffusers or transformers class name and its configuration."""

    kind: str
    config: Mapping[str, Any]

    def make(self) -> nn.Module:
        """The module as its class builds it (ordinary initial weights unless under `on_meta`)."""
        kind = stock_class(self.kind)
        if hasattr(kind, "config_class"):  # transformers takes a configuration object
            return _module(kind(kind.config_class(**self.config)))
        return _module(kind(**self.config))


@dataclass(frozen=True)
class Recipe:
    """A whole pipeline: its class, parts with weights, scheduler, and tools without weights.

    `tools` are tokenizers, processors and the like, made when the pipeline is built; `options` are
    further arguments of the pipeline's constructor.
    """

    pipeline: str
    parts: Mapping[str, Part]
    scheduler: Part
    tools: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def assemble(
        self,
        device: str | torch.device,
        dtype: torch.dtype,
        seed: int,
        parts: Iterable[str] | None = None,
    ) -> Any:
        """The pipeline object with random weights on `device`.

        `parts` limits which components get built (None: all); the others are None in the pipeline,
        except the tools, which are always there. Raises ValueError on a part that does not exist.
        """
        chosen = self._chosen(parts)
        scheduler = stock_class(self.scheduler.kind)(**self.scheduler.config)
        components: dict[str, Any] = {"scheduler": scheduler, **self.options}
        components.update({name: make() for name, make in self.tools.items()})
        for number, (name, part) in enumerate(self.parts.items()):
            wanted = name in chosen
            components[name] = (
                materialize(on_meta(part.make), device, dtype, seed + number) if wanted else None
            )
        pipe = stock_class(self.pipeline)(**components)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def parameter_counts(self) -> dict[str, int]:
        """Parameters of every part, counted on the meta device: no weight is ever made."""
        return {name: count_unbuilt(part.make) for name, part in self.parts.items()}

    def _chosen(self, parts: Iterable[str] | None) -> set[str]:
        chosen = set(self.parts) if parts is None else set(parts)
        unknown = sorted(chosen - set(self.parts))
        if unknown:
            choice = f"parts may name {', '.join(self.parts)}"
            meant = instead(unknown[0], self.parts, choice)
            raise ValueError(f"{self.pipeline} has no part {unknown[0]!r}; {meant}")
        return chosen


def stock_class(name: str) -> Any:
    """The class `name` of diffusers or, failing that, of transformers."""
    import diffusers
    import transformers

    with no_word_on_torchvision():
        found = getattr(diffusers, name, None) or getattr(transformers, name, None)
    if found is None:
        raise ValueError(f"neither diffusers nor transformers has a class {name!r}")
    return found


def _module(made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise TypeError(f"{type(made).__name__} is no torch module, so it cannot be a part")
    return made
