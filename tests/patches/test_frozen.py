"""Python values within reach of a forward: of modules, of what they hold, of classes, global."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel.patches.frozen import changes, left_behind, python_values

number_of_calls = 0


class Processor:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self) -> None: ...


class Layer(nn.Module):
    shared = 1
    history: list[int] = []  # noqa: RUF012  (shared on purpose)

    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()
        self.options: dict[str, Any] = {"a": [1, 2]}


def test_every_place_is_looked_at() -> None:
    global number_of_calls
    net = nn.Sequential(Layer())
    before = python_values(net)
    net[0].processor.scale = 2.0
    net[0].options["a"].append(3)
    net[0].eval()
    Layer.shared = 2
    Layer.history.append(1)
    number_of_calls += 1
    found = changes(before, python_values(net))
    assert {name.rpartition(".")[2] for name in found} == {
        "scale",
        "options",
        "training",
        "shared",
        "history",
        "number_of_calls",
    }
    assert found["0.processor.scale"] == (1.0, 2.0)
    assert found["0.options"] == ("{'a': [1, 2]}", "{'a': [1, 2, 3]}")
    assert changes(python_values(net), python_values(net)) == {}


def test_a_change_of_type_is_a_change() -> None:
    assert changes({"a": 1, "b": float("nan")}, {"a": 1.0, "b": float("nan")}) == {"a": (1, 1.0)}


def test_only_what_the_replay_does_not_change_is_left_behind() -> None:
    assert list(left_behind({"a": (0, 1), "b": (0, 1)}, {"a": (5, 6)})) == [
        "b goes from 0 to 1 in an eager call and stays in a replay"
    ]
