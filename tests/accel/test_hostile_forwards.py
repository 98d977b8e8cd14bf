"""Forwards that do what no recording can hold give what eager gives, bit for bit.

Every case runs plain and behind a runner, over several calls with fresh values, in `Twin`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.backend import backend_for
from tests.accel.twin import Twin

MakeTwin = Callable[..., Twin]


@dataclass
class Output:
    sample: Tensor
    note: str = "fine"


class Shelf(dict[str, Any]):
    """A dict that can also be read as attributes."""

    __getattr__ = dict.__getitem__


def boxed(x: Tensor) -> Any:
    return {"a": [x + 1, (x * 2, None)], "b": Output(x - 1, "kept"), "c": 3}


def views_of_one_storage(x: Tensor) -> Any:
    y = x * 2
    return y, y[0], y.t(), y[:, 1:]


def raises_at_times(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum().item() > 0:
        raise ValueError("half-way")
    return y + 1


def swallows_its_own_error(x: Tensor) -> Tensor:
    y = x + 1
    with contextlib.suppress(RuntimeError):
        y @ x.new_ones(7, 7)  # shapes do not fit
    return y * 2


def drops_out(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True) + torch.rand_like(x)


def scatters(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 7.0
    y[x < -1] = x[x < -1] * 3
    return y


def builds_constants(x: Tensor) -> Tensor:
    table = torch.tensor([[1.0, 2.0, 3.0]], device=x.device)
    bias = torch.arange(3.0).to(x.device)
    order = torch.tensor([2, 0, 1])
    scale = torch.as_tensor(np.float32(1.5)).to(x.device)
    return (x * table + bias)[:, order] * scale + x.new_tensor([1.0])


def changes_its_constant(x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
    table += x[0]
    table.mul_(2)
    return table + x


def autocasts_inside(x: Tensor) -> Tensor:
    y = x @ x.t()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        z = x @ x.t()
        z = z + float(z.float().sum().item() > 1e9)
        w = z.float() @ x
    return y @ x + w.float()


def default_dtype_and_device(x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        wide = torch.ones(3, device=x.device)
    finally:
        torch.set_default_dtype(before)
    with torch.device(x.device):
        return x + wide + torch.arange(3.0)


def reads_through(how: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y = x * 3
        if how == "item":
            z = y * y.abs().sum().item()
        elif how == "bool":
            z = y + 1 if (y > 100).any() else y - 1
        elif how == "float":
            z = y + float(y[0, 0])
        elif how == "tolist":
            z = y + sum(y[0].tolist())
        elif how == "cpu":
            z = y + y.cpu().abs().max().to(y.device)
        elif how == "numpy":
            z = y + float(y.cpu().numpy().mean())
        elif how == "int":
            z = y[: int((y > -1e9).sum()) // 3]
        elif how == "nonzero":
            z = y + len(y.nonzero())
        elif how == "equal":
            z = y + 1 if torch.equal(y, y * 1) else y
        else:
            z = y + y.masked_select(y > -1e9).sum()
        return z * 2

    return forward


READS = ["item", "bool", "float", "tolist", "cpu", "numpy", "int", "equal", "select", "nonzero"]

FORWARDS: dict[str, Callable[[Tensor], Any]] = {
    **{f"reads by {how}": reads_through(how) for how in READS},
    "nested containers": boxed,
    "a dataclass": lambda x: Output(x + 1),
    "a dict": lambda x: {"sample": x + 1, "scale": 2.0},
    "a dict with attributes": lambda x: Shelf(sample=x * 2),
    "None": lambda x: None,
    "a number": lambda x: x.shape[0] * 2,
    "the input": lambda x: x,
    "views of the input": lambda x: (x[0], x.t(), x[:, 1:], x.view(-1)),
    "the same tensor twice": lambda x: (y := x + 1, y),
    "views of one storage": views_of_one_storage,
    "an expanded tensor": lambda x: (x[:1] * 2).expand(4, 3),
    "a real part": lambda x: torch.complex(x, x * 2).real,
    "a complex tensor": lambda x: torch.complex(x, x * 2) * 2j,
    "a conjugate": lambda x: torch.complex(x, x * 2).conj(),
    "an empty tensor": lambda x: (x[:0] * 2, x + 1),
    "a scalar tensor": lambda x: x.sum(),
    "a mask": lambda x: x > 0,
    "integers and sorting": lambda x: torch.sort((x * 10).long(), dim=1),
    "a channels-last picture": lambda x: x.view(1, 2, 3, 1).to(memory_format=torch.channels_last),
    "an error of its own": raises_at_times,
    "an error that it catches": swallows_its_own_error,
    "dropout": drops_out,
    "masked writes": scatters,
    "constants": builds_constants,
    "a constant changed in place": changes_its_constant,
    "autocast inside": autocasts_inside,
    "default dtype and device": default_dtype_and_device,
    "mask indexing": lambda x: x[x > -1e9] * 2,
    "where": lambda x: torch.stack(torch.where(x > -1e9)),
    "unique": lambda x: torch.unique((x > -1e9).long(), return_inverse=True)[1] + x,
    "bincount": lambda x: (x > -1e9).long().flatten().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > -1e9).long() * 2, dim=0),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1.0),
    "linear algebra": lambda x: torch.linalg.inv(x @ x.t() + torch.eye(2, device=x.device)),
    "a host draw": lambda x: x + torch.randn(2, 3).to(x.device),
    "a python draw": lambda x: x * random.random(),
    "a numpy draw": lambda x: x * float(np.random.rand()),
    "a generator of its own": lambda x: (
        x + torch.rand(2, 3, generator=torch.Generator().manual_seed(3)).to(x.device)
    ),
    "nothing on the device": lambda x: torch.arange(3.0) * 2,
    "a host result": lambda x: (x * 2).cpu(),
    "a grad mode of its own": lambda x: torch.enable_grad()(lambda: x * 2)(),
    "inference mode inside": torch.inference_mode()(lambda x: (x * 2 + 1).clone()),
    "copies to the host and back": lambda x: (x * 2).cpu().add(1).to(x.device) * 3,
    "float64": lambda x: x.double() / 3,
    "NaN and infinity": lambda x: torch.log(x) / 0,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_with(name: str, twin: MakeTwin) -> None:
    both = twin(lambda: FORWARDS[name])
    for seed in (1, 1, 1, 2, 3, 2, 1, 4):
        both(seed)


def test_a_python_counter_is_not_seen_and_needs_a_probe(twin: MakeTwin) -> None:
    """What a plain function counts in a closure nobody can watch; a module's attribute can be."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    both = twin(Counts)
    seen = both.runner._probe
    both.runner._probe = lambda: (seen(), both.watched.calls)
    for seed in range(6):
        both(seed)
    assert both.report.captures == 0
    assert both.report.declined == "the forward changes its own state"


def side_stream(x: Tensor) -> Tensor:
    backend: Any = backend_for(x.device)
    here, side = backend.current_stream(x.device), backend.new_stream(x.device)
    y = x * 2
    backend.wait_stream(side, here)
    with backend.on_stream(side):
        z = y + 1
    backend.wait_stream(here, side)
    return z * y


def test_a_forward_that_forks_a_side_stream(twin: MakeTwin, device: torch.device) -> None:
    if device.type == "sim":
        pytest.skip("the simulated device does not carry a recording over to a forked stream")
    both = twin(lambda: side_stream)
    for seed in range(5):
        both(seed)


def writes_what_a_break_brought(x: Tensor) -> Tensor:
    kept = x[x > -1e9]
    kept *= 2
    kept[0] = 1.0
    return x + kept.sum() * x.sum().item()  # a guard, after no effect at all


def test_a_breaks_result_may_be_written(twin: MakeTwin) -> None:
    both = twin(lambda: writes_what_a_break_brought)
    for seed in (1, 1, 1, 1):
        both(seed)
    assert (both.report.captures, both.report.replays, both.report.declined) == (1, 2, None)


def catches_what_it_can(x: Tensor) -> Tensor:
    try:
        noise = torch.rand(x.shape[-1]).to(x.device)
    except Exception:
        noise = torch.zeros(x.shape[-1], device=x.device)
    return x + noise


def test_a_forward_that_catches_a_refusal_is_refused_all_the_same(twin: MakeTwin) -> None:
    both = twin(lambda: catches_what_it_can)
    for seed in range(5):
        both(seed)
    assert both.report.captures == 0
    assert both.report.declined == "the forward draws random numbers on the host"
