"""Pipelines in servers and notebooks: threads that come and go, others beside them, Ctrl-C."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import accel
from accel.backend import Backend
from accel.graph import eager_on_graph
from accel.patches.forward import PatchedMethod
from accel.patches.state import StateProbe
from accel.pipelines import tiny
from tests.patches.pair import draw

Request = tuple[int, int]
"""A seed, and the picture's height and width in pixels."""
Draw = Callable[[Request], np.ndarray]
STEPS = 2


def options(request: Request) -> dict[str, Any]:
    return {"height": request[1], "width": request[1], "num_inference_steps": STEPS}


@pytest.fixture
def pipe(device: torch.device) -> Iterator[Any]:
    """A patched tiny pipeline."""
    made = tiny.pipeline("sd15").to(device)
    made.set_progress_bar_config(disable=True)
    yield accel.patch(made, capture="always")
    accel.unpatch(made)


@pytest.fixture
def expected(device: torch.device) -> Draw:
    """What a request gives without a patch, drawn before any other thread is at work."""
    plain = tiny.pipeline("sd15").to("cpu" if device.type == "sim" else device)
    plain.set_progress_bar_config(disable=True)
    known: dict[Request, np.ndarray] = {}

    def picture(request: Request) -> np.ndarray:
        if request not in known:
            known[request] = draw(plain, "sd15", request[0], **options(request))
        return known[request]

    return picture


def serve(pipe: Any, request: Request) -> np.ndarray:
    """One request, in a pipeline of its own around the patched modules, as servers do it. What
    threads cannot share, patched or not: a scheduler knows one picture at a time, and a fast
    tokenizer is told how to pad before it is asked."""
    own = {
        "scheduler": pipe.scheduler.__class__.from_config(pipe.scheduler.config),
        "tokenizer": copy.deepcopy(pipe.tokenizer),
    }
    mine = type(pipe)(**{**pipe.components, **own}, requires_safety_checker=False)
    mine.set_progress_bar_config(disable=True)
    return draw(mine, "sd15", request[0], **options(request))


def in_a_thread(body: Callable[[], Any]) -> Any:
    """What `body` returns, run in a thread that then ends."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(body).result(60)


@contextlib.contextmanager
def beside(body: Callable[[], Any]) -> Iterator[None]:
    """Runs `body` over and over in another thread."""
    stop, failures = threading.Event(), list[BaseException]()

    def loop() -> None:
        try:
            while not stop.is_set():
                body()
                time.sleep(1e-3)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert not failures, failures


class TestThreads:
    def test_every_picture_in_a_new_thread(self, pipe: Any, expected: Draw) -> None:
        for request in [(seed, 16) for seed in range(5)]:
            drawn = in_a_thread(lambda request=request: serve(pipe, request))  # type: ignore[misc]
            assert np.array_equal(drawn, expected(request))
        assert accel.report(pipe)["unet"].replays > 4

    def test_a_thread_that_has_anothers_number_records(self, device: torch.device) -> None:
        """The math library's handles belong to a thread and go with it."""
        layer = accel.patch(nn.Linear(8, 8).to(device), capture="always")
        numbers = set()

        def call(rows: int) -> Callable[[], None]:
            def body() -> None:
                numbers.add(threading.get_ident())
                with torch.no_grad():
                    layer(torch.ones(rows, 8, device=device))

            return body

        sizes = range(1, 7)
        for rows in sizes:
            for _ in range(3):
                in_a_thread(call(rows))
        report = accel.report(layer)["module"]
        assert len(numbers) < 3 * len(sizes), "this system does not use numbers again"
        assert (report.captures, report.declined) == (len(sizes), None)
        assert not any(graph.breaks for graph in report.graphs)

    @pytest.mark.timeout(120)
    def test_eight_workers_with_mixed_sizes(self, pipe: Any, expected: Draw) -> None:
        requests = [(seed, (16, 24)[seed % 2]) for seed in range(24)]
        pictures = [expected(request) for request in requests]
        with ThreadPoolExecutor(8) as workers:
            drawn = list(workers.map(lambda request: serve(pipe, request), requests))
        assert [np.array_equal(*two) for two in zip(drawn, pictures, strict=True)] == [True] * 24
        assert accel.report(pipe)["unet"].captures == 2
        assert accel.report(pipe)["unet"].replays > 24

    def test_two_pipelines_in_two_threads(
        self, pipe: Any, device: torch.device, expected: Draw
    ) -> None:
        other = tiny.pipeline("sd15").to(device)
        accel.patch(other, capture="always")
        requests = [(seed, 16) for seed in range(6)]
        pictures = [expected(request) for request in requests]

        def all_of(pipe: Any) -> list[np.ndarray]:
            return [serve(pipe, request) for request in requests]

        with ThreadPoolExecutor(2) as workers:
            for drawn in workers.map(all_of, [pipe, other]):
                assert np.array_equal(drawn, pictures)
        for patched in (pipe, other):
            assert accel.report(patched)["unet"].replays > 0

    def test_pictures_from_the_hosts_own_generator(
        self, pipe: Any, expected: Draw, device: torch.device
    ) -> None:
        """`torch.manual_seed` and no generator of its own: others do not disturb its numbers."""
        torch.manual_seed(5)
        numbers = [torch.randn(3).tolist() for _ in range(200)]
        picture = expected((0, 16))
        with beside(lambda: serve(pipe, (0, 16))):
            time.sleep(0.2)
            torch.manual_seed(5)
            assert [torch.randn(3).tolist() for _ in range(200)] == numbers
        assert np.array_equal(serve(pipe, (0, 16)), picture)

    def test_others_allocate_wait_and_poll(
        self, pipe: Any, expected: Draw, device: torch.device, backend: Backend
    ) -> None:
        def busy() -> None:
            stream = backend.current_stream(device)
            kept = [torch.randn(size, device=device) + 1 for size in (16, 300, 5000)]
            event = backend.record_event(stream)
            while not event.query():
                event.synchronize()
            backend.synchronize(stream)
            assert kept[0].isfinite().all().item()
            backend.empty_cache()

        requests = [(seed, size) for size in (16, 24) for seed in range(4)]
        pictures = [expected(request) for request in requests]
        with beside(busy):
            for request, picture in zip(requests, pictures, strict=True):
                assert np.array_equal(serve(pipe, request), picture)
        assert accel.report(pipe)["unet"].captures == 2

    def test_an_attribute_set_by_another_thread_while_it_is_looked_at(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread switch at the worst moment, each time: another patches the module, say."""
        block = Breaks().to(device)
        opened, turns = accel.modules.opened, itertools.count()

        def switched(x: Any) -> Any:
            setattr(block, f"news_{next(turns)}", 1)
            return opened(x)

        accel.patch(block, capture="always")
        with torch.no_grad(), monkeypatch.context() as patched:
            patched.setattr("accel.modules.opened", switched)
            block(torch.ones(2, 4, device=device))

    def test_a_recording_that_fails_leaves_a_patch_made_meanwhile(self) -> None:
        block = Breaks()
        probe = StateProbe(block)
        probe()
        put_back = probe.remember()
        block.forward = patched = PatchedMethod(block, "forward", lambda original, a, k: None)
        put_back()
        assert vars(block).get("forward") is patched

    def test_patched_and_unpatched_while_others_draw(self, pipe: Any, expected: Draw) -> None:
        requests = [(seed % 3, (16, 24)[seed % 2]) for seed in range(18)]
        pictures = [expected(request) for request in requests]

        def switch() -> None:
            accel.unpatch(pipe)
            time.sleep(random.random() * 0.02)
            accel.patch(pipe, capture="always")
            time.sleep(random.random() * 0.05)

        with beside(switch), ThreadPoolExecutor(3) as workers:
            drawn = list(workers.map(lambda request: serve(pipe, request), requests))
        assert [np.array_equal(*two) for two in zip(drawn, pictures, strict=True)] == [True] * 18
        accel.unpatch(pipe)
        assert not {"forward", "decode"} & {k for c in (pipe.unet, pipe.vae) for k in vars(c)}
        accel.patch(pipe, capture="always")
        for _ in range(3):
            assert np.array_equal(serve(pipe, (0, 16)), expected((0, 16)))
        assert accel.report(pipe)["unet"].replays > 0

    def test_a_component_is_replaced_while_others_draw(
        self, pipe: Any, expected: Draw, device: torch.device
    ) -> None:
        spare = tiny.pipeline("sd15").unet.to(device)
        expected((0, 16))

        def swap() -> None:
            nonlocal spare
            pipe.unet, spare = spare, pipe.unet

        with beside(swap):
            for _ in range(12):
                assert np.array_equal(serve(pipe, (0, 16)), expected((0, 16)))
        for _ in range(3):
            assert np.array_equal(serve(pipe, (0, 16)), expected((0, 16)))
        assert "forward" not in vars(spare)


class Interrupt:
    """Ctrl-C in the middle of a forward: raised by the n-th group norm once it is armed."""

    def __init__(self) -> None:
        self.after: int | None = None
        self._norm = nn.functional.group_norm

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.after is not None:
            self.after -= 1
            if self.after < 0:
                self.after = None
                raise KeyboardInterrupt
        return self._norm(*args, **kwargs)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    made = Interrupt()
    monkeypatch.setattr(nn.functional, "group_norm", made)
    return made


def interrupted(body: Callable[[], Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        body()


class TestInterrupt:
    @pytest.mark.parametrize("drawn", [0, 1, 2])
    def test_in_an_eager_call_a_recording_and_afterwards(
        self, drawn: int, pipe: Any, expected: Draw, interrupt: Interrupt
    ) -> None:
        """Which call is cut short depends on how many pictures there were before."""
        for seed in range(drawn):
            serve(pipe, (seed, 16))
        for after in (3, 12):  # the second falls in the picture's second step, where it records
            interrupt.after = after
            # Replays do not run Python: there another size, in its first call, is cut short.
            interrupted(lambda: serve(pipe, (0, 16 if drawn < 2 else 24)))
        for seed in range(4):
            assert np.array_equal(serve(pipe, (seed, 16)), expected((seed, 16)))
        report = accel.report(pipe)["unet"]
        assert report.replays > 2
        assert report.declined is None
        picture = in_a_thread(lambda: serve(pipe, (7, 24)))
        assert np.array_equal(picture, expected((7, 24)))

    def test_in_every_part_of_a_recording(self, device: torch.device, interrupt: Interrupt) -> None:
        for after in range(4):
            block = Norms().to(device)
            x = torch.ones(1, 4, 3, device=device)
            with torch.no_grad():
                right = block(x)
                accel.patch(block, capture="always")
                block(x)
                interrupt.after = after
                interrupted(lambda block=block, x=x: block(x))  # type: ignore[misc]
                for _ in range(4):
                    assert torch.equal(block(x), right)
            assert accel.report(block)["module"].replays > 0

    def test_in_the_break_of_a_replay(self, device: torch.device, backend: Backend) -> None:
        block = Breaks().to(device)
        x = torch.ones(2, 4, device=device)
        with torch.no_grad():
            right = block(x)
            accel.patch(block, capture="always")
            for _ in range(3):
                assert torch.equal(block(x), right)
            before = accel.report(block)["module"].replays
            for _ in range(2):
                block.stop[0] = True
                interrupted(lambda: block(x))
                assert not backend.is_capturing()
                assert torch.equal(block(x), right)
                assert torch.equal(in_a_thread(lambda: no_grad(block, x)), right)
        assert accel.report(block)["module"].replays >= before + 4

    def test_in_a_picture_of_a_picture_that_waits(self, pipe: Any, expected: Draw) -> None:
        """Ctrl-C reaches a pipeline's own code too, between two steps."""

        def stop(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            raise KeyboardInterrupt

        for seed in range(2):
            interrupted(
                lambda seed=seed: draw(  # type: ignore[misc]
                    pipe, "sd15", seed, **options((0, 16)), callback_on_step_end=stop
                )
            )
            assert np.array_equal(
                draw(pipe, "sd15", seed, **options((0, 16))), expected((seed, 16))
            )
        assert accel.report(pipe)["unet"].replays > 0


class Norms(nn.Module):
    """A few layers, each of which can be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.GroupNorm(2, 4) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x * 2)
        return y


class Breaks(nn.Module):
    """A forward with a break in it that can be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.stop = stop = [False]

        @eager_on_graph(pure=True)
        def middle(x: Tensor) -> Tensor:
            if stop.pop():
                stop.append(False)
                raise KeyboardInterrupt
            stop.append(False)
            return x + 1

        self._middle = [middle]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._middle[0](self.layer(x)) * 3
        return y


def no_grad(module: nn.Module, x: Tensor) -> Tensor:
    """Gradient mode belongs to a thread."""
    with torch.no_grad():
        y: Tensor = module(x)
        return y
