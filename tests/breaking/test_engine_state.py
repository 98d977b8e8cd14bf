"""What broke once or still does: state that a patched module does not see (no pipeline needed)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import accel

torch.set_num_threads(1)


def twins(make, sim):
    torch.manual_seed(0)
    plain = make().to(sim)
    torch.manual_seed(0)
    patched = make().to(sim)
    accel.patch(patched, capture="always")
    return plain, patched


def same(plain, patched, *args, **kw):
    with torch.no_grad():
        a, b = plain(*args, **kw), patched(*args, **kw)
    assert a.dtype == b.dtype
    assert torch.equal(a.cpu(), b.cpu()), (a, b)


def warm(plain, patched, sim, n=4):
    for i in range(n):
        same(plain, patched, torch.full((2, 4), float(i), device=sim))
    assert accel.report(patched).parts[0].replays > 0


class Lin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class Doubling(Lin):
    def forward(self, x):
        return self.layer(x) * 2


class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Lin()

    def forward(self, x):
        return self.block(x)


def test_a_childs_class_replaced(sim):
    "tomesd does this: module.__class__ = ToMeBlock"
    p, q = twins(Nest, sim)
    warm(p, q, sim)
    for m in (p, q):
        m.block.__class__ = Doubling
    same(p, q, torch.ones(2, 4, device=sim))


def test_a_class_forward_replaced(sim, monkeypatch):
    "Attention.forward = mine, after the recording"
    p, q = twins(Nest, sim)
    warm(p, q, sim)
    monkeypatch.setattr(Lin, "forward", lambda self, x: self.layer(x) * 3)
    same(p, q, torch.ones(2, 4, device=sim))


class Helper:
    scale = 1.0


class WithHelper(Lin):
    def __init__(self):
        super().__init__()
        self.helper = Helper()
        self.helper.scale = 1.0

    def forward(self, x):
        return self.layer(x) * self.helper.scale


def test_a_plain_helpers_number(sim):
    p, q = twins(WithHelper, sim)
    warm(p, q, sim)
    for m in (p, q):
        m.helper.scale = 0.5
    same(p, q, torch.ones(2, 4, device=sim))


class Controller:
    def __init__(self):
        self.step = 0


class P2PProcessor:
    def __init__(self):
        self.controller = Controller()

    def __call__(self, layer, x):
        self.controller.step += 1
        return layer(x) * (2 if self.controller.step > 5 else 1)


class WithController(Lin):
    def __init__(self):
        super().__init__()
        self.processor = P2PProcessor()

    def forward(self, x):
        return self.processor(self.layer, x)


def test_a_controller_that_counts_steps(sim):
    "prompt-to-prompt: the processor's controller counts calls and decides by it"
    p, q = twins(WithController, sim)
    for i in range(10):
        same(p, q, torch.full((2, 4), float(i), device=sim))


class HostScalar(Lin):
    def __init__(self):
        super().__init__()
        self.gate = torch.tensor(1.0)

    def forward(self, x):
        return self.layer(x) * self.gate


def test_a_host_scalar_written_through_data(sim):
    p, q = twins(HostScalar, sim)
    warm(p, q, sim)
    for m in (p, q):
        m.gate.data.fill_(0.5)
    same(p, q, torch.ones(2, 4, device=sim))


def test_a_host_scalar_written_through_numpy(sim):
    p, q = twins(HostScalar, sim)
    warm(p, q, sim)
    for m in (p, q):
        m.gate.numpy()[...] = 0.5
    same(p, q, torch.ones(2, 4, device=sim))


class IntGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.gate = 2

    def forward(self, x):
        return x.long() * self.gate


def test_a_number_of_another_kind(sim):
    p, q = twins(IntGate, sim)
    warm(p, q, sim)
    for m in (p, q):
        m.gate = 2.0
    same(p, q, torch.ones(2, 4, device=sim))


class NegZero(Lin):
    gate0 = 0

    def __init__(self):
        super().__init__()
        self.gate = 0.0

    def forward(self, x):
        return 1 / (x.abs() * self.gate)


def test_minus_zero(sim):
    p, q = twins(NegZero, sim)
    warm(p, q, sim, 6)
    for m in (p, q):
        m.gate = -0.0
    same(p, q, torch.ones(2, 4, device=sim))


class Hidden(nn.Module):
    "layers in a plain list"

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.layers = [nn.Linear(4, 4), nn.Dropout(0.5)]
        for layer in self.layers:
            layer.eval()

    def to(self, d):
        for layer in self.layers:
            layer.to(d)
        return super().to(d)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.w


def test_unregistered_layers_weights_swapped_old_ones_kept(sim):
    p, q = twins(Hidden, sim)
    warm(p, q, sim)
    kept = []
    for m in (p, q):
        w = m.layers[0].weight
        kept.append(w.data)
        w.data = w.data * 2
    same(p, q, torch.ones(2, 4, device=sim))


def test_unregistered_layer_gets_a_hook(sim):
    p, q = twins(Hidden, sim)
    warm(p, q, sim)
    for m in (p, q):
        m.layers[0].register_forward_hook(lambda m, a, o: o * 2)
    same(p, q, torch.ones(2, 4, device=sim))


def test_global_forward_hook(sim):
    p, q = twins(Nest, sim)
    warm(p, q, sim)
    h = torch.nn.modules.module.register_module_forward_hook(
        lambda m, a, o: o * 2 if isinstance(m, nn.Linear) else None
    )
    try:
        same(p, q, torch.ones(2, 4, device=sim))
    finally:
        h.remove()


class Twice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.linear else out


def test_a_function_mode_around_the_call(sim):
    p, q = twins(Nest, sim)
    warm(p, q, sim)
    with Twice():
        same(p, q, torch.ones(2, 4, device=sim))


class Sdpa(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x[None, None]
        return F.scaled_dot_product_attention(x, x, x) * self.w


def test_sdpa_replaced(sim, monkeypatch):
    "F.scaled_dot_product_attention = sageattn, what SageAttention's README tells people to do"
    p, q = twins(Sdpa, sim)
    warm(p, q, sim)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v: v * 2)
    same(p, q, torch.ones(2, 4, device=sim))


class ByMode(Lin):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x):
        return self.layer(x) * (2 if torch.is_grad_enabled() else 1)


def test_forward_reads_the_grad_mode(sim):
    p, q = twins(ByMode, sim)
    for i in range(5):
        x = torch.full((2, 4), float(i), device=sim)
        assert torch.equal(p(x), q(x)), i


class GradOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4), requires_grad=False)
        self.extra = None

    def forward(self, x):
        return x * self.w + self.extra


def test_a_plain_tensor_that_requires_grad(sim):
    p, q = twins(GradOutside, sim)
    for m in (p, q):
        m.extra = torch.ones(4, device=sim, requires_grad=True)
    for i in range(5):
        x = torch.full((2, 4), float(i), device=sim)
        assert p(x).requires_grad == q(x).requires_grad, i


# arguments
@dataclass
class Box:
    x: Any


class MutatesDataclass(Lin):
    def forward(self, box):
        out = self.layer(box.x)
        box.x = None
        return out


def test_a_dataclass_argument_changed(sim):
    p, q = twins(MutatesDataclass, sim)
    for i in range(5):
        x = torch.full((2, 4), float(i), device=sim)
        a, b = Box(x), Box(x)
        with torch.no_grad():
            assert torch.equal(p(a), q(b))
        assert a.x is None and b.x is None, i


class Renames(Lin):
    def forward(self, d):
        out = self.layer(d["a"])
        d["b"] = d.pop("a")
        return out


def test_a_dict_key_renamed(sim):
    p, q = twins(Renames, sim)
    for i in range(5):
        x = torch.full((2, 4), float(i), device=sim)
        a, b = {"a": x}, {"a": x}
        with torch.no_grad():
            assert torch.equal(p(a), q(b))
        assert list(a) == list(b), i


class Empty(Lin):
    def forward(self, x, e):
        return self.layer(x), e.long(), torch.empty(0, 3, device=x.device, dtype=torch.int32)


class TwoEmpty(Lin):
    def forward(self, x):
        return self.layer(x), x[:0].long(), x[:0].int()


def test_two_empty_results_are_recorded(sim):
    p, q = twins(TwoEmpty, sim)
    for i in range(5):
        x = torch.full((2, 4), float(i), device=sim)
        with torch.no_grad():
            a, b = p(x), q(x)
        assert [t.dtype for t in a] == [t.dtype for t in b], i
    assert accel.report(q).parts[0].replays > 0, accel.report(q)


class Table(Lin):
    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        return self.layer(x), self.table


def test_a_returned_table_is_the_table(sim):
    p, q = twins(Table, sim)
    for m in (p, q):
        m.table = torch.ones(3, device=sim)
    for i in range(5):
        x = torch.full((2, 4), float(i), device=sim)
        with torch.no_grad():
            a, b = p(x), q(x)
        assert a[1] is p.table and b[1] is q.table, i


class Inner(Lin):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4))

    def forward(self, x):
        self.cache.add_(1.0)
        return self.layer(x)


def test_an_argument_that_is_a_view_of_a_buffer_the_forward_writes(sim):
    p, q = twins(Inner, sim)
    for i in range(5):
        same(p, q, p.cache if 0 else torch.full((2, 4), float(i), device=sim))
    for _ in range(4):
        with torch.no_grad():
            a, b = p(p.cache[:]), q(q.cache[:])
        assert torch.equal(a, b)


def test_another_thread_draws_host_numbers(sim):
    import random

    class Slow(Lin):
        def forward(self, x):
            t = threading.Thread(target=random.random)
            t.start()
            t.join()
            return self.layer(x)

    p, q = twins(Slow, sim)
    warm(p, q, sim)


def test_another_threads_numbers_are_not_drawn_twice(sim):
    import random

    drawn = []

    class Slow(Lin):
        def forward(self, x):
            t = threading.Thread(target=lambda: drawn.append(random.random()))
            t.start()
            t.join()
            return self.layer(x)

    random.seed(1)
    q = accel.patch(Slow().to(sim), capture="always")
    with torch.no_grad():
        for _i in range(3):
            q(torch.ones(2, 4, device=sim))
    assert len(set(drawn)) == len(drawn)


def test_new_precision_switches(sim):
    p, q = twins(Nest, sim)
    warm(p, q, sim)
    before = torch.backends.cuda.matmul.fp32_precision
    key = accel.guard.Ambient("sim").key
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert accel.guard.Ambient("sim").key != key
        same(p, q, torch.ones(2, 4, device=sim))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_new_precision_switches_of_cudnn(sim):
    before = torch.backends.cudnn.conv.fp32_precision
    p, q = twins(Nest, sim)
    warm(p, q, sim)
    key = accel.guard.Ambient("sim").key
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert accel.guard.Ambient("sim").key != key
        same(p, q, torch.ones(2, 4, device=sim))
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
