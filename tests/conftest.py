"""Fixtures that every room's tests share: the devices that the engine is tested on.

A test that takes `device` runs on the simulated device and, where there is one, on a GPU. The
simulated device is made known to torch at the first test that wants it, after the tests on a GPU:
torch knows one accelerator, and a registered device of a third party takes that place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accel.backend import Backend, backend_for, register_backend
from tests.simulated import new_device

GPU_COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_configure(config: pytest.Config) -> None:
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests first, in every process; the tests of a file stay together."""
    items.sort(key=lambda item: item.get_closest_marker("gpu") is None)  # stable
    for item in items:
        device = "simulated" if item.get_closest_marker("gpu") is None else "gpu"
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {device}"))


def _simulated_device() -> torch.device:
    register_backend("sim", new_device())
    return torch.device("sim:0")


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device under test: "sim:0", then "cuda:0"."""
    if request.param == "sim":
        yield _simulated_device()
        return
    if not GPU_COUNT:
        pytest.skip("no CUDA device")
    yield torch.device("cuda:0")


@pytest.fixture
def backend(device: torch.device) -> Backend:
    """The backend of the device under test."""
    found = backend_for(device)
    assert found is not None
    return found


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> torch.device:
    """The simulated device alone, as new, for what only it can show."""
    if request.node.get_closest_marker("gpu") is not None:  # and of `device` another turn
        pytest.skip("only the simulated device can show it")
    return _simulated_device()
