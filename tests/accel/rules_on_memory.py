"""L1 to L6: what each does for the memory that recordings use, and how to switch it off."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from accel.backend import backend_for
from accel.breaks import Break
from accel.graph import BreakableGraph, capture, eager_on_graph
from accel.guard import Held, WeightGuard
from accel.memory import Pool
from accel.record import OpRecorder
from accel.runner import GraphRunner
from accel.signature import map_tree
from tests.accel.common import scribble
from tests.accel.rules import Rule, new_runner, replaced, wrapped


@torch.no_grad()
def a_table_that_a_break_returned_dies(device: torch.device) -> None:
    shelf = {"table": torch.full((64,), 5.0, device=device)}

    @eager_on_graph
    def table() -> Tensor:
        return shelf.pop("table", torch.full((64,), 7.0, device=device))

    graph = BreakableGraph(Pool(device))
    with capture(graph):
        y = table() * 10
    scribble(device, (64,))
    graph.replay()
    assert y.tolist() == [70.0] * 64, "the break's result did not reach the next segment"


def not_delivered(deliver: Any) -> Any:
    """Without a buffer of its own the graph reads where the first result was."""

    def into_nothing(self: Break, new: Any, old: Tensor) -> None:
        if old.is_cpu:
            deliver(self, new, old)

    return into_nothing


@torch.no_grad()
def a_break_is_given_a_tensor_from_outside(device: torch.device) -> None:
    @eager_on_graph
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    graph = BreakableGraph(Pool(device))
    x, outside = torch.ones(64, device=device), [torch.full((64,), 5.0, device=device)]
    with capture(graph):
        y = add(x, outside[0]) * 2
    outside.clear()
    scribble(device, (64,))
    graph.replay()
    assert y.tolist() == [12.0] * 64, "freed memory was read"


def all_held_weakly(first_run: Any) -> Any:
    def run(self: Break) -> Any:
        result, alias = first_run(self), self._pool.backend.alias
        self._args = map_tree(lambda x: alias(x) if isinstance(x, Tensor) else x, self._args)
        return result

    return run


@torch.no_grad()
def a_constant_was_uploaded(device: torch.device) -> None:
    runner = new_runner(lambda x: x * torch.tensor([1.0, 2.0, 3.0], device=x.device), device)
    for turn in range(4):
        scribble(device, (3,))
        y = runner(torch.full((3,), float(turn), device=device))
        assert y.tolist() == [turn * 1.0, turn * 2.0, turn * 3.0], "freed memory was read"
    assert runner.report.replays == 2


def constants_forgotten(constant: Any) -> Any:
    def upload(self: OpRecorder, *args: Any, **kwargs: Any) -> Any:
        made = constant(self, *args, **kwargs)
        self._graph.held.pop()
        return made

    return upload


@torch.no_grad()
def a_table_is_replaced(device: torch.device) -> None:
    shelf = {"table": torch.zeros(4, device=device)}
    runner = new_runner(lambda x: x + shelf["table"], device)
    for turn in range(5):
        if turn > 2:
            shelf["table"] = torch.full((4,), float(turn), device=device)
        y = runner(torch.ones(4, device=device))
        assert y.tolist() == [1.0 + turn * (turn > 2)] * 4, "the old table was read"


@torch.no_grad()
def a_host_tensor_changes(device: torch.device) -> None:
    factors = torch.tensor([1.0, 2.0])
    runner = new_runner(lambda x: x * factors.to(x.device), device)
    for turn in range(6):
        factors[0] = float(turn // 3)
        y = runner(torch.ones(2, device=device))
        assert y.tolist() == [float(turn // 3), 2.0], "the old values were read"
    assert runner.report.replays > 0


def linear(device: torch.device) -> tuple[nn.Linear, GraphRunner, Tensor]:
    """A layer recorded and replayed."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).to(device).requires_grad_(False)
    runner, x = new_runner(layer, device, module=layer), torch.ones(4, 64, device=device)
    for _ in range(3):
        runner(x)
    assert runner.report.replays == 1
    return layer, runner, x


def weights_may_leave(device: torch.device) -> None:
    layer, runner, _ = linear(device)
    weight = weakref.ref(layer.weight.untyped_storage())
    layer.weight.data = layer.weight.data.clone()
    gc.collect()
    assert weight() is None, "the recording keeps a weight alive"
    assert runner.report.captures == 1


def weights_unknown(take_stock: Any) -> Any:
    def take(self: WeightGuard) -> None:
        take_stock(self)
        self.storages = set()

    return take


def weights_die(device: torch.device) -> None:
    layer, runner, x = linear(device)
    (old,) = runner.report.graphs
    layer.weight.data = layer.weight.data * -2  # what held the old values is dead
    scribble(device, (64 * 64,))
    expected = layer(x)
    assert torch.equal(runner(x), expected), "other numbers"
    assert old.replays == 1, "work was launched that reads dead weights"


def weights_move(device: torch.device) -> None:
    layer, runner, x = linear(device)
    old = layer.weight.data  # stays alive
    layer.weight.data = old * -2
    assert torch.equal(runner(x), layer(x)), "the old weights were read"


@torch.no_grad()
def a_cache_is_filled_in_the_first_call(device: torch.device) -> None:
    cache: dict[Any, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        if x.shape not in cache:
            cache[x.shape] = torch.ones_like(x) * 2
        return x * cache[x.shape]

    runner = new_runner(forward, device)
    for _ in range(4):
        assert runner(torch.ones(4, device=device)).tolist() == [2.0] * 4
    assert runner.report.declined is None, runner.report.declined
    assert runner.report.replays == 2


def a_first_product_is_recorded(device: torch.device) -> None:
    runner, x = new_runner(lambda x: x @ x, device), torch.eye(4, device=device)
    for _ in range(3):
        assert torch.equal(runner(x), x)
    assert runner.report.replays == 1, runner.report.reasons


def _warmed_elsewhere(monkeypatch: Any) -> None:
    backend: Any = backend_for("sim")
    warm = backend.warm_libraries

    def elsewhere(device: torch.device, dtype: torch.dtype) -> None:
        with backend.on_stream(backend.new_stream(device)):
            warm(device, dtype)

    monkeypatch.setattr(type(backend), "warm_libraries", staticmethod(elsewhere))


@torch.no_grad()
def scratch_memory_is_cleared_by_others(device: torch.device) -> None:
    product = eager_on_graph(lambda x: x @ x)
    x, graph = torch.eye(64, device=device), BreakableGraph(Pool(device))
    with capture(graph):
        y = product(x) @ x  # the break's product makes the library's scratch memory, outside
    clear_workspaces(device)
    theirs = [torch.full((n,), 3.0, device=device) for n in (1024, 1 << 21) for _ in range(4)]
    graph.replay()
    assert torch.equal(y, x)
    assert all(z.eq(3).all() for z in theirs), "a replay wrote to someone's tensor"


def clear_workspaces(device: torch.device) -> None:
    """What other users of graphs do."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        return
    from tests.simulated.device import card

    card.drop_workspaces()


@torch.no_grad()
def a_graph_is_discarded(device: torch.device) -> None:
    pool = Pool(device)
    runner, x = new_runner(lambda x: x @ x, device, pool=pool), torch.eye(4, device=device)
    for _ in range(3):
        runner(x)
    (entry,) = runner.entries.values()
    segment = weakref.ref(entry.variants[0].graph.steps[0])
    del entry
    runner.forget_graphs()
    gc.collect()
    assert segment() is not None, "a segment was destroyed before its pool"
    pool.retire()
    gc.collect()
    assert segment() is None


def _nothing(*args: Any) -> None:
    return None


def _scratch_from_anywhere(monkeypatch: Any) -> None:
    from tests.simulated.device import card

    monkeypatch.setattr(card, "make_scratch", _nothing)


def _unwatched(monkeypatch: Any) -> None:
    monkeypatch.setattr(WeightGuard, "check", lambda self: self.version)
    monkeypatch.setattr(WeightGuard, "check_alive", lambda self: self.version)


ON_MEMORY = [
    Rule(
        "L1",
        "each result copied to where the next segment reads",
        a_table_that_a_break_returned_dies,
        wrapped(Break, "_deliver", not_delivered),
        "did not reach the next segment",
    ),
    Rule(
        "L2",
        "tensors from outside held strongly",
        a_break_is_given_a_tensor_from_outside,
        wrapped(Break, "first_run", all_held_weakly),
        "freed memory was read",
    ),
    Rule(
        "L3",
        "uploaded constants",
        a_constant_was_uploaded,
        wrapped(OpRecorder, "_constant", constants_forgotten),
        "freed memory was read",
    ),
    Rule(
        "L3",
        "tables that the model replaced",
        a_table_is_replaced,
        replaced(Held, "stale", lambda self: None),
        "the old table was read",
    ),
    Rule(
        "L3",
        "values of host tensors",
        a_host_tensor_changes,
        replaced(Held, "hold_host", _nothing),
        "the old values were read",
    ),
    Rule(
        "L3",
        "weights held weakly",
        weights_may_leave,
        wrapped(WeightGuard, "_take_stock", weights_unknown),
        "keeps a weight alive",
    ),
    Rule(
        "L3",
        "weights that died",
        weights_die,
        replaced(WeightGuard, "check_alive", lambda self: self.version),
        "reads dead weights",
    ),
    Rule("L3", "weights that moved", weights_move, _unwatched, "the old weights were read"),
    Rule(
        "L4",
        "the first call is eager",
        a_cache_is_filled_in_the_first_call,
        replaced(GraphRunner, "_reason_for_eager", lambda self, entry: None),
        "a cache it fills",
    ),
    Rule(
        "L4",
        "handles made on the recording stream",
        a_first_product_is_recorded,
        _warmed_elsewhere,
        "recording failed: CaptureError: .* handle",
    ),
    Rule(
        "L6",
        "scratch memory that goes to nothing else",
        scratch_memory_is_cleared_by_others,
        _scratch_from_anywhere,
        "wrote to someone's tensor",
    ),
    Rule(
        "L6",
        "discarded segments wait",
        a_graph_is_discarded,
        replaced(Pool, "bury", _nothing),
        "destroyed before its pool",
    ),
]
