"""What the engine expects of any backend: the simulated one and CUDA's keep the same contract."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.backend import Backend, backend_for


@pytest.fixture
def backend(device: torch.device) -> Backend:
    found = backend_for(device)
    assert found is not None
    return found


@pytest.fixture
def pool(backend: Backend) -> Any:
    return backend.new_pool()


@pytest.fixture
def stream(backend: Backend, device: torch.device) -> Any:
    made = backend.new_stream(device)
    with backend.on_stream(made):
        backend.warm_libraries(device)
    backend.synchronize(made)
    return made


def test_a_segment_replays_on_new_values(
    backend: Backend, device: torch.device, pool: Any, stream: Any
) -> None:
    x, weight = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    segment = backend.segment(pool)
    with torch.no_grad(), backend.on_stream(stream):
        backend.wait_stream(stream, torch_default(backend, device))
        segment.begin()
        assert backend.is_capturing()
        y = (x @ weight).relu() + 1
        segment.end()
        assert not backend.is_capturing()
        for value in (1.0, 2.0):
            x.fill_(value)
            segment.replay()
            backend.synchronize(stream)
            assert y.eq(4 * value + 1).all().item()


def test_a_segment_can_be_made_launchable_while_the_next_is_recorded(
    backend: Backend, device: torch.device, pool: Any, stream: Any
) -> None:
    x = torch.ones(4096, device=device)
    first, second = backend.segment(pool), backend.segment(pool)
    with torch.no_grad(), backend.on_stream(stream):
        backend.wait_stream(stream, torch_default(backend, device))
        first.begin()
        y = x
        for _ in range(200):
            y = y + 1
        first.end()
        first.prepare()
        second.begin()
        z = y * 2  # memory that the first is through with may be used again
        for _ in range(200):
            z = z + 1
        second.end()
        second.prepare()
        second.ready()
        for value in (1.0, 5.0):
            x.fill_(value)
            first.replay()
            second.replay()
            backend.synchronize(stream)
            assert z.eq(2 * (value + 200) + 200).all().item()


def test_a_segment_can_run_on_another_stream_while_the_next_is_recorded(
    backend: Backend, device: torch.device, pool: Any, stream: Any
) -> None:
    x, beside = torch.ones(4096, device=device), backend.new_stream(device)
    first, second = backend.segment(pool), backend.segment(pool)
    with torch.no_grad(), backend.on_stream(stream):
        backend.wait_stream(stream, torch_default(backend, device))
        first.begin()
        y = x + 1
        first.end()
        backend.wait_stream(beside, stream)
        first.prepare(beside)
        second.begin()
        z = y * 2
        first.ready()
        second.end()
        backend.wait_stream(stream, beside)
        assert y.eq(2).all().item()
        second.replay()
        backend.synchronize(stream)
        assert z.eq(4).all().item()


def torch_default(backend: Backend, device: torch.device) -> Any:
    """The stream that tensors made outside were made on."""
    return backend.current_stream(device)


def test_a_pools_live_blocks_are_its_tensors(
    backend: Backend, device: torch.device, pool: Any, stream: Any
) -> None:
    x = torch.ones(1024, device=device)
    segment = backend.segment(pool)
    with torch.no_grad(), backend.on_stream(stream):
        segment.begin()
        first, kept = x + 1, x + 2
        del first
        segment.end()
    assert backend.address(kept) in backend.live_blocks(pool)
    assert backend.address(x) not in backend.live_blocks(pool)
    assert len(backend.live_blocks(pool)) == 1
    assert backend.pool_bytes(pool) >= kept.nbytes


def test_an_alias_shares_memory_without_owning_it(backend: Backend, device: torch.device) -> None:
    x = torch.zeros(4, 6, device=device)
    alias = backend.alias(x[1:, ::2])
    assert backend.address(alias) == backend.address(x[1:, ::2])
    assert (alias.shape, alias.stride(), alias.dtype) == ((3, 3), (6, 2), x.dtype)
    alias.fill_(1.0)
    assert x.sum().item() == 9.0
    assert backend.storage(alias).data_ptr() == backend.storage(x).data_ptr()
    assert backend.storage(alias)._cdata != backend.storage(x)._cdata


def test_a_segment_takes_no_random_numbers_and_others_may_draw_meanwhile(
    backend: Backend, device: torch.device, pool: Any, stream: Any
) -> None:
    torch.manual_seed(5)
    eager = [torch.rand(8, device=device).tolist() for _ in range(3)]
    torch.manual_seed(5)
    drawn = [torch.rand(8, device=device).tolist()]
    x, segment = torch.ones(2, device=device), backend.segment(pool)
    backend.wait_stream(stream, backend.current_stream(device))
    with torch.no_grad(), backend.on_stream(stream):
        segment.begin()
        y = x + 1
        with pytest.raises(RuntimeError, match="generator not in capture mode"):
            torch.rand(8, device=device)
        other = threading.Thread(target=lambda: drawn.append(torch.rand(8, device=device).tolist()))
        other.start()
        other.join()
        z = y * 3
        segment.end()
        segment.replay()
        backend.synchronize(stream)
    drawn.append(torch.rand(8, device=device).tolist())
    assert drawn == eager
    assert z.tolist() == [6.0, 6.0]


def test_constants_can_be_uploaded_beside_a_recording(
    backend: Backend, device: torch.device, pool: Any, stream: Any
) -> None:
    side, host = backend.new_stream(device), torch.tensor([5.0, 6.0])
    x = torch.ones(2, device=device)
    segment = backend.segment(pool)
    with torch.no_grad(), backend.on_stream(stream):
        segment.begin()
        with backend.on_stream(side):
            constant = host.to(device)
        y = x * constant
        segment.end()
        backend.wait_stream(stream, side)
        segment.replay()
        backend.synchronize(stream)
    assert y.tolist() == [5.0, 6.0]
    assert backend.address(constant) not in backend.live_blocks(pool)


def test_a_python_error_leaves_the_pool_usable(
    backend: Backend, device: torch.device, pool: Any, stream: Any
) -> None:
    def half(x: Tensor) -> Tensor:
        x = x + 1
        raise ValueError("half-way")

    kept = []
    x = torch.ones(2, device=device)
    with torch.no_grad(), backend.on_stream(stream):
        for function in (half, torch.neg):
            segment = backend.segment(pool)
            kept.append(segment)
            segment.begin()
            try:
                y = function(x)
            except ValueError:
                continue
            finally:
                segment.end()
        kept[-1].replay()
        backend.synchronize(stream)
    assert y.tolist() == [-1.0, -1.0]


def test_events_tell_device_time(backend: Backend, device: torch.device, stream: Any) -> None:
    x = torch.ones(64, 64, device=device)
    with backend.on_stream(stream):
        backend.wait_stream(stream, torch_default(backend, device))
        begun, start = backend.now(), backend.record_event(stream, timing=True)
        for _ in range(20):
            x = x.mul(1.0)
        end = backend.record_event(stream, timing=True)
        end.synchronize()
    assert start.elapsed_time(end) > 0
    assert backend.now() > begun


def test_memory_figures_are_consistent(backend: Backend, device: torch.device) -> None:
    backend.empty_cache()
    # More than lies there: or `x` gets a part of what others left, which does not go with it.
    size = backend.reserved_bytes(device) + (32 << 20)
    x = torch.empty(size, dtype=torch.uint8, device=device)
    free, total = backend.memory(device)
    assert 0 < free < total
    assert backend.reserved_bytes(device) >= backend.reclaimable_bytes(device) + x.nbytes
    before = backend.reserved_bytes(device)
    del x
    backend.empty_cache()
    assert backend.reserved_bytes(device) <= before - size


def test_collecting_tests_does_not_make_torch_know_the_simulated_device() -> None:
    """With a third party's device torch's autograd for CUDA fails in the whole process."""
    program = (
        "import sys, pytest, torch\n"
        "options = ['--collect-only', '-q', '-n0', '-p', 'no:cacheprovider']\n"
        "assert pytest.main(['tests', *options]) == 0\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True)
