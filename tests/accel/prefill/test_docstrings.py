"""The examples in the docstrings of `accel.prefill` hold, on the simulated device and on a GPU."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import accel.prefill
from accel.backend import Backend
from accel.prefill import attention, batch
from tests.accel.test_docstrings import failures

MODULES = [m.name for m in pkgutil.iter_modules(accel.prefill.__path__, "accel.prefill.")]
NAMES = {name: found for m in (attention, batch) for name, found in vars(m).items()}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, device: torch.device, backend: Backend) -> None:
    module = importlib.import_module(name)
    names = {**NAMES, "torch": torch, "device": device, "backend": backend, **vars(module)}
    assert "".join(failures(module, names)) == ""
