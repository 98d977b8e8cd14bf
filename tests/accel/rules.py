"""What a rule of the engine stops, in a form that a test can switch off.

Knows the form only; `rules_on_memory`, `rules_on_effects` and `rules_on_results` hold the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from accel.memory import Pool
from accel.runner import GraphRunner

Scenario = Callable[[torch.device], None]
Switch = Callable[[pytest.MonkeyPatch], None]


class Rule(NamedTuple):
    """A rule, or the part of one: `scenario` fails without it, in the words of `fault`."""

    number: str
    part: str
    scenario: Scenario
    off: Switch
    fault: str


def replaced(owner: Any, name: str, instead: Any) -> Switch:
    """Puts a function without the protection in the place of one that has it."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, instead)


def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Switch:
    """The same, where what protects is a part of the function: `wrap` takes the function."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def together(*switches: Switch) -> Switch:
    """Several protections, each of which would be enough, switched off at once."""

    def switch(monkeypatch: pytest.MonkeyPatch) -> None:
        for each in switches:
            each(monkeypatch)

    return switch


def new_runner(function: Any, device: torch.device, **options: Any) -> GraphRunner:
    """A runner that records whatever it can, in a pool of its own unless one is given."""
    return GraphRunner(function, **{"pool": Pool(device), "capture": "always", **options})


class Box:
    """A container that no one knows how to rebuild."""

    def __init__(self, value: Any) -> None:
        self.value = value
