"""What is recorded as one op, past the dispatch mode, and what stand-ins leave as it is."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from accel.backend import backend_for
from accel.breaks import GuardMiss
from accel.graph import ARGUMENT, BreakableGraph, Refused, capture
from accel.memory import Pool
from accel.record_stand_ins import _LAYERS, _WHOLE, visible_host_data
from tests.accel.same import assert_same
from tests.accel.test_record import record


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tests of other files, in this process."""
    monkeypatch.setattr(torch._dynamo.utils, "counters", defaultdict(Counter))


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(6.0).view(2, 3).to(device)


def three_ways(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    linear = _LAYERS[0].F.linear
    each = torch.vmap(linear, in_dims=(0, None, None))(x, weight, bias)
    return linear(x, weight, bias), linear(x[:, None], weight=weight), each


WHOLE_FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "conv2d": lambda x: _LAYERS[1].F.conv2d(x, x[:1], x[0, 0, 0, :1], 1, padding=(1, 0)),
    "group_norm": lambda x: functional.group_norm(x, 1, x[0, :, 0, 0], x[0, :, 0, 1], 1e-3),
    "layer_norm": lambda x: functional.layer_norm(x, (4,), x[0, 0, 0], None, 1e-3),
    "rms_norm": lambda x: functional.rms_norm(x, (4,), weight=x[0, 0, 0]),
    "silu": lambda x: functional.silu(x, inplace=False),
    "views": lambda x: x.view(2, -1).reshape((4, 4)).transpose(0, 1).permute(1, 0).unsqueeze(0),
    "chunks": lambda x: x.chunk(2, dim=-1),
    "more views": lambda x: (x.squeeze(0)[..., None, 1:-1, 0].expand(3, -1, -1, -1), x[0, 1]),
    "complex ones": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 2, 2, 2)) * 2j),
    "a norm in float32": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6),
    "other types and layouts": lambda x: (x.to(torch.float64), x.flatten(1).t().contiguous()),
    "several in one": lambda x: torch.cat([x, torch.stack((x[0], -x[0].tanh()))[:1]], dim=-1),
    "sums and products": lambda x: ((x + 1.5) * x - x[0]) / 3 + torch.tensor(2.0) * (1 - x) / 7,
}
"""Of a tensor of 1 x 2 x 2 x 4."""


WRITING: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: functional.silu(x, inplace=True),
    "a sum in place": lambda x: x.__iadd__(1),
    "in place, by position": lambda x: functional.silu(x, True),
    "a layer's result": lambda x: _LAYERS[0].F.linear(x * 1, x.new_ones(3, 3), out=x),
    "an activation's result": lambda x: torch._C._nn.silu(x * 1, out=x),
    "through a view": lambda x: x.view(-1).unsqueeze(0).chunk(2, 1)[1].add_(1),
}


UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "as a list": lambda table: table[1:].tolist()[0],
    "as data": lambda table: torch.tensor([table[1]]).item(),
    "as text": lambda table: len(str(table[1:])),
}
"""Reads of a host tensor that no dispatch mode sees."""


OVERRIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda x: functional.linear(x, x),
    "silu": functional.silu,
    "layer_norm": lambda x: functional.layer_norm(x, (3,)),
    "view": lambda x: x.view(-1),
    "an item": lambda x: x[0],
    "several in one": lambda x: torch.cat((x, x)),
    "a type": lambda x: x.to(torch.float64),
    "a power": lambda x: x.pow(2),
    "operators": lambda x: (1 + -x) * (2 * x) - (x + x) / (x - 7),
}


class _Listening(Tensor):
    """Notes the functions of torch that it is given to."""

    told: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.told.append(func)
        return super().__torch_function__(func, kinds, args, kwargs or {})

    @classmethod
    def hear(cls, function: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, list[Any]]:
        """The function's result and what it led to."""
        cls.told.clear()
        y = function(x.as_subclass(cls)).as_subclass(Tensor)
        return y, [func for func in cls.told if func.__name__ not in ("as_subclass", "__get__")]


class _Doubling(TorchFunctionMode):
    """Doubles a layer's result, which it reads."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y * 2 if func is functional.linear and y.sum().item() else y


class TestWholeFunctions:
    """What most ops of most models are is one op each, past the dispatch mode."""

    @pytest.fixture
    def image(self, device: torch.device) -> Tensor:
        return torch.linspace(-1, 1, 16).view(1, 2, 2, 4).to(device)

    @pytest.mark.parametrize("name", WHOLE_FUNCTIONS)
    def test_replays_as_it_runs(self, name: str, image: Tensor) -> None:
        function = WHOLE_FUNCTIONS[name]
        graph, y = record(function, image)
        assert (graph.breaks, graph.segments) == ([], 1)
        image.mul_(-0.5)
        graph.replay()
        assert_same(y, function(image))

    @pytest.mark.parametrize(("owner", "name"), _WHOLE)
    def test_each_is_known_to_torch_and_put_back(self, owner: Any, name: str) -> None:
        before, held = getattr(owner, name), name in vars(owner)
        with visible_host_data(lambda owner, name: lambda *args, **kwargs: before):
            assert getattr(owner, name)() is before
        assert getattr(owner, name) is before
        assert (name in vars(owner)) == held

    @pytest.mark.parametrize("name", WRITING)
    def test_what_is_written_in_place_is_noticed(self, name: str, x: Tensor) -> None:
        before = x.clone()
        origins = {backend_for(x.device).storage(x).data_ptr(): ARGUMENT}
        with (
            pytest.raises(Refused, match="changes an argument in place"),
            capture(BreakableGraph(Pool(x.device)), origins=origins),
        ):
            WRITING[name](x)
        assert_same(x, before)

    def test_views_are_nothing_to_record(self, x: Tensor) -> None:
        graph, y = record(lambda x: x.view(3, 2).transpose(0, 1).unsqueeze(0).chunk(2, 2)[1] * 2, x)
        assert graph.operations == 1
        assert_same(y, x.view(3, 2).t()[None, :, 2:] * 2)

    @pytest.mark.parametrize("where", ["beside", "on the host"])
    def test_what_views_are_of_is_held_when_one_is_read(self, where: str, x: Tensor) -> None:
        """From the second half of a table that no recorded work made."""
        table = torch.arange(12.0)
        tables = [table if where == "on the host" else table.to(x.device)]

        def half(x: Tensor) -> Tensor:
            return x + tables[0].chunk(2)[1].view(2, 3).unsqueeze(0).to(x.device)

        with capture(graph := BreakableGraph(Pool(x.device))) as recording:
            y = half(x)
        assert recording.held.stale() is None
        x.mul_(2)
        graph.replay()
        assert_same(y, half(x))
        tables.clear()
        del table
        assert "the model has replaced a" in str(recording.held.stale())

    @pytest.mark.parametrize("read", UNSEEN)
    def test_what_no_mode_sees_read_through_a_view_is_watched(self, read: str, x: Tensor) -> None:
        table = torch.arange(4.0)
        with capture(BreakableGraph(Pool(x.device))) as recording:
            x * UNSEEN[read](table)
        assert recording.held.stale() is None
        table.mul_(2)
        assert recording.held.stale() == "a host tensor that the recording reads has changed"

    def test_what_a_kernel_reads_through_a_view_is_held(self, x: Tensor) -> None:
        """One that torch does not launch: a mode does not see it."""
        tables = [x * 2]
        with capture(BreakableGraph(Pool(x.device))) as recording:
            table = tables[0][1:]
            with torch._C._DisableTorchDispatch():
                _ = torch.add(x, table)
        del table
        assert recording.held.stale() is None
        tables.clear()
        assert recording.held.stale() == "the model has replaced a tensor that the recording reads"

    def test_host_tensors_stay_constants(self, x: Tensor) -> None:
        graph, y = record(lambda x: x + torch.arange(6.0).view(2, 3).unsqueeze(0).to(x.device), x)
        x.zero_()
        graph.replay()
        assert y.tolist() == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]

    def test_a_size_that_lies_on_the_host_is_watched(self, x: Tensor) -> None:
        size = torch.tensor(3)
        with capture(BreakableGraph(Pool(x.device))) as recording:
            x.view((1, size, -1))
        size.fill_(2)
        assert recording.held.stale() == "a host tensor that the recording reads has changed"

    @pytest.mark.parametrize("item", [lambda x, n: x[:n], lambda x, n: x[(slice(n),)]])
    def test_a_bound_that_lies_on_the_device_is_guarded(self, item: Any, x: Tensor) -> None:
        rows = torch.full((), 1, device=x.device)
        graph, y = record(lambda x: item(x, rows) + 1, x)
        assert [b.guarded for b in graph.breaks] == [True]
        assert_same(y, x[:1] + 1)
        rows.fill_(2)
        with pytest.raises(GuardMiss):
            graph.replay()

    @pytest.mark.parametrize(
        "index", [[1, 0], (slice(None), [1, 0]), True, (0, torch.tensor([1])), (None, 1)]
    )
    def test_an_index_that_computes_is_recorded(self, index: Any, x: Tensor) -> None:
        graph, y = record(lambda x: x[index] + 1, x)
        assert graph.breaks == []
        x.mul_(2)
        graph.replay()
        assert_same(y, x[index] + 1)

    def test_what_lies_on_the_host_among_several_is_a_constant(self, x: Tensor) -> None:
        def joined(x: Tensor) -> Tensor:
            table = torch.arange(3.0)[None].to(x.device)
            return torch.cat([x, table])

        graph, y = record(joined, x)
        x.mul_(2)
        graph.replay()
        assert_same(y, joined(x))

    def test_a_move_to_the_host_is_guarded(self, x: Tensor) -> None:
        graph, y = record(lambda x: x * float(x.to("cpu").sum()), x)
        assert [b.guarded for b in graph.breaks] == [True]
        assert_same(y, x * 15)

    @pytest.mark.parametrize("dims", [lambda n: n, lambda n: (n,)])
    def test_a_dimension_that_lies_on_the_device_is_guarded(self, dims: Any, x: Tensor) -> None:
        first = torch.zeros((), dtype=torch.int64, device=x.device)
        graph, y = record(lambda x: x.mean(dims(first)) + 1, x)
        assert [b.guarded for b in graph.breaks] == [True]
        assert_same(y, x.mean(0) + 1)

    @pytest.mark.parametrize("shaped", [lambda x, n: x.view(n, 2), lambda x, n: x.view((n, 2))])
    def test_a_size_that_lies_on_the_device_is_guarded(self, shaped: Any, x: Tensor) -> None:
        rows = torch.full((), 3, device=x.device)
        graph, y = record(lambda x: shaped(x, rows) + 1, x)
        assert [b.guarded for b in graph.breaks] == [True]
        assert_same(y, x.view(3, 2) + 1)
        rows.fill_(2)
        with pytest.raises(GuardMiss):
            graph.replay()

    def test_what_another_put_in_place_of_one_is_seen(
        self, x: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may do anything: here it reads a value, and a table of its own."""
        original, tables = functional.linear, [x.new_ones(2)]

        def theirs(x: Tensor, weight: Tensor) -> Tensor:
            return original(x, weight) * x[0, 0].item() + tables[0]

        monkeypatch.setattr(functional, "linear", theirs)
        with capture(graph := BreakableGraph(Pool(x.device))) as recording:
            _LAYERS[0].F.linear(x, x)
        assert [b.guarded for b in graph.breaks] == [True]
        tables.clear()
        assert recording.held.stale() == "the model has replaced a tensor that the recording reads"

    def test_who_keeps_one_keeps_no_recording(self, x: Tensor) -> None:
        with capture(BreakableGraph(Pool(x.device))) as recording:
            kept, view = _LAYERS[0].F.linear, Tensor.view
            assert kept is not functional.linear
        weak = weakref.ref(recording)
        del recording
        gc.collect()
        assert weak() is None
        assert_same(kept(x, x), x @ x.t())
        graph, y = record(lambda x: view(kept(x, x), -1), x)
        x.add_(1)
        graph.replay()
        assert_same(y, (x @ x.t()).view(-1))

    def test_what_others_keep_or_compare_stays_itself(self, x: Tensor) -> None:
        names = ("linear", "gelu", "silu", "layer_norm", "scaled_dot_product_attention")
        before = [getattr(functional, name) for name in names]
        with capture(BreakableGraph(Pool(x.device))):
            assert [getattr(functional, name) for name in names] == before

    @pytest.mark.parametrize("name", OVERRIDDEN)
    def test_a_subclass_is_told_of_the_original(self, name: str, x: Tensor) -> None:
        _, (_, told) = record(lambda x: _Listening.hear(OVERRIDDEN[name], x * 1), x)
        assert told == _Listening.hear(OVERRIDDEN[name], x * 1)[1] != []

    def test_a_subclass_as_index_is_told_of_the_original(self, x: Tensor) -> None:
        rows = torch.tensor([1, 0], device=x.device)
        _, (y, told) = record(lambda x: _Listening.hear(lambda rows: x[rows] + 1, rows), x)
        assert told == _Listening.hear(lambda rows: x[rows] + 1, rows)[1] != []
        assert_same(y, x[rows] + 1)

    def test_a_function_mode_in_the_forward_is_seen(self, x: Tensor) -> None:
        def forward(x: Tensor) -> Tensor:
            with _Doubling():
                return _LAYERS[0].F.linear(x, x)

        graph, y = record(forward, x)
        assert [b.guarded for b in graph.breaks] == [True]
        assert_same(y, x @ x.t() * 2)


class TestLinearLayers:
    """Torch makes up to four ops of one."""

    @pytest.fixture
    def layer(self, x: Tensor) -> torch.nn.Linear:
        return torch.nn.Linear(3, 2, device=x.device).requires_grad_(False)

    def test_they_are_one_op_each(self, x: Tensor, layer: torch.nn.Linear) -> None:
        graph, y = record(lambda x: layer(x[None]), x)
        assert graph.operations == 1  # `None` adds a dimension, nothing else
        x.mul_(2)
        graph.replay()
        assert_same(y, layer(x[None]))

    def test_however_they_are_called(self, x: Tensor) -> None:
        layer = x.clone(), x[:, 0].clone()
        graph, results = record(three_ways, x, *layer)
        x.mul_(2)
        graph.replay()
        assert_same(results, three_ways(x, *layer))

    def test_other_threads_have_the_original(self, x: Tensor, layer: torch.nn.Linear) -> None:
        graph = BreakableGraph(Pool(x.device))
        other, two = torch.nn.Linear(3, 3), torch.ones(2, 3)
        with capture(graph), ThreadPoolExecutor(1) as others:
            y = layer(x)
            theirs = others.submit(other, two).result()
        assert graph.operations == 1
        assert_same((y, theirs), (layer(x), other(two)))

    def test_the_function_itself_stays_what_it_is(self, x: Tensor) -> None:
        original = functional.linear
        with capture(BreakableGraph(Pool(x.device))):
            assert functional.linear is original
        assert [layers.F for layers in _LAYERS] == [functional, functional]

    def test_what_the_forward_puts_in_its_place_is_used(
        self, x: Tensor, layer: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forward(x: Tensor) -> Tensor:
            with monkeypatch.context() as patches:
                patches.setattr(functional, "linear", lambda x, *_: x + 1)
                return layer(x)

        _, y = record(forward, x)
        assert_same(y, x + 1)

    def test_what_was_compiled_meets_the_original(
        self, x: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = functional.linear
        monkeypatch.setitem(torch._dynamo.utils.counters, "frames", Counter(total=1))
        met: list[Any] = []
        record(lambda x: met.append(_LAYERS[0].F.linear), x)
        assert met == [original]
