"""`accel doctor --prepare`: what it compiles, and what it says where it cannot."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.pipelines import doctor, machine
from accel.prefill import flashinfer_kernels
from accel.prefill.flashinfer_kernels import Kernel, common_kernels

Cli = Callable[..., Any]
H200 = {"name": "H200", "memory_bytes": 2**37, "capability": "9.0"}
A100 = {"name": "A100", "memory_bytes": 2**36, "capability": "8.0"}
T4 = {"name": "T4", "memory_bytes": 2**34, "capability": "7.5"}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The GPUs of a machine, and FlashInfer installed on it."""
    gpus: list[dict[str, Any]] = [H200]
    monkeypatch.setattr("accel.pipelines.machine.gpus", lambda: gpus)
    installed = doctor.versions.installed

    def version(package: str) -> str | None:
        return "0.6.13" if package == "flashinfer-python" else installed(package)

    monkeypatch.setattr("accel.pipelines.versions.installed", version)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    return gpus


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> set[Kernel]:
    """The kernels that are compiled."""
    there: set[Kernel] = set()

    class Spec:
        is_aot = False
        jit_library_path = Path("nowhere")

        def __init__(self, kernel: Kernel) -> None:
            self._kernel = kernel

        def build(self, verbose: bool) -> None:
            there.add(self._kernel)

    monkeypatch.setattr(flashinfer_kernels, "compiled", there.__contains__)
    monkeypatch.setattr(flashinfer_kernels, "_spec", Spec)
    monkeypatch.setattr(flashinfer_kernels, "missing_tool", lambda: None)
    return there


def test_every_kind_of_gpu_gets_its_kernels(
    gpus: list[dict[str, Any]], there: set[Kernel], accel_cli: Cli
) -> None:
    gpus += [A100, H200, T4]
    done = accel_cli("doctor", "--prepare")
    assert done.code == 0
    assert there == {*common_kernels("fa3"), *common_kernels("fa2")}
    assert "18 of 18 compiled" in done.out
    assert "accel: compiled fa3 bfloat16, head dimension 128" in done.err
    assert "(18 of 18)" in done.err


def test_json_stays_json_and_only_what_is_missing_is_compiled(
    gpus: list[dict[str, Any]], there: set[Kernel], accel_cli: Cli
) -> None:
    there |= set(common_kernels("fa3")[1:])
    done = accel_cli("doctor", "--prepare", "--json")
    findings = {found["name"]: found["value"] for found in json.loads(done.out)["findings"]}
    assert findings["flashinfer kernels"] == "9 of 9 compiled"
    assert done.complaint == f"accel: compiled {common_kernels('fa3')[0]} (1 of 1)"


def test_doctor_says_how_many_are_missing(
    gpus: list[dict[str, Any]], there: set[Kernel], accel_cli: Cli
) -> None:
    there.add(common_kernels("fa3")[0])
    done = accel_cli("doctor")
    assert "1 of 9 compiled" in done.out
    assert "flashinfer kernels: prefill passes over what is missing: `accel doctor --p" in done.out
    assert len(there) == 1


def test_a_package_that_does_not_import_is_no_end(
    gpus: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, accel_cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "flashinfer is not installed" in accel_cli("doctor").out


def test_without_a_gpu_there_is_nothing_to_compile(
    accel_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.pipelines.machine.gpus", list)
    done = accel_cli("doctor", "--prepare")
    assert done.code == 2
    assert "--prepare compiles kernels for an NVIDIA GPU, and there is none here" in done.complaint


def test_an_old_gpu_is_not_served(
    gpus: list[dict[str, Any]], there: set[Kernel], accel_cli: Cli
) -> None:
    gpus[:] = [T4]
    done = accel_cli("doctor", "--prepare")
    assert done.code == 2 and "need compute capability 8.0" in done.complaint


def test_the_package_absent_is_said_with_its_extra(
    gpus: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, accel_cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    done = accel_cli("doctor", "--prepare")
    assert done.code == 1
    assert "--prepare: flashinfer is not installed: pip install accel-graph[fl" in done.complaint


def test_no_compiler_is_said(
    gpus: list[dict[str, Any]],
    there: set[Kernel],
    monkeypatch: pytest.MonkeyPatch,
    accel_cli: Cli,
) -> None:
    monkeypatch.setattr(flashinfer_kernels, "missing_tool", lambda: "nvcc")
    done = accel_cli("doctor", "--prepare")
    assert done.code == 1
    assert "--prepare: nvcc is not installed, and FlashInfer's kernels need" in done.complaint


@pytest.mark.parametrize(
    ("cores", "gigabytes", "expected"), [(2, 16, 1), (16, 128, 2), (128, 560, 4), (64, 64, 1)]
)
def test_compilers_fit_the_machine(
    cores: int,
    gigabytes: int,
    expected: int,
    gpus: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(machine, "memory_bytes", lambda: gigabytes * 2**30)
    monkeypatch.setattr(
        flashinfer_kernels, "compile_kernels", lambda kernels, at_once, told: seen.append(at_once)
    )
    doctor.prepare()
    assert seen == [expected]
