"""The examples in the docstrings hold: on the simulated device, on a GPU, and for patches."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import accel
import accel.patches
from accel.backend import Backend
from tests.accel.test_size import ENGINE as COUNTED

ENGINE = [m.name for m in pkgutil.iter_modules(accel.__path__, "accel.") if not m.ispkg]
PATCHES = [m.name for m in pkgutil.iter_modules(accel.patches.__path__, "accel.patches.")]


def examples(module: ModuleType) -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    yield from (test for test in finder.find(module) if test.examples)


def failures(module: ModuleType, names: dict[str, Any]) -> list[str]:
    """The report of every example that does not hold."""
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(module):
        test.globs.update(names)
        runner.run(test, out=said.append)
    return said


@pytest.mark.parametrize("name", [*ENGINE, *PATCHES])
def test_examples(
    name: str, device: torch.device, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "accel.patches.triton_kernels":
        pytest.importorskip("triton", reason="comes with torch for CUDA")
    module = importlib.import_module(name)
    names = {"torch": torch, "nn": torch.nn, "device": device, "backend": backend}
    assert "".join(failures(module, names)) == ""


def test_the_engine_is_explained_by_examples() -> None:
    modules = [importlib.import_module(name) for name in ENGINE]
    assert sum(1 for module in modules for _ in examples(module)) >= 18


@pytest.mark.parametrize("name", COUNTED)
def test_every_public_name_has_an_example(name: str) -> None:
    module = importlib.import_module(f"accel.{name}")
    public = {
        key: found
        for key, found in vars(module).items()
        if (inspect.isclass(found) or inspect.isfunction(found))
        and found.__module__ == module.__name__
        and not key.startswith("_")
    }
    assert public
    assert [key for key, found in public.items() if ">>>" not in (found.__doc__ or "")] == []


def test_an_example_that_does_not_hold_is_found() -> None:
    module = ModuleType("sample", ">>> 1 + 1\n3\n")
    assert "Expected:\n    3\nGot:\n    2" in "".join(failures(module, {}))
