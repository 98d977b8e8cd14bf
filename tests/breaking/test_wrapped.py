"""What broke once or still does: compiled, wrapped, nested, trained, hooked modules."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn, tensor

import accel

torch.set_num_threads(1)


class Lin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * 2


class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Lin()
        self.b = Lin()

    def forward(self, x):
        return self.b(self.a(x)) + x


def twins(make, sim, patch=True):
    torch.manual_seed(0)
    p = make().to(sim)
    torch.manual_seed(0)
    q = make().to(sim)
    return p, accel.patch(q, capture="always") if patch else q


def X(sim, i=1.0):
    return torch.full((2, 4), float(i), device=sim)


def same(p, q, *a):
    with torch.no_grad():
        r, s = p(*a), q(*a)
    assert torch.equal(r.cpu(), s.cpu())


def test_patching_a_compiled_module(sim):
    "accel.patch(torch.compile(unet)), or of a pipe whose unet is compiled"
    torch._dynamo.reset()
    p, q = twins(lambda: torch.compile(Nest(), backend="eager"), sim)
    for i in range(4):
        same(p, q, X(sim, i))


def test_a_compiled_child(sim):
    torch._dynamo.reset()
    p, q = twins(Nest, sim)
    q.a = torch.compile(q.a, backend="eager")
    for i in range(4):
        same(p, q, X(sim, i))


def test_hooks_on_blocks_still_fire(sim):
    "a user's forward hook on a block that writes to Python: counts, prints, keeps a number"
    p, q = twins(Nest, sim)
    seen = {p: [], q: []}
    for m in (p, q):
        m.a.register_forward_hook(lambda mod, a, o, m=m: seen[m].append(1))
    for i in range(5):
        same(p, q, X(sim, i))
    assert len(seen[p]) == len(seen[q])


def test_hooks_that_keep_a_number(sim):
    p, q = twins(Nest, sim)
    seen = {p: [], q: []}
    for m in (p, q):
        m.a.register_forward_hook(lambda mod, a, o, m=m: seen[m].append(o.abs().max().item()))
    for i in (1, 1, 1, 2, 2, 2):
        same(p, q, X(sim, i))
    assert seen[p] == seen[q]


class Calls(Lin):
    def forward(self, x, report=None):
        if report:
            report(1)
        return self.layer(x)


def test_a_callback_argument_is_called(sim):
    p, q = twins(Calls, sim)
    seen = {p: [], q: []}
    for i in range(5):
        with torch.no_grad():
            [m(X(sim, i), seen[m].append) for m in (p, q)]
    assert len(seen[p]) == len(seen[q])


class Masked(Lin):
    def __init__(self):
        super().__init__()
        self.mask = np.ones(4, "float32")

    def forward(self, x):
        return self.layer(x) * torch.from_numpy(self.mask.copy()).to(x.device)


def test_a_numpy_attribute_changed_in_place(sim):
    p, q = twins(Masked, sim)
    for i in range(4):
        same(p, q, X(sim, i))
    for m in (p, q):
        m.mask[1] = 0
    same(p, q, X(sim))


class Kept:
    pass


class HelperTable(Lin):
    def __init__(self):
        super().__init__()
        self.rope = Kept()
        self.rope.table = None

    def forward(self, x):
        return self.layer(x) * self.rope.table


def test_a_helpers_table_replaced_the_old_one_kept(sim):
    p, q = twins(HelperTable, sim)
    for m in (p, q):
        m.rope.table = torch.ones(4, device=sim)
    for i in range(4):
        same(p, q, X(sim, i))
    [m.rope.table for m in (p, q)]
    for m in (p, q):
        m.rope.table = torch.full((4,), 3.0, device=sim)
    same(p, q, X(sim))


class Imported(Lin):
    def forward(self, x):
        return self.layer(x) * tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


class FirstGone(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.v = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.v if self.w is None else x * self.w


def test_the_first_parameter_set_to_none(sim):
    p, q = twins(FirstGone, sim)
    for i in range(4):
        same(p, q, X(sim, i))
    for m in (p, q):
        m.w = None
    same(p, q, X(sim))


def test_precision_by_the_new_interface_calls_do_not_fail(sim):
    "torch.backends.cuda.matmul.fp32_precision = 'tf32' is what torch 2.9+ recommends"
    p, q = twins(Nest, sim)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        for i in range(4):
            same(p, q, X(sim, i))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_convolution_precision_by_the_new_interface(sim):
    p, q = twins(Nest, sim)
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        for i in range(4):
            same(p, q, X(sim, i))
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_fp32_precision_of_everything(sim):
    p, q = twins(Nest, sim)
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        for i in range(4):
            same(p, q, X(sim, i))
    finally:
        torch.backends.fp32_precision = before
