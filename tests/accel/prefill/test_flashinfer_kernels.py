"""Which of FlashInfer's modules are there, and compiling those that are not."""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from accel.prefill.attention import AttentionGroup, Unsupported
from accel.prefill.flashinfer_kernels import (
    DIMS,
    common_kernels,
    compile_kernels,
    compiled,
    kernel_for,
    missing_tool,
    package,
)
from tests.accel.prefill.flashinfer_double import Double, install

PLAIN, WINDOWED, OF_64 = common_kernels("fa3")[:3]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Double:
    """The stand-in with nothing compiled; nvcc and a ninja that finds nothing to do."""
    double = Double(prebuilt=False, folder=tmp_path)
    which = shutil.which
    install(monkeypatch, double)
    monkeypatch.setattr(shutil, "which", which)
    program(tmp_path / "cuda" / "bin" / "nvcc", "true")
    program(tmp_path / "bin" / "ninja", "echo ninja: no work to do.")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return double


def program(path: Path, does: str) -> None:
    """A shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    path.chmod(0o755)


def test_a_kernel_is_a_groups_dims_dtype_window_and_soft_cap() -> None:
    group = AttentionGroup(8, 2, 64, 64, 1.0, window=9, sinks=True, dtype=torch.float16)
    kernel = kernel_for(group, "fa2")
    assert str(kernel) == "fa2 float16, head dimension 64, window"
    other = AttentionGroup(4, 4, 64, 64, 0.3, window=5, dtype=torch.float16)
    assert kernel_for(other, "fa2") == kernel


def test_common_kernels_are_different_and_can_be_served() -> None:
    kernels = common_kernels("fa3")
    assert len(set(map(str, kernels))) == len(kernels)
    assert {(kernel.head_dim, kernel.value_dim) for kernel in kernels} == set(DIMS)


def test_prebuilt_kernels_are_there_without_any_tool(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.prebuilt = True
    monkeypatch.setenv("PATH", "")
    assert missing_tool() == "ninja"
    assert compiled(PLAIN)


def test_compiling_makes_what_is_missing_and_nothing_else(double: Double) -> None:
    assert not compiled(PLAIN)
    seen: list[tuple[int, int, str]] = []
    compile_kernels([PLAIN], progress=lambda *step: seen.append(step))
    assert compiled(PLAIN) and not compiled(WINDOWED)
    assert seen == [(0, 1, ""), (1, 1, "fa3 bfloat16, head dimension 128")]
    compile_kernels([PLAIN, WINDOWED])
    assert len(double.built) == 2


def test_kernels_older_than_their_sources_are_not_there(double: Double, tmp_path: Path) -> None:
    compile_kernels([PLAIN])
    program(tmp_path / "bin" / "ninja", "echo '[0/2] nvcc'")
    assert not compiled(PLAIN)


def test_a_cache_without_the_compiler_is_not_relied_on(double: Double, tmp_path: Path) -> None:
    compile_kernels([PLAIN])
    (tmp_path / "cuda" / "bin" / "nvcc").unlink()
    assert missing_tool() == "nvcc"
    assert not compiled(PLAIN)
    with pytest.raises(Unsupported, match="nvcc is not installed, and FlashInfer's kernels need"):
        compile_kernels([WINDOWED])


def test_a_compilers_error_is_one_line_and_the_others_are_done(double: Double) -> None:
    seen: list[bool] = []
    with pytest.raises(Unsupported) as caught:
        compile_kernels([OF_64, PLAIN], 2, lambda done, total, kernel: seen.append(bool(kernel)))
    assert str(caught.value) == "fa3 bfloat16, head dimension 64: ld: cannot find -lcuda"
    assert compiled(PLAIN)
    assert seen == [False, True]


def test_no_cuda_toolkit_at_all(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_cuda_path() -> str:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(sys.modules["flashinfer.jit.cpp_ext"], "get_cuda_path", get_cuda_path)
    assert missing_tool() == "nvcc"


@pytest.mark.parametrize(
    "error, says",
    [
        (RuntimeError("versions differ:\nx"), "flashinfer cannot be imported: versions differ:"),
        (ModuleNotFoundError("no", name="tvm_ffi"), "flashinfer needs tvm_ffi, which is not"),
        (ModuleNotFoundError("no", name="flashinfer"), r"pip install accel-graph\[flashinfer\]"),
    ],
)
def test_a_package_that_does_not_import(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> types.ModuleType:
        raise error

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(Unsupported, match=says) as caught:
        package()
    assert "\n" not in str(caught.value)
