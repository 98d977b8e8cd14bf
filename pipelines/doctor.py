"""What this machine has, what it lacks, and what was never tested. Looks, changes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from accel.pipelines import machine, versions
from accel.pipelines.errors import first_line


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `warning` says what it means for the person, None where all is well."""

    name: str
    value: str
    warning: str | None = None


def examine() -> list[Finding]:
    """Everything worth knowing here, versions first, then the machine."""
    return [*_packages(), *_cuda(), *_host()]


def to_dict(findings: list[Finding]) -> dict[str, Any]:
    """The findings as plain data, with the tested ranges."""
    return {
        "findings": [asdict(finding) for finding in findings],
        "warnings": [f"{f.name}: {f.warning}" for f in findings if f.warning],
        "tested": {name: list(bounds) for name, bounds in versions.TESTED.items()},
    }


def _packages() -> list[Finding]:
    found = [_package(name) for name in ("python", *versions.PACKAGES)]
    own = versions.installed(versions.DISTRIBUTION)
    return [Finding("accel", own or "not installed as a package"), *found]


def _package(name: str) -> Finding:
    version = versions.installed(name)
    if version is None:
        needless = {
            "triton": "absent: only needed on CUDA, where torch brings it",
            "flashinfer-python": "absent: optional",
        }
        if name in needless:
            return Finding(name, needless[name])
        return Finding(name, "absent", f"install it: pip install {name}")
    if name in versions.TESTED and versions.outside_tested(name, version):
        wanted = versions.tested_range(name)
        return Finding(name, version, f"outside the tested versions ({wanted}); it may still work")
    return Finding(name, version)


def _cuda() -> list[Finding]:
    try:
        import torch

        gpus = machine.gpus()
        built = torch.version.cuda
    except Exception as error:  # a broken installation raises whatever it likes
        return [Finding("cuda", "unknown", f"torch does not work here: {first_line(error)}")]
    driver = machine.nvidia_driver()
    found = [Finding("driver", driver or "no NVIDIA driver")]
    if gpus:
        found.append(Finding("cuda", built or "unknown"))
        return found + [Finding(f"gpu {i}", _gpu_words(gpu)) for i, gpu in enumerate(gpus)]
    if built is None:
        lack = "torch is built without CUDA: pipelines run eagerly, nothing is accelerated"
        if driver is not None:
            lack += "; there is an NVIDIA driver, so install a CUDA build of torch"
    else:
        lack = f"torch is built for CUDA {built} but finds no GPU: nothing is accelerated"
        lack += "; is the driver older than that?" if driver else "; no NVIDIA driver is loaded"
    return [*found, Finding("cuda", built or "none", lack)]


def _gpu_words(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, sm {gpu['capability']}"


def _host() -> list[Finding]:
    memory = machine.memory_bytes()
    size = "unknown" if memory is None else f"{memory / 2**30:.0f} GiB"
    return [
        Finding("processor", f"{machine.processor()}, {machine.cores()} cores"),
        Finding("memory", size),
    ]
