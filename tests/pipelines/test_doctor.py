import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.pipelines import doctor, machine, versions

Cli = Callable[..., Any]


def _found(name: str) -> doctor.Finding:
    return next(finding for finding in doctor.examine() if finding.name == name)


def test_doctor_prints_a_table_and_ends_well(accel_cli: Cli) -> None:
    done = accel_cli("doctor")
    assert (done.code, done.err) == (0, "")
    assert "diffusers" in done.out and "processor" in done.out


def test_doctor_gives_json(accel_cli: Cli) -> None:
    done = accel_cli("doctor", "--json")
    result = json.loads(done.out)
    assert done.code == 0
    names = {finding["name"] for finding in result["findings"]}
    assert {"python", "torch", "driver", "cuda", "memory", "processor"} <= names
    assert result["tested"]["torch"] == list(versions.TESTED["torch"])


def test_a_version_outside_the_tested_ones_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"torch": "9.1.0+cu999", "diffusers": "0.1"}
    monkeypatch.setattr(
        "accel.pipelines.versions.installed", lambda package: told.get(package, "5.20.0")
    )
    wanted = f"outside the tested versions ({versions.tested_range('torch')})"
    assert wanted in (_found("torch").warning or "")
    assert "outside the tested versions" in (_found("diffusers").warning or "")
    assert _found("transformers").warning is None


def test_a_missing_package_is_a_warning_unless_it_is_optional(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("accel.pipelines.versions.installed", lambda package: None)
    assert _found("peft").warning == "install it: pip install peft"
    assert _found("flashinfer-python").warning is None
    assert "optional" in _found("flashinfer-python").value


@pytest.mark.parametrize(
    ("built", "driver", "words"),
    [
        (None, None, "built without CUDA: pipelines run eagerly"),
        (None, "580.1", "install a CUDA build of torch"),
        ("13.0", None, "no NVIDIA driver is loaded"),
        ("13.0", "450.1", "is the driver older than that?"),
    ],
)
def test_what_cuda_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, built: str | None, driver: str | None, words: str
) -> None:
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("accel.pipelines.machine.gpus", list)
    monkeypatch.setattr("accel.pipelines.machine.nvidia_driver", lambda: driver)
    assert words in (_found("cuda").warning or "")
    assert _found("driver").value == (driver or "no NVIDIA driver")


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "A GPU", "memory_bytes": 80 * 2**30, "capability": "9.0"}
    monkeypatch.setattr("accel.pipelines.machine.gpus", lambda: [gpu])
    assert _found("gpu 0").value == "A GPU, 80 GiB, sm 9.0"
    assert _found("cuda").warning is None


def test_the_machine_has_a_name() -> None:
    assert machine.processor()
    assert machine.cores() >= 1
    assert (machine.memory_bytes() or 2**30) >= 2**28


@pytest.mark.parametrize(
    ("version", "outside"),
    [("2.11", False), ("2.11.0+cu130", False), ("2.13.1", False), ("2.10.9", True), ("2.14", True)],
)
def test_ranges_hold_at_their_own_precision(version: str, outside: bool) -> None:
    assert versions.outside_tested("torch", version) is outside


def test_the_readme_names_the_same_versions() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    text = " ".join(readme.read_text(encoding="utf-8").split())
    assert versions.tested_sentence() in text
