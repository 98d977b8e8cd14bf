"""Which modules a forward may call is found wherever Python keeps them, and the search ends."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from accel.modules import all_modules


class Own(nn.Module):
    spare: Any


@dataclasses.dataclass
class Node:
    module: nn.Module
    others: list[Any] = dataclasses.field(default_factory=list)


def test_things_that_hold_each_other_are_looked_into_once() -> None:
    own, one, two = Own(), Node(nn.ReLU()), Node(nn.GELU())
    one.others.append(two)
    two.others.append(one)
    own.spare = one
    assert set(all_modules(own)) == {own, one.module, two.module}


def test_a_closure_over_a_dict_that_holds_itself() -> None:
    own, table = Own(), dict[str, Any](layer=nn.ReLU())
    table["itself"] = table
    own.spare = lambda: table
    assert all_modules(own) == [own, table["layer"]]
