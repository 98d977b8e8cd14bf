"""What a pipeline's call takes, and whether a value given as `--set NAME=VALUE` fits.

This module knows signatures and words. It reads classes as well as pipelines, so that a wrong name
is answered before weights are loaded; the call itself is `generation`'s matter.
"""

from __future__ import annotations

import inspect
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from accel.pipelines.errors import BadInput
from accel.pipelines.names import instead

_OPTIONS = {
    "prompt": "the prompt argument",
    "negative_prompt": "--negative-prompt",
    "num_inference_steps": "--steps",
    "steps": "--steps",
    "guidance": "--guidance",
    "width": "--size",
    "height": "--size",
    "size": "--size",
    "seed": "--seed",
    "generator": "--seed",
    "dtype": "--dtype",
    "device": "--device",
    "model": "--model",
}
"""What has an option of its own, under its own name and under those that people try."""

_OURS = (
    "output",
    "output_type",
    "return_dict",
    "callback_on_step_end",
    "callback_on_step_end_tensor_inputs",
)
"""What accel sets or needs as it is, to get pictures out of a call."""

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text (what reads as JSON in double quotes)",
    list: "a list: [1, 2]",
    tuple: "a list: [1, 2]",
    dict: 'an object: {"name": 1}',
}


def is_modular(pipe: Any) -> bool:
    """Whether `pipe` is a modular pipeline: its arguments are its blocks' inputs."""
    return hasattr(pipe, "blocks") and hasattr(pipe, "default_call_parameters")


def name_of(pipe: Any) -> str:
    """The class of `pipe`, which may be that class."""
    return str(pipe.__name__ if isinstance(pipe, type) else type(pipe).__name__)


def call_defaults(pipe: Any) -> dict[str, Any]:
    """The arguments that `pipe` (a pipeline, or the class of a classic one) takes, with their
    defaults; None where there is none."""
    if is_modular(pipe):
        inputs = pipe.default_call_parameters
        return {name: default for name, default in inputs.items() if name is not None}
    return {p.name: None if p.default is p.empty else p.default for p in _parameters(pipe)}


def guidance_argument(known: Mapping[str, Any]) -> str | None:
    """What `--guidance` sets. Pipelines with both arguments and no default for `guidance_scale`
    guide by `true_cfg_scale`; the other one is for distilled models and does nothing there."""
    if "true_cfg_scale" in known and known.get("guidance_scale") is None:
        return "true_cfg_scale"
    return "guidance_scale" if "guidance_scale" in known else None


def refuse_reserved(name: str) -> None:
    """Raises `BadInput` for an argument that has an option of its own, or that accel sets."""
    if name in _OPTIONS:
        raise BadInput(f"--set {name}: {_OPTIONS[name]} sets that")
    if name in _OURS:
        raise BadInput(f"--set {name}: accel sets that itself; leave it out")


def refuse_unfit(pipe: Any, extra: Mapping[str, Any]) -> None:
    """Raises `BadInput` for the first of the `extra` arguments that `pipe` does not take, that has
    an option of its own, or whose value is of another kind than the argument."""
    known, hints = call_defaults(pipe), _hints(pipe)
    guidance = guidance_argument(known)
    for name, value in extra.items():
        refuse_reserved(name)
        if name == guidance:
            raise BadInput(f"--set {name}: --guidance sets that")
        if name not in known:
            reserved = (*_OPTIONS, *_OURS, guidance)
            takes = [k for k in known if k not in reserved and _words(hints.get(k, Any))]
            choice = f"it takes {', '.join(takes)}" if takes else "leave it out"
            raise BadInput(
                f"--set {name}: {name_of(pipe)} takes no {name}; {instead(name, takes, choice)}"
            )
        hint = hints.get(name, Any)
        if not (_fits(value, hint) or (value is None and known[name] is None)):
            raise BadInput(f"--set {name}={_written(value)}: {name} {_wanted(hint)}")


def _parameters(pipe: Any) -> list[inspect.Parameter]:
    parameters = inspect.signature(pipe.__call__).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in parameters if p.kind in named and p.name != "self"]


def _hints(pipe: Any) -> dict[str, Any]:
    if is_modular(pipe):
        return {i.name: i.type_hint or Any for i in pipe.blocks.inputs if i.name is not None}
    return {p.name: Any if p.annotation is p.empty else p.annotation for p in _parameters(pipe)}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_fits_one(value, kind) for kind in _alternatives(hint))


def _fits_one(value: Any, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind in (None, types.NoneType):
        return value is None
    if origin is bool or isinstance(value, bool):
        return isinstance(value, bool) and (origin is bool or not _is_checked(origin))
    if origin is float:
        return isinstance(value, int | float) and math.isfinite(value)
    if origin in (list, tuple):  # JSON has lists only
        each = inner[0] if origin is list and inner else Any
        return isinstance(value, list) and all(_fits(item, each) for item in value)
    if origin in (int, str, dict):
        return isinstance(value, origin)
    return not _is_checked(origin)


def _is_checked(kind: Any) -> bool:
    """Whether it can be told if a value is of that kind; a hint that is no class says nothing."""
    return isinstance(kind, type) and kind is not Any


def _words(hint: Any) -> list[str]:
    """The kinds of value, in words, that can be written on a command line."""
    found = []
    for kind in _alternatives(hint):
        origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin in (list, tuple) and inner and not _words(inner[0]):
            continue
        if origin in _WORDS:
            found.append(_WORDS[origin])
        elif not _is_checked(origin):
            found.append("any value")
    return list(dict.fromkeys(found))


def _wanted(hint: Any) -> str:
    words = _words(hint)
    return f"takes {' or '.join(words)}" if words else "takes nothing that can be written here"


def _written(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
