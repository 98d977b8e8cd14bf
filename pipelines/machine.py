"""The machine in words and numbers: processor, memory, GPU, driver."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def processor() -> str:
    """The processor's name, as its maker calls it where the system says so."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Bytes of main memory, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def free_memory_bytes() -> int | None:
    """Bytes of main memory that a process could have now, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((1024 * int(kibibytes) for kibibytes in found), None)


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver, whether or not torch can use it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or the processor's name for the CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def threads(device: torch.device) -> int | None:
    """How many threads an operation is shared out to, which decides the order of its sums and so
    the last bits; None where `device` is not the CPU."""
    import torch

    return torch.get_num_threads() if device.type == "cpu" else None


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes and compute capability of every CUDA GPU that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
        }
        for gpu in properties
    ]


def synchronize(device: torch.device) -> None:
    """Waits until `device` has no work left; nothing to do on the CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
