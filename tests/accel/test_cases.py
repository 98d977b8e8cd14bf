"""What users of similar tools ran into, each named after its symptom (the tracker's entry follows).

Equality with eager is bit for bit, and the counters are exact.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.backend import Backend
from accel.memory import Pool
from accel.pipelines.tiny import FAMILIES
from accel.runner import GraphRunner
from accel.signature import map_tree
from tests.accel.common import MakeRunner, MakeTwin, counts, net, scribble
from tests.accel.same import assert_same


class TestOutputs:
    def test_a_later_call_overwrites_an_earlier_result(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        """diffusers#7420, pytorch#122192."""
        model = net().to(device)
        watched = runner(model, module=model)
        a, b = torch.randn(2, 4, 8).to(device)
        with torch.no_grad():
            expected = model(a), model(b)
            kept = [(watched(a), watched(b)) for _ in range(3)]
        for pair in kept:
            assert_same(pair, expected)
        assert counts(watched) == (1, 4, 1)

    def test_feeding_a_result_back_in_goes_wrong(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        """pytorch#152887."""
        model = net().to(device)
        watched = runner(model, module=model)
        x = y = torch.randn(4, 8).to(device)
        with torch.no_grad():
            for _ in range(10):
                x, y = model(x), watched(y)
                assert_same(y, x)
        assert counts(watched) == (1, 8, 1)


class TestShapes:
    def test_another_size_or_prompt_is_recorded_again_or_mixed_up(
        self, device: torch.device
    ) -> None:
        """diffusers#11360, diffusers#10317, pytorch#130912."""
        family = FAMILIES["sd15"]
        plain, watched = family.make().to(device), family.make().to(device)
        runner = GraphRunner(watched, pool=Pool(device), capture="always", module=watched)

        def call(size: int, batch: int, words: int, seed: int) -> dict[str, Any]:
            draw = torch.Generator().manual_seed(seed)
            given = family.inputs(seed)
            context = given["encoder_hidden_states"].shape[-1]
            channels = given["sample"].shape[1]
            given["sample"] = torch.randn(batch, channels, size, size, generator=draw)
            given["encoder_hidden_states"] = torch.randn(batch, words, context, generator=draw)
            return map_tree(lambda x: x.to(device) if isinstance(x, Tensor) else x, given)

        shapes = [(8, 1, 7), (12, 1, 7), (8, 2, 7), (8, 1, 11)]
        with torch.no_grad():
            for seed in range(4):
                for shape in shapes:
                    assert_same(runner(**call(*shape, seed)), plain(**call(*shape, seed)))
        assert counts(runner) == (4, 8, 4)


class TestMemory:
    def test_many_sizes_fill_the_card(self, device: torch.device, backend: Backend) -> None:
        """pytorch#150708, stable-fast#141."""
        model = net().to(device)

        def serve(pool: Pool, widths: Iterable[int]) -> GraphRunner:
            runner = GraphRunner(model, pool=pool, capture="always", module=model)
            for width in widths:
                x = torch.randn(width * 4096, 8, generator=_seeded(width)).to(device)
                assert_same(runner(x), model(x))
                assert pool.limit is None or pool.bytes() <= pool.limit
                backend.empty_cache()
                reserved.append(backend.reserved_bytes(device))
            return runner

        reserved: list[int] = []
        several = [width for width in range(1, 13) for _ in range(3)]
        with torch.no_grad():
            alone, together = Pool(device), Pool(device)
            serve(alone, [12] * 3)
            serve(together, several).forget_graphs()
            limit = (alone.bytes() + together.bytes()) // 2
            assert alone.bytes() < limit < together.bytes()
            pool = Pool(device, memory_limit=limit)
            runner = serve(pool, several)
            assert runner.report.evictions > 0
            assert runner.report.captures >= 12
            reserved.clear()
            runner = serve(pool, [9 + turn % 4 for turn in range(200)])
        assert runner.report.replays > 100
        assert max(reserved[100:]) <= max(reserved[:100])

    def test_evicting_one_graph_breaks_the_others(
        self, device: torch.device, backend: Backend
    ) -> None:
        """vllm-omni#6457, pytorch#193402: a destroyed graph takes the workspace along."""
        pool = Pool(device)
        models = [nn.Linear(n, n).to(device) for n in (16, 32, 48)]
        runners = [GraphRunner(m, pool=pool, capture="always", module=m) for m in models]

        def rounds(which: list[int], seed: int) -> None:
            for i in which:
                x = torch.randn(4, models[i].in_features, generator=_seeded(seed + i)).to(device)
                assert_same(runners[i](x), models[i](x))

        with torch.no_grad():
            for seed in range(3):
                rounds([0, 1, 2], seed)
            assert [counts(r) for r in runners] == [(1, 1, 1)] * 3
            runners[0].forget_graphs()
            scribble(device)
            for seed in range(3, 6):
                rounds([1, 2], seed)
            rounds([0], 6)
            scribble(device)
            rounds([0, 1, 2], 7)
        assert [counts(r) for r in runners] == [(2, 2, 1), (1, 5, 1), (1, 5, 1)]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Table(nn.Module):
    """Keeps one (size, table) slot, as rotary embeddings do."""

    slot: tuple[int, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.slot is None or self.slot[0] != x.shape[1]:
            self.slot = x.shape[1], torch.arange(float(x.shape[1])).to(x.device).cos()
        return F.softmax(x * self.slot[1], dim=-1)


class TestCaches:
    """sglang#34183, sglang#37606, sglang#30584."""

    def test_a_table_replaced_by_another_sizes_is_read_after_its_death(
        self, twin: MakeTwin
    ) -> None:
        both = twin(Table)

        def sized(n: int) -> None:
            both(n, lambda draw: (draw(2, n),))

        for size in (8, 8, 8, 5, 5, 5, 8, 8, 5, 8, 8):
            sized(size)
            scribble(both.device, (8, 5, 16, 64))
        assert both.report.captures >= 2

    @pytest.mark.parametrize("sizes", [(16, 4, 8), (4, 8, 16)])
    def test_inputs_and_outputs_of_breaks_over_several_sizes(
        self, sizes: tuple[int, ...], twin: MakeTwin
    ) -> None:
        def forward(x: Tensor) -> Tensor:
            y = x * 2
            kept = y[y > -1e9]  # a break, and its boundary buffer
            z = (kept.view_as(y) @ y.t()).relu()
            return z[z > -1e9].sum() + (z * 3)

        both = twin(lambda: forward)
        for turn in range(5):
            for size in sizes:
                both(turn, lambda draw, size=size: (draw(size, 4),))  # type: ignore[misc]
                scribble(both.device)
        assert both.report.declined is None
        assert both.report.captures >= len(sizes)
        assert both.report.replays >= 1


class TestThreads:
    """pytorch#123177, VoxCPM#208, pytorch#192061."""

    @pytest.mark.timeout(60)
    def test_requests_from_many_threads_hang_or_mix(
        self, device: torch.device, backend: Backend
    ) -> None:
        model = net().to(device)
        runner = GraphRunner(model, pool=Pool(device), capture="always", module=model)
        requests = [(2 + 2 * (i % 2), i) for i in range(40)]

        def given(request: tuple[int, int]) -> Tensor:
            rows, seed = request
            return torch.randn(rows, 8, generator=_seeded(seed)).to(device)

        with torch.no_grad():
            expected = {request: model(given(request)) for request in requests}
        failures: list[BaseException] = []
        stop = threading.Event()

        def guarded(body: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    with torch.no_grad():
                        body()
                except BaseException as error:
                    failures.append(error)

            return run

        def serve(worker: int) -> None:
            for request in requests[worker::8]:
                assert_same(runner(given(request)), expected[request])

        def poll() -> None:
            while not stop.is_set():
                stream = backend.current_stream(device)
                backend.record_event(stream).synchronize()
                backend.synchronize(stream)
                time.sleep(1e-3)

        def run_all(bodies: list[Callable[[], None]]) -> None:
            threads = [threading.Thread(target=guarded(body)) for body in bodies]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(50)
                assert not thread.is_alive()

        poller = threading.Thread(target=guarded(poll))
        poller.start()
        try:
            for _ in range(2):  # the first recording is made in a thread that then ends
                run_all([lambda: [runner(given(r)) for r in requests[:2]] and None])
            run_all([lambda worker=w: serve(worker) for w in range(8)])  # type: ignore[misc]
        finally:
            stop.set()
            poller.join(10)
        assert not failures, failures
        assert counts(runner) == (2, 40, 2)


class TestWorth:
    """unsloth#11175, sglang#36470: what graphs cannot speed up."""

    @staticmethod
    def small_ops(x: Tensor) -> Tensor:
        for _ in range(150):
            x = x * 1.01 + 0.1
        return x

    @staticmethod
    def big_product(x: Tensor) -> Tensor:
        return x @ x

    @pytest.fixture
    def clock(self, sim: torch.device) -> Any:
        """The host spends 10 µs an operation; a product keeps the device busy for 5 ms."""
        from accel.backend import backend_for

        backend: Any = backend_for(sim)
        clock = backend.clock
        clock.default_host, clock.default_cost = 10e-6, 3e-6
        clock.op_cost["mm"] = 5e-3
        return clock

    def run(self, function: Any, sim: torch.device, capture: Any = "auto") -> GraphRunner:
        runner = GraphRunner(function, pool=Pool(sim), capture=capture)
        with torch.no_grad():
            for seed in range(8):
                x = torch.randn(4, 4, generator=_seeded(seed)).to(sim)
                assert_same(runner(x), function(x))
        return runner

    def test_a_busy_device_gains_nothing(self, clock: Any, sim: torch.device) -> None:
        runner = self.run(self.big_product, sim)
        assert counts(runner) == (0, 0, 8)
        assert "the device is the bottleneck" in str(runner.report.declined)
        assert "5.0 ms" in str(runner.report.declined)

    def test_a_busy_host_is_relieved(self, clock: Any, sim: torch.device) -> None:
        runner = self.run(self.small_ops, sim)
        assert counts(runner) == (1, 5, 2)
        assert runner.report.declined is None

    def test_always_means_always(self, clock: Any, sim: torch.device) -> None:
        assert counts(self.run(self.big_product, sim, capture="always")) == (1, 6, 1)

    def test_a_gain_that_does_not_come_true_is_given_up(
        self, clock: Any, sim: torch.device
    ) -> None:
        clock.replay_host = 0.1
        runner = self.run(self.small_ops, sim)
        assert runner.report.captures == 1
        assert "times as fast as an eager call" in str(runner.report.declined)
        assert runner.pool.bytes() == 0
        assert runner.report.graphs == []
