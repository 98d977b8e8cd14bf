"""Recording and replaying: what a segment holds, what it refuses, and what a spoilt one costs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated.errors import CaptureError

Record = Callable[..., tuple[Any, Any]]


def test_results_are_poison_until_the_replay(sim: torch.device, record: Record) -> None:
    x = torch.ones(4, device=sim)
    segment, (y, i, b) = record(lambda: (x + 1, x.long(), x > 0))
    assert y.isnan().all().item()
    assert i.min().item() > 1 << 60
    segment.replay()
    assert y.tolist() == [2.0] * 4
    assert i.tolist() == [1] * 4
    assert b.all().item()


def test_results_are_poison_also_while_an_earlier_segment_waits(
    sim: torch.device, record: Record
) -> None:
    """But where that may read: what it was given, and has been freed since."""
    x = torch.ones(4, device=sim)
    first, (y, spare) = record(lambda: (x + 1, x + 2))
    first.replay()
    second, z = record(lambda x: x * 3, spare)
    second.prepare()
    address = spare.data_ptr()
    del spare
    third, (over, beside) = record(lambda: (z + 1, y - 1))
    assert address in (over.data_ptr(), beside.data_ptr())
    assert [x.isnan().any().item() for x in (over, beside)].count(False) == 1
    second.replay()
    third.replay()
    assert (z.tolist(), over.tolist(), beside.tolist()) == ([9.0] * 4, [10.0] * 4, [1.0] * 4)


def test_a_replay_follows_its_inputs(sim: torch.device, record: Record) -> None:
    x, weight = torch.randn(4, 8, device=sim), torch.randn(8, 8, device=sim)
    segment, y = record(lambda: F.softmax(x @ weight, -1).t())
    for _ in range(2):
        x.copy_(torch.randn(4, 8))
        segment.replay()
        assert torch.equal(y, F.softmax(x @ weight, -1).t())


def test_recording_writes_nothing_that_an_earlier_step_reads(
    sim: torch.device, record: Record
) -> None:
    x = torch.ones(100, device=sim)
    held: list[Tensor] = []
    first, _ = record(lambda: held.append(x + 1))
    first.replay()

    def work() -> tuple[Tensor, Tensor]:
        doubled = held[0] * 2
        address = held.pop().data_ptr()
        later = x + 5
        assert later.data_ptr() == address
        return doubled, later

    second, (doubled, later) = record(work)
    assert doubled.isnan().all().item()
    second.replay()
    assert doubled.eq(4).all().item()
    assert later.eq(6).all().item()


def test_writes_in_place_wait_for_the_replay(sim: torch.device, record: Record) -> None:
    x, out, source = (torch.ones(4, device=sim) for _ in range(3))

    def work() -> None:
        x.add_(1)
        x[1:3].mul_(10)
        torch.add(x, x, out=out)
        source.copy_(out)

    segment, _ = record(work)
    assert x.tolist() == out.tolist() == source.tolist() == [1.0] * 4
    segment.replay()
    assert x.tolist() == [2.0, 20.0, 20.0, 2.0]
    assert source.tolist() == [4.0, 40.0, 40.0, 4.0]
    segment.replay()
    assert x.tolist() == [3.0, 210.0, 210.0, 3.0]


def test_indices_that_are_not_computed_yet_do_no_harm(sim: torch.device, record: Record) -> None:
    table, x = torch.randn(10, 4, device=sim), torch.tensor([1, 2], device=sim)
    segment, y = record(lambda: F.embedding((x * 2).flip(0), table) + table[x + 1])
    segment.replay()
    assert torch.equal(y, F.embedding((x * 2).flip(0), table) + table[x + 1])


def test_outputs_that_find_their_size_while_recording(sim: torch.device, record: Record) -> None:
    def work() -> tuple[Tensor, Tensor, Tensor]:
        steps = torch.arange(5, device=sim)
        return steps, torch.eye(3, device=sim), torch.mul(steps, 2, out=steps.new_empty(0))

    segment, (steps, eye, doubled) = record(work)
    assert eye.isnan().all().item()
    segment.replay()
    assert steps.tolist() == [0, 1, 2, 3, 4]
    assert doubled.tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(eye.cpu(), torch.eye(3))


def test_a_host_scalar_is_baked_in(sim: torch.device, record: Record) -> None:
    x, factor = torch.ones(2, device=sim), torch.tensor(3.0)
    segment, y = record(lambda: x * factor)
    factor.fill_(100.0)
    segment.replay()
    assert y.tolist() == [3.0, 3.0]


def test_a_number_keeps_the_dtype_of_what_it_multiplies(sim: torch.device, record: Record) -> None:
    x = torch.tensor(1.0, device=sim, dtype=torch.bfloat16)
    segment, y = record(lambda: x * 2.5 + 1)
    segment.replay()
    assert y.dtype == torch.bfloat16
    assert y.item() == 3.5


def test_replays_run_no_python_and_need_no_tensor_objects(
    sim: torch.device, backend: Any, record: Record
) -> None:
    calls = []
    x = torch.ones(4, device=sim)

    def work() -> Tensor:
        calls.append(1)
        middle = x + 1
        gone.append(weakref.ref(middle))
        return middle * 2

    gone: list[weakref.ref[Tensor]] = []
    segment, y = record(work)
    gc.collect()
    assert gone[0]() is None
    segment.replay()
    segment.replay()
    assert len(calls) == 1
    assert y.tolist() == [4.0] * 4
    assert backend.counters.replays == 2
    assert backend.counters.replayed == 4


def test_replays_are_invisible_to_modes(sim: torch.device, record: Record) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x = torch.ones(4, device=sim)
    segment, y = record(lambda: x + 1)
    with torch.inference_mode(), Names():  # type: ignore[no-untyped-call]
        segment.replay()
    assert not seen
    assert y.tolist() == [2.0] * 4


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "upload": lambda x: torch.ones(3).to(x.device),
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "copy_ to the host": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "assignment through a mask": lambda x: x.index_put_((x > 0,), x[:1]),
    "host indices": lambda x: x[torch.tensor([0, 1])],
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "linalg": lambda x: torch.linalg.inv(torch.diag(x + 1)),
    "synchronize": lambda x: torch.sim.synchronize(),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("read", READS)
def test_what_a_recording_refuses(
    read: str, sim: torch.device, backend: Any, pool: Any, stream: Any
) -> None:
    x = torch.arange(4.0, device=sim)
    READS[read](x)  # fine outside
    segment = backend.segment(pool)
    with backend.on_stream(stream):
        segment.begin()
        with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
            READS[read](x)
        with pytest.raises(CaptureError, match="previous error"):
            segment.end()
        assert not backend.is_capturing()
        with pytest.raises(RuntimeError, match="already recording to mempool_id"):
            backend.segment(pool).begin()
    assert backend.aborts == 0
    del segment
    assert backend.aborts == 1


@pytest.mark.parametrize("fill", [0.0, 2])
def test_filling_through_a_mask_is_recordable(fill: Any, sim: torch.device, record: Record) -> None:
    x = torch.arange(4.0, device=sim)
    segment, _ = record(lambda: x.masked_fill_(x > 1, fill))
    segment.replay()
    assert x.tolist() == [0.0, 1.0, fill, fill]


def test_copying_nothing_is_allowed(sim: torch.device, record: Record) -> None:
    _, y = record(lambda: torch.empty(0).to(sim))
    assert y.shape == (0,)


def test_a_python_error_leaves_a_recording_clean(
    sim: torch.device, backend: Any, record: Record
) -> None:
    x = torch.ones(2, device=sim)

    def fails() -> None:
        x.add_(1)
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        record(fails)
    segment, y = record(lambda: x * 3)
    segment.replay()
    assert y.tolist() == [3.0, 3.0]
    assert backend.aborts == 0


def test_other_streams_and_threads_run_while_one_records(
    sim: torch.device, backend: Any, record: Record
) -> None:
    x, side, seen = torch.ones(2, device=sim), backend.new_stream(sim), []

    def work() -> Tensor:
        with backend.on_stream(side):
            constant = torch.tensor([5.0, 6.0]).to(sim)
        worker = threading.Thread(target=lambda: seen.append((x + 1).tolist()))
        worker.start()
        worker.join()
        held.append(constant)
        return x * constant

    held: list[Tensor] = []
    segment, y = record(work)
    assert seen == [[2.0, 2.0]]
    assert held[0].tolist() == [5.0, 6.0]
    segment.replay()
    assert y.tolist() == [5.0, 6.0]
    assert len(segment.steps) == 1


def test_who_hears_that_a_stream_records(sim: torch.device, backend: Any, record: Record) -> None:
    def ask() -> list[bool]:
        with backend.hide_capturing():
            hidden = [backend.is_capturing(), torch.sim.is_current_stream_capturing()]
        return [*hidden, backend.is_capturing(), torch.sim.is_current_stream_capturing()]

    assert record(ask)[1] == [True, False, True, True]
    assert not backend.is_capturing()
    assert not torch.sim.is_current_stream_capturing()


def test_the_default_stream_does_not_record(backend: Any, pool: Any) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        backend.segment(pool).begin()


def test_a_handle_cannot_be_made_in_a_recording(sim: torch.device, backend: Any) -> None:
    x, cold = torch.ones(2, 2, device=sim), backend.new_stream(sim)
    segment = backend.segment(backend.new_pool())
    with backend.on_stream(cold):
        segment.begin()
        x + x
        with pytest.raises(CaptureError, match="handle"):
            x @ x
        with pytest.raises(CaptureError):
            segment.end()


def test_handles_belong_to_a_thread(sim: torch.device, backend: Any, stream: Any) -> None:
    x, outcome = torch.ones(2, 2, device=sim), []

    def elsewhere() -> None:
        segment = backend.segment(backend.new_pool())
        with backend.on_stream(stream):
            segment.begin()
            try:
                x @ x
            except CaptureError as error:
                outcome.append(str(error))
            with pytest.raises(CaptureError):
                segment.end()

    worker = threading.Thread(target=elsewhere)
    worker.start()
    worker.join()
    assert "handle" in outcome[0]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": torch.rand_like,
    "dropout": lambda x: F.dropout(x, 0.5),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "in place": lambda x: x.clone().normal_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_operators_are_refused_without_harm(
    name: str, sim: torch.device, record: Record
) -> None:
    x = torch.ones(3, device=sim)

    def draws() -> Tensor:
        with pytest.raises(RuntimeError, match="not in capture mode"):
            DRAWS[name](x)
        return x + 1

    segment, y = record(draws)
    segment.replay()
    assert y.tolist() == [2.0] * 3


def test_the_hosts_generator_is_left_to_other_threads(
    sim: torch.device, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untouchable:
        """In the place of torch's default generator."""

    x = torch.ones(1, 2, 4, 4, device=sim)
    monkeypatch.setattr(torch, "default_generator", Untouchable())

    def attends() -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    drawn = F.dropout(attends(), 0.5) + torch.rand_like(x)
    segment, y = record(attends)
    segment.replay()
    assert (y + drawn).isfinite().all().item()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_is_the_cpus_bit_for_bit(p: float, sim: torch.device) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    drawn = []
    for there in (x.t(), x.to(sim).t()):
        torch.manual_seed(3)
        drawn.append(torch.native_dropout(there, p, True)[0].cpu())
    assert torch.equal(*drawn)
    assert drawn[0].stride() == drawn[1].stride()
