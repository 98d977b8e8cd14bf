"""What broke once or still does: dict arguments that a forward edits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel

torch.set_num_threads(1)


class Swaps(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.edit = edit

    def forward(self, x, d):
        self.edit(d)
        return self.layer(x)


def swap(d):
    d["a"], d["b"] = d["b"], d["a"]


def flag(d):
    d["first"] = False


def none(d):
    d["first"] = None


def rename(d):
    d["c"] = d.pop("a")


@pytest.mark.parametrize("edit", [swap, flag, none, rename])
def test_a_dict_is_left_as_eager_leaves_it(edit, sim):
    q = accel.patch(Swaps(edit).to(sim), capture="always")
    for i in range(4):
        one, two = torch.full((2,), float(i)).to(sim), torch.zeros(2, device=sim)
        d = {"a": one, "b": two, "first": True, "other": False, "nothing": None}
        e = dict(d)
        edit(e)
        with torch.no_grad():
            q(torch.ones(2, 4, device=sim), d)
        assert list(d) == list(e) and all(d[k] is e[k] for k in e), (i, list(d))
