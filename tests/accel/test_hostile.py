"""Forwards that do what no recording can hold give what eager gives, and do no harm to later ones.

Every case runs plain and behind a runner, over several calls with fresh values, in `Twin`.
"""

from __future__ import annotations

import contextlib
import functools
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
from tests.accel.twin import Arguments, Draw, Twin

MakeTwin = Callable[..., Twin]


@dataclass
class Output:
    sample: Tensor
    note: str = "fine"


class Opaque:
    def __init__(self, value: float) -> None:
        self.value = value


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
        elif how == "len of nonzero":
            z = y + len(y.nonzero())
        elif how == "equal":
            z = y + 1 if torch.equal(y, y * 1) else y
        else:
            z = y + y.masked_select(y > -1e9).sum()
        return z * 2

    return forward


READS = "item bool float tolist cpu numpy int equal select".split() + ["len of nonzero"]

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
    both.runner._probe = lambda: both.watched.calls
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


def tensors(draw: Draw) -> Any:
    return ([draw(2, 3), draw(2, 3)],)


def pops(xs: list[Tensor]) -> Tensor:
    return xs.pop() * 2 + xs[0]


def pops_from_a_dict(x: Tensor, extras: dict[str, Any]) -> Tensor:
    return x + extras.pop("a") * len(extras)


def puts_in(x: Tensor, extras: dict[str, Any]) -> Tensor:
    extras["seen"] = x * 2
    return x + 1


def counts_in_its_argument(x: Tensor, extras: dict[str, Any]) -> Tensor:
    extras["n"] += 1
    return x * extras["n"]


def one_and(make: Callable[[Draw], Any]) -> Arguments:
    return lambda draw: (draw(2, 3), make(draw))


ARGUMENTS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "popping from a list": (pops, tensors),
    "popping from a dict": (
        pops_from_a_dict,
        one_and(lambda draw: {"a": draw(2, 3), "b": 1}),
    ),
    "putting into a dict": (puts_in, one_and(lambda draw: {"a": 1})),
    "counting in a dict": (counts_in_its_argument, one_and(lambda draw: {"n": 1})),
    "changing one in place": (lambda x: x.add_(1) * 2, lambda draw: (draw(2, 3),)),
    "changing a view in place": (lambda x: x[0].zero_() + x, lambda draw: (draw(2, 3),)),
    "changing one by out=": (
        lambda x, out: torch.add(x, 1, out=out) * 2,
        one_and(lambda draw: draw(2, 3)),
    ),
    "changing one in place late": (
        lambda x: (x + x.sum().item(), x.mul_(2))[0],
        lambda draw: (draw(2, 3),),
    ),
    "resizing one": (lambda x: x.resize_(3, 2) * 2, lambda draw: (draw(2, 3),)),
    "moving one": (lambda x: x.t_() * 2, lambda draw: (draw(2, 3),)),
    "setting one's data": (
        lambda x: (setattr(x, "data", x.data * 2), x + 1)[1],
        lambda draw: (draw(2, 3),),
    ),
    "an opaque object": (
        lambda x, opaque: x * opaque.value,
        one_and(lambda draw: Opaque(draw.seed + 0.5)),
    ),
    "a set": (lambda x, names: x * len(names), one_and(lambda draw: {"a", "b"})),
    "a numpy array": (
        lambda x, array: x * float(array[0]),
        one_and(lambda draw: np.array([draw.seed + 0.5])),
    ),
    "a generator": (
        lambda x, g: x + torch.rand(2, 3, generator=g).to(x.device),
        one_and(lambda draw: torch.Generator().manual_seed(draw.seed)),
    ),
    "a function": (lambda x, f: f(x), one_and(lambda draw: torch.nn.functional.gelu)),
    "a partial": (lambda x, f: f(x), one_and(lambda draw: functools.partial(torch.add, 2))),
    "a dataclass": (
        lambda x, extra: Output(extra.sample + x, extra.note),
        one_and(lambda draw: Output(draw(2, 3), "given")),
    ),
    "a small host tensor": (
        lambda x, host: x * host.sum().item(),
        one_and(lambda draw: torch.tensor([1.0, 2.0])),
    ),
    "a small host tensor that changes": (
        lambda x, host: x * host.to(x.device),
        one_and(lambda draw: draw.host(3)),
    ),
    "a host tensor changed in place": (
        lambda x, host: x * host.add_(1).to(x.device),
        one_and(lambda draw: torch.ones(3)),
    ),
    "a large host tensor": (
        lambda x, host: x + host.to(x.device).sum(),
        one_and(lambda draw: draw.host(10, 10)),
    ),
    "a float timestep": (lambda x, t: x * t, one_and(lambda draw: draw.seed / 10)),
    "an int timestep": (lambda x, t: x * t, one_and(lambda draw: draw.seed)),
    "a tensor timestep": (
        lambda x, t: x * t,
        one_and(lambda draw: torch.arange(9.0).to(draw.device)[draw.seed]),
    ),
    "an expanded timestep": (
        lambda x, t: x * t[:, None],
        one_and(lambda draw: torch.arange(9.0).to(draw.device)[draw.seed].expand(2)),
    ),
    "one tensor twice": (lambda x, y: x.add(1) * y, lambda draw: (x := draw(2, 3), x)),
    "one tensor twice, changed": (
        lambda x, y: (x.add_(1), y * 2)[1],
        lambda draw: (x := draw(2, 3), x),
    ),
    "overlapping views": (
        lambda x, y: x[:, 0] + y,
        lambda draw: (x := draw(2, 3), x[:, 1]),
    ),
    "overlapping views, changed": (
        lambda x, y: (y.add_(1), x * 2)[1],
        lambda draw: (x := draw(2, 3), x[:, 1]),
    ),
    "a tensor that overlaps itself": (
        lambda x: x * 2,
        lambda draw: (draw(8).as_strided((3, 4), (2, 1)),),
    ),
    "a transposed tensor": (lambda x: x.view(3, 2).t() + x.t(), lambda draw: (draw(3, 2),)),
    "an unaligned tensor": (lambda x: x @ x, lambda draw: (draw(17)[1:].view(4, 4),)),
    "an empty tensor": (lambda x: x.sum() + 1, lambda draw: (draw(0, 3),)),
    "a scalar tensor": (lambda x: x + 1, lambda draw: (draw(),)),
    "a mask": (lambda x, m: x.masked_fill(m, 0.0), one_and(lambda draw: draw(2, 3) > 0)),
    "a mask to index with": (lambda x, m: x[m], one_and(lambda draw: draw(2, 3) > 0)),
    "a mask to write with": (
        lambda x, m: x.clone().masked_scatter_(m, x * 2),
        one_and(lambda draw: draw(2, 3) > 0),
    ),
    "a slice": (lambda x, s: x[:, s], one_and(lambda draw: slice(0, 2))),
    "complex numbers": (
        lambda x: x * 2j,
        lambda draw: (torch.complex(draw(2, 3), draw(2, 3)),),
    ),
    "a conjugate": (lambda x: x * 2, lambda draw: (torch.complex(draw(2), draw(2)).conj(),)),
    "keywords": (lambda *, a, b=None: a + 1, lambda draw: {"a": draw(2, 3), "b": None}),
    "nothing": (lambda: torch.zeros(3), lambda draw: ()),
    "a sparse tensor": (
        lambda x: x.to_dense() * 2,
        lambda draw: (torch.eye(3).to_sparse(),),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, twin: MakeTwin) -> None:
    function, arguments = ARGUMENTS[name]
    both = twin(lambda: function)
    for seed in (1, 1, 1, 2, 3, 4, 5, 6, 1, 2):
        both(seed, arguments)


class Lazy(nn.Module):
    """Fills a cache at its first call with a size."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(float(x.shape[1]), device=x.device) * 2
        return x * self.tables[x.shape[1]]


class KeepsLast(nn.Module):
    """Keeps what it computed last, as step caches do."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if self.last is not None:
            y = y + self.last
        self.last = y
        return y + 1


class KeepsArgument(nn.Module):
    """Keeps its argument and uses it in the next call."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last is None else x + self.last
        self.last = x
        return y * 2


class KeepsUploaded(nn.Module):
    """Replaces a table that it uploads in every call and keeps it."""

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return x * self.table


class KeepsRead(nn.Module):
    """Keeps what a break brought, for the next call."""

    count: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.count if self.count is not None else x.new_zeros(1, dtype=torch.long)
        self.count = (x > 0).nonzero()[:1, 0]
        return x * 2 + before


class Accumulates(nn.Module):
    """Adds to a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x * self.total


class AccumulatesThenReads(Accumulates):
    """A host read after the change: nothing that a guard could take back."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y.abs().sum().item()


class SwapsBuffer(Accumulates):
    """Puts a new tensor in its buffer's place."""

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum(0)
        return x * self.total


class WritesWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


class ReturnsWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.weight, self.bias[1:], super().forward(x)


class SetsAnAttribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.shape = tuple(x.shape)
        return x * self.shape[0]


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3), nn.AlphaDropout(0.2))


MODULES: list[Callable[[], nn.Module]] = [
    Lazy,
    KeepsLast,
    KeepsArgument,
    KeepsUploaded,
    KeepsRead,
    Accumulates,
    AccumulatesThenReads,
    SwapsBuffer,
    WritesWeight,
    ReturnsWeight,
    SetsAnAttribute,
    batch_norm,
    dropout,
]


@pytest.mark.parametrize("build", MODULES)
def test_a_module_that(build: Callable[[], nn.Module], twin: MakeTwin) -> None:
    both = twin(build)
    for seed in (1, 2, 3, 4, 1, 1, 5, 6):
        both(seed)


def test_a_lazy_cache_over_several_sizes(twin: MakeTwin) -> None:
    both = twin(Lazy)
    for size in (3, 3, 4, 3, 4, 4, 5, 3, 5, 5, 4, 3):
        both(size, lambda draw: (draw(2, draw.seed),))
    assert both.report.captures == 3


def bounded_table(entries: int) -> Callable[[], Callable[[Tensor], Tensor]]:
    def build() -> Callable[[Tensor], Tensor]:
        @functools.lru_cache(entries)
        def table(size: int, device: torch.device) -> Tensor:
            return torch.arange(float(size)).to(device) * 2

        return lambda x: x * table(x.shape[1], x.device)

    return build


@pytest.mark.parametrize("entries", [1, 8])
def test_tables_in_a_bounded_cache(entries: int, twin: MakeTwin) -> None:
    both = twin(bounded_table(entries))
    for size in (3, 3, 4, 3, 4, 4, 5, 3, 5, 5, 4, 3, 3, 4):
        both(size, lambda draw: (draw(2, draw.seed),))
        scribbled = torch.full((4096,), 7.0, device=both._device)
        del scribbled


@pytest.mark.parametrize("turn", ["autocast", "default dtype", "no tf32", "deterministic"])
def test_switches_turned_between_calls(turn: str, twin: MakeTwin) -> None:
    both = twin(lambda: nn.Linear(3, 3))

    @contextlib.contextmanager
    def turned() -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if turn == "autocast":
                kind = both._device.type
                stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16))
            elif turn == "default dtype":
                torch.set_default_dtype(torch.float64)
                stack.callback(torch.set_default_dtype, torch.float32)
            elif turn == "no tf32":
                before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("medium")
                stack.callback(torch.set_float32_matmul_precision, before)
            else:
                torch.use_deterministic_algorithms(True)
                stack.callback(torch.use_deterministic_algorithms, False)
            yield

    for seed, context in enumerate([torch.no_grad, torch.no_grad, turned, turned] * 3):
        both.context = context
        both(seed)
    assert both.report.captures == 2
    assert both.report.replays == 8


@pytest.mark.parametrize("values", [4, 9])
def test_more_than_four_values_at_one_position(values: int, twin: MakeTwin) -> None:
    both = twin(lambda: lambda x, scale: x * scale)
    for _ in range(3):
        for value in range(values):
            both(value, lambda draw: {"x": draw(2, 3), "scale": draw.seed / 4})
    if values > 4:
        assert any("scale has had more than 4 values" in r for r in both.report.reasons)
        assert both.report.captures == 4
    else:
        assert both.report.captures == 4
        assert both.report.eager_calls == 4


def test_a_count_that_changes_misses_then_gets_its_own_recording(twin: MakeTwin) -> None:
    def keep_positive(x: Tensor) -> Tensor:
        return (x[x > 0] * 2).sum() + x

    both = twin(lambda: keep_positive)

    def with_positives(draw: Draw) -> Any:
        x = draw(8).abs()
        x[draw.seed % 3 :] *= -1
        return (x,)

    for seed in [0, 0, 0, 1, 1, 1, 2, 2, 2] + [0, 1, 2] * 3:
        both(seed, with_positives)
    assert both.report.captures == 3
    assert both.report.guard_misses > 0
    assert both.report.replays >= 10


def test_a_count_that_is_never_the_same_goes_eager_with_the_reason(twin: MakeTwin) -> None:
    both = twin(lambda: lambda x: x * x.sum().item())
    for seed in range(14):
        both(seed)
    assert both.report.declined is not None
    assert "no two calls agree" in both.report.declined


def test_inference_tensors_as_arguments(twin: MakeTwin) -> None:
    both = twin(lambda: nn.Linear(3, 3))
    both.context = torch.inference_mode

    def inference(draw: Draw) -> Any:
        with torch.inference_mode():
            return (draw(2, 3),)

    for seed in range(5):
        both(seed, inference)
    assert (both.report.captures, both.report.replays) == (1, 3)
