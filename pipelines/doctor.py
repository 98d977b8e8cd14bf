"""What this machine has, what it lacks, and what was never tested. Looks, changes nothing, but for
`prepare`: that compiles what the GPUs here would else compile at first use.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accel.pipelines import machine, versions
from accel.pipelines.console import OnKernel
from accel.pipelines.errors import AccelError, BadInput, first_line

if TYPE_CHECKING:
    from accel.prefill.flashinfer_kernels import Kernel

CORES_PER_KERNEL, BYTES_PER_KERNEL = 8, 40 * 2**30
"""What compiling one kernel keeps busy: ten compilers that take gigabytes each."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `warning` says what it means for the person, None where all is well."""

    name: str
    value: str
    warning: str | None = None


def examine() -> list[Finding]:
    """Everything worth knowing here, versions first, then the machine."""
    return [*_packages(), *_cuda(), *_kernels(), *_host()]


def prepare(on_kernel: OnKernel | None = None) -> None:
    """Compiles FlashInfer's prefill kernels for the GPUs here, those that common models need. They
    stay in FlashInfer's cache; stopped half-way, it goes on where it was.

    Raises BadInput where there is nothing to compile for, AccelError if compiling fails.
    """
    from accel.prefill import flashinfer_kernels
    from accel.prefill.attention import Unsupported

    if not machine.gpus():
        raise BadInput("--prepare compiles kernels for an NVIDIA GPU, and there is none here")
    try:
        flashinfer_kernels.package()
        kernels = _common_kernels()
        if not kernels:
            raise BadInput("--prepare: FlashInfer's kernels need compute capability 8.0 or more")
        memory = (machine.memory_bytes() or 0) // BYTES_PER_KERNEL
        at_once = max(1, min(machine.cores() // CORES_PER_KERNEL, memory, 4))
        flashinfer_kernels.compile_kernels(kernels, at_once, on_kernel)
    except Unsupported as why:
        raise AccelError(f"--prepare: {why}") from None


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


def _common_kernels() -> list[Kernel]:
    """What common models need on the GPUs here, without those that are too old."""
    from accel.prefill.flashinfer_kernels import common_kernels, generation_for

    capabilities = [tuple(map(int, gpu["capability"].split("."))) for gpu in machine.gpus()]
    served = [(major, minor) for major, minor in capabilities if major >= 8]
    return [k for kind in sorted(set(map(generation_for, served))) for k in common_kernels(kind)]


def _kernels() -> list[Finding]:
    """How many of FlashInfer's kernels are compiled; nothing where it could not run."""
    name = "flashinfer kernels"
    if versions.installed("flashinfer-python") is None or not machine.gpus():
        return []
    try:
        from accel.prefill import flashinfer_kernels

        flashinfer_kernels.package()
        ready = [flashinfer_kernels.compiled(kernel) for kernel in _common_kernels()]
    except Exception as why:  # whatever a package raises that does not fit this machine
        return [Finding(name, "unknown", first_line(why))]
    lack = None if all(ready) else "prefill passes over what is missing: `accel doctor --prepare`"
    return [Finding(name, f"{sum(ready)} of {len(ready)} compiled", lack)]


def _gpu_words(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, sm {gpu['capability']}"


def _host() -> list[Finding]:
    memory = machine.memory_bytes()
    size = "unknown" if memory is None else f"{memory / 2**30:.0f} GiB"
    return [
        Finding("processor", f"{machine.processor()}, {machine.cores()} cores"),
        Finding("memory", size),
    ]
