import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.pipelines.arguments import call_defaults, refuse_unfit
from accel.pipelines.errors import BadInput


class Pipe:
    """The arguments that the tests are about."""

    def __call__(
        self,
        prompt: str | None = None,
        guidance_scale: float = 7.5,
        count: int = 1,
        scale: float = 1.0,
        flag: bool = False,
        name: str | None = None,
        sigmas: list[float] = None,  # type: ignore[assignment]  # noqa: RUF013 (as diffusers has it)
        size: tuple[int, int] | None = None,
        options: dict[str, Any] | None = None,
        embeds: list[torch.Tensor] | None = None,
        on_end: Callable[[int], None] | None = None,
        unknown: "Nobody" = None,  # type: ignore[name-defined]  # noqa: F821
        bare=None,  # type: ignore[no-untyped-def]
        **kwargs: Any,
    ) -> None: ...


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("count", [3, -1]),
        ("scale", [0.5, 2]),
        ("flag", [True, False]),
        ("name", ["x", None]),
        ("sigmas", [[1.0, 2], [], None]),
        ("options", [{"a": 1}, {}]),
        ("unknown", [1, "x", True, None]),
        ("bare", [1, "x", True, [1]]),
    ],
)
def test_values_of_the_arguments_kind_pass(name: str, values: list[Any]) -> None:
    for value in values:
        refuse_unfit(Pipe(), {name: value})
        refuse_unfit(Pipe, {name: value})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("count", 1.5, r"^--set count=1.5: count takes a whole number$"),
        ("count", True, r"^--set count=true: count takes a whole number$"),
        ("count", None, r"^--set count=null: count takes"),
        ("scale", "wide", r"^--set scale=wide: scale takes a finite number$"),
        ("scale", float("inf"), r"scale takes a finite number$"),
        ("flag", 1, r"flag takes true or false$"),
        ("flag", "True", r"flag takes true or false$"),
        ("name", 3, r"name takes text \(what reads as JSON in double quotes\)$"),
        ("sigmas", ["x"], r'sigmas=\["x"\]: sigmas takes a list: \[1, 2\]$'),
        ("options", [1], r"options takes an object"),
        ("embeds", [1], r"embeds takes nothing that can be written here$"),
        ("on_end", "print", r"on_end takes nothing that can be written here$"),
        ("guidance_scale", 3, r"^--set guidance_scale: --guidance sets that$"),
        ("prompt", "x", r"^--set prompt: the prompt argument sets that$"),
        ("kwargs", 1, r"^--set kwargs: Pipe takes no kwargs; it takes count, scale, flag, "),
        ("sigma", 1, r"^--set sigma: Pipe takes no sigma; did you mean sigmas\?$"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(name: str, value: Any, why: str) -> None:
    with pytest.raises(BadInput, match=why) as refused:
        refuse_unfit(Pipe(), {name: value})
    assert "\n" not in str(refused.value)


def test_a_class_takes_what_its_pipelines_take() -> None:
    assert call_defaults(Pipe) == call_defaults(Pipe())
    assert "self" not in call_defaults(Pipe)


def test_a_modular_pipelines_inputs_are_checked_too() -> None:
    class Input:
        def __init__(self, name: str, kind: Any, default: Any = None) -> None:
            self.name, self.type_hint, self.default = name, kind, default

    class Modular:
        class blocks:
            inputs = (Input("strength", float, 0.5), Input("anything", None))

        default_call_parameters = types.MappingProxyType({"strength": 0.5, "anything": None})

    refuse_unfit(Modular(), {"strength": 1, "anything": "x"})
    with pytest.raises(BadInput, match="strength takes a finite number"):
        refuse_unfit(Modular(), {"strength": "x"})
