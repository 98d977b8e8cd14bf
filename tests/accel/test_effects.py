"""The rules on failures, results, effects and context, L7 to L12 (L1 to L6: test_lifetimes.py).

Where the simulated device can show it, a rule is also switched off, and then the fault must show.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.backend import Backend
from accel.graph import eager_on_graph
from accel.guard import Ambient
from accel.memory import Pool
from accel.runner import GraphRunner
from accel.signature import StaticInputs
from tests.accel.same import assert_same
from tests.accel.twin import Twin

MakeTwin = Callable[..., Twin]
MakeRunner = Callable[..., GraphRunner]


def scribble(device: torch.device, *sizes: int) -> None:
    """Takes, fills and frees memory: whatever was freed by mistake now holds something else."""
    taken = [torch.full((n,), 1e9, device=device) for n in sizes for _ in range(8)]
    del taken


class TestL7FailedRecordings:
    """A recording that fails reports the first exception and leaves the process usable."""

    def test_a_device_error(self, device: torch.device, backend: Any, runner: MakeRunner) -> None:
        def hostile(x: Tensor) -> Tensor:
            x.add(1)
            getattr(torch, x.device.type).synchronize()
            raise AssertionError("never reached in a recording")

        def fine(x: Tensor) -> Tensor:
            return x * 3

        pool = Pool(device)
        good, bad = runner(fine, pool=pool), runner(hostile, pool=pool)
        x = torch.ones(3, device=device)
        with torch.no_grad():
            for _ in range(3):
                good(x)
                with pytest.raises(AssertionError, match="never reached"):
                    bad(x)
            for _ in range(3):
                assert good(x).tolist() == [3.0] * 3
        gc.collect()
        assert "never reached" not in str(bad.report.declined)
        assert good.report.captures == 2
        if device.type == "sim":
            assert backend.aborts == 0

    def test_a_python_error_costs_no_graph(self, device: torch.device, runner: MakeRunner) -> None:
        def raises(x: Tensor) -> Tensor:
            raise ValueError("no" * x.add(1).dim())

        pool = Pool(device)
        good, bad = runner(lambda x: x * 3, pool=pool), runner(raises, pool=pool)
        x = torch.ones(3, device=device)
        with torch.no_grad():
            for _ in range(4):
                good(x)
                with pytest.raises(ValueError, match="no"):
                    bad(x)
        assert (good.report.captures, good.report.replays) == (1, 2)
        assert pool.generation == 0

    def test_an_interrupt_leaves_everything_usable(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        raised: list[bool] = []

        def interrupted(x: Tensor) -> Tensor:
            y = x * 2
            if len(raised) == 1:
                raised.append(True)
                raise KeyboardInterrupt
            raised.append(True)
            return y

        watched, x = runner(interrupted), torch.ones(3, device=device)
        with torch.no_grad():
            watched(x)
            with pytest.raises(KeyboardInterrupt):
                watched(x)
            for _ in range(3):
                assert watched(x).tolist() == [2.0] * 3
        assert watched.report.captures == 1

    def test_what_an_interrupted_recording_has_left_is_not_written_by_older_graphs(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        kept: list[Tensor] = []
        interrupts = [False]

        def keeps(x: Tensor) -> Tensor:
            y = x * 2
            z = y + y.sum().item() * 0
            if interrupts[0]:
                kept.append(y)
                raise KeyboardInterrupt
            return z.sin() + y

        watched, small, large = runner(keeps), *(torch.ones(n, device=device) for n in (3, 5))
        with torch.no_grad():
            for x in (small, small, large):
                watched(x)
            interrupts[0] = True
            with pytest.raises(KeyboardInterrupt):
                watched(large)
            interrupts[0] = False
            for value in range(3):
                watched(small * value)
        assert kept[0].tolist() == [2.0] * 5


class TestL8Results:
    """What a call returns is a copy, except inputs and weights, which are themselves."""

    def test_inputs_and_weights_are_themselves(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        model = nn.Linear(3, 3).to(device)
        watched = runner(lambda x: (x, x[1:], model.weight, x + 1), module=model)
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(2, 3).to(device)
                same, part, weight, new = watched(x)
                assert same is x
                assert part.data_ptr() == x[1:].data_ptr()
                assert weight is model.weight
                assert new.data_ptr() != x.data_ptr()
        assert watched.report.replays == 2

    def test_results_that_shared_memory_share_it_again(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y.t()

        watched, x = runner(forward), torch.randn(2, 3).to(device)
        with torch.no_grad():
            for _ in range(4):
                one, other = watched(x)
                one[0, 1] = 7.0
                assert other[1, 0].item() == 7.0
                assert_same(watched(x)[0], x * 2)


class TestL9Effects:
    """No guard may follow an effect; a replay that is abandoned leaves the generator alone."""

    def test_a_guard_after_a_write(self, device: torch.device, runner: MakeRunner) -> None:
        total = torch.zeros(3, device=device)

        def forward(x: Tensor) -> Tensor:
            total.add_(x)
            return x + total.sum().item()

        watched = runner(forward)
        with torch.no_grad():
            for turn in range(1, 6):
                watched(torch.ones(3, device=device))
                assert total.tolist() == [float(turn)] * 3
        assert watched.report.captures == 0
        assert "after aten.add_.Tensor has written" in str(watched.report.declined)

    def test_a_write_after_a_guard_is_recorded(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        total = torch.zeros(3, device=device)

        def forward(x: Tensor) -> Tensor:
            y = x + x.sum().item()
            total.add_(y)
            return y

        watched = runner(forward)
        with torch.no_grad():
            for turn in range(1, 6):
                watched(torch.ones(3, device=device))
                assert total.tolist() == [4.0 * turn] * 3
        assert (watched.report.captures, watched.report.replays) == (1, 3)

    def test_an_impure_break_before_a_guard(self, device: torch.device, runner: MakeRunner) -> None:
        seen: list[float] = []

        @eager_on_graph
        def note(x: Tensor) -> None:
            seen.append(float(x[0]))

        def forward(x: Tensor) -> Tensor:
            note(x)
            return x + x.sum().item()

        watched = runner(forward)
        with torch.no_grad():
            for turn in range(4):
                watched(torch.full((3,), float(turn), device=device))
        assert watched.report.captures == 0
        assert "the break" in str(watched.report.declined)

    def test_random_numbers_after_a_missed_guard(self, twin: MakeTwin) -> None:
        def forward(x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            return x + noise * x.sum().item() + torch.rand_like(x)

        both = twin(lambda: forward)
        for seed in (1, 1, 1, 2, 1, 2, 3, 3, 1):
            both(seed)
        assert both.report.replays > 0
        assert both.report.guard_misses > 0


class TestL10KeptTensors:
    """A tensor of the recording that the model keeps means decline, with the reason."""

    @pytest.mark.parametrize("keep", ["result", "intermediate", "argument", "break"])
    def test_kept_on_the_module(self, keep: str, device: torch.device, runner: MakeRunner) -> None:
        class Keeps(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = x * 2
                found = (x > -1e9).nonzero()
                kept = {"result": y, "intermediate": x + 1, "argument": x, "break": found}
                self.kept = kept[keep]
                return y

        model = Keeps()
        watched = runner(model, module=model)
        with torch.no_grad():
            for turn in range(4):
                watched(torch.full((2, 2), float(turn), device=device))
                before = model.kept.tolist()
                scribble(device, 4, 8)
                assert model.kept.tolist() == before
        assert watched.report.captures == 0
        assert re.search("keeps a tensor|changes its own state", str(watched.report.declined))


class TestL11StaticInputs:
    """Static inputs reproduce strides and alignment."""

    def test_strides_and_alignment(self, device: torch.device, backend: Backend) -> None:
        base = torch.randn(64).to(device)
        given = [
            base[3].expand(4),
            base[:12].view(3, 4).t(),
            base[1:17].view(4, 4),
            base[:24].view(1, 2, 3, 4).permute(0, 3, 1, 2),
            base[::2],
            base[:0],
        ]
        static = StaticInputs(given, backend)
        assert_same(static.tensors, given)
        for x, y in zip(static.tensors, given, strict=True):
            if y.numel() > 1 and 0 not in y.stride():
                assert backend.address(x) % 16 == backend.address(y) % 16
        fresh = [base[40].expand(4), *(x * 2 for x in given[1:2]), base[9:25].view(4, 4)]
        fresh += [x * 2 for x in given[3:]]
        static.fill(fresh)
        for x, y in zip(static.tensors, fresh, strict=True):
            assert torch.equal(x, y)


class TestL12Context:
    """Breaks replay in the context that they were recorded in."""

    @staticmethod
    def products(device: torch.device) -> Any:
        @eager_on_graph
        def product(x: Tensor) -> Tensor:
            return x @ x + torch.ones(2, 2, device=x.device)

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                y = product(x)
            return y.float() * 2

        runner = GraphRunner(forward, pool=Pool(device), capture="always")
        with torch.no_grad():
            for seed in range(5):
                x = torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)).to(device)
                assert_same(runner(x), forward(x))
        return runner.report

    def test_autocast_around_a_break(self, device: torch.device) -> None:
        report: Any = self.products(device)
        assert (report.captures, report.replays, report.guard_misses) == (1, 3, 0)

    def test_unrestored_the_break_computes_something_else(
        self, sim: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Ambient, "restored", lambda self: contextlib.nullcontext())
        with pytest.raises(AssertionError):
            self.products(sim)

    def test_default_dtype_around_a_break(self, device: torch.device, runner: MakeRunner) -> None:
        @eager_on_graph
        def ones(x: Tensor) -> Tensor:
            return x + torch.ones(2, device=x.device)

        def forward(x: Tensor) -> Tensor:
            torch.set_default_dtype(torch.float64)
            try:
                return ones(x) * 2
            finally:
                torch.set_default_dtype(torch.float32)

        watched = runner(forward)
        with torch.no_grad():
            for _ in range(4):
                assert watched(torch.ones(2, device=device)).dtype == torch.float64
        assert watched.report.replays == 2

    def test_weights_cast_in_a_recording_do_not_stay_in_the_autocast_cache(
        self, device: torch.device, runner: MakeRunner
    ) -> None:
        model = nn.Linear(8, 8).to(device)
        watched, x = runner(model, module=model), torch.randn(2, 8).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
            expected = model(x)
            for _ in range(4):
                assert_same(watched(x), expected)
                scribble(device, 64, 32)
                assert_same(model(x), expected)
