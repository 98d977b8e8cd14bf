"""FlashInfer's compiled kernels: which one a group needs, whether it is there, and compiling it.

Knows FlashInfer's cache of just-in-time compiled modules. Knows nothing of batches and plans.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel.prefill.attention import AttentionGroup, Unsupported

DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""(head_dim, value_dim) that the kernels are written for; the last one is latent attention's."""
Progress = Callable[[int, int, str], None]
"""Called with (kernels done, kernels to compile, the one just done; empty at the start)."""


@dataclass(frozen=True)
class Kernel:
    """One compiled module. It holds the ragged and the paged kernel of its kind.

    >>> str(Kernel("fa3", torch.bfloat16, 128, 128, window=True, softcap=False))
    'fa3 bfloat16, head dimension 128, window'
    """

    generation: str
    """`fa3` is written for Hopper alone, `fa2` runs everywhere."""
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    window: bool
    softcap: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        dim = " and ".join(map(str, dict.fromkeys((self.head_dim, self.value_dim))))
        extras = [", window"] * self.window + [", soft-cap"] * self.softcap
        return f"{self.generation} {name}, head dimension {dim}{''.join(extras)}"


def generation_for(capability: tuple[int, int]) -> str:
    """The kernels that a GPU of this compute capability takes.

    >>> generation_for((9, 0)), generation_for((8, 6)), generation_for((12, 0))
    ('fa3', 'fa2', 'fa2')
    """
    return "fa3" if capability[0] == 9 else "fa2"


def kernel_for(group: AttentionGroup, generation: str) -> Kernel:
    """The module that a group's layers run."""
    dims = group.head_dim, group.value_dim
    windowed, capped = group.window is not None, group.softcap is not None
    return Kernel(generation, group.dtype, *dims, windowed, capped)


def common_kernels(generation: str) -> list[Kernel]:
    """What common models need in bfloat16, the most common first: Llama, Qwen and Mistral; gpt-oss;
    Gemma 2 and 3; DeepSeek.

    >>> len(common_kernels("fa3"))
    9
    """
    plain, windowed = (False, False), (True, False)
    kinds = [((dim, dim), extras) for dim in (128, 64, 256) for extras in (plain, windowed)]
    kinds += [((256, 256), (window, True)) for window in (False, True)]
    kinds += [((192, 128), plain)]
    return [Kernel(generation, torch.bfloat16, *dims, *extras) for dims, extras in kinds]


def package() -> Any:
    """The package `flashinfer`. Raises `Unsupported` if it is absent or does not work here."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as missing:
        if missing.name != "flashinfer":
            raise Unsupported(f"flashinfer needs {missing.name}, which is not installed") from None
        raise Unsupported(
            "flashinfer is not installed: pip install accel-graph[flashinfer]"
        ) from None
    except Exception as why:  # it checks its versions and libraries when imported
        raise Unsupported(f"flashinfer cannot be imported: {_line(why)}") from why


def missing_tool() -> str | None:
    """What compiling needs and this machine lacks, or None."""
    if shutil.which("ninja") is None:
        return "ninja"
    try:
        home = importlib.import_module("flashinfer.jit.cpp_ext").get_cuda_path()
    except (RuntimeError, OSError):
        return "nvcc"
    return None if (Path(home) / "bin" / "nvcc").exists() else "nvcc"


def compiled(kernel: Kernel) -> bool:
    """Whether `kernel` can be loaded without compiling: it came with `flashinfer-jit-cache`, or it
    lies in FlashInfer's cache and ninja finds it newer than all that it was made from."""
    spec = _spec(kernel)
    if spec.is_aot:
        return True
    if missing_tool() is not None or not spec.jit_library_path.exists():
        return False
    spec.write_ninja()
    where = ["-C", str(spec.build_dir.resolve()), "-f", str(spec.ninja_path.resolve())]
    dry = subprocess.run(["ninja", "-n", *where], capture_output=True, text=True, check=False)
    return "no work to do" in dry.stdout


def compile_kernels(
    kernels: Sequence[Kernel], at_once: int = 1, progress: Progress | None = None
) -> None:
    """Compiles those of `kernels` that are not there, `at_once` side by side. A kernel's ten files
    are compiled side by side anyway.

    Raises `Unsupported` if compiling fails, with the compiler's first error; the others are done.
    """
    specs = {kernel: _spec(kernel) for kernel in kernels if not compiled(kernel)}
    if specs and (tool := missing_tool()):
        raise Unsupported(f"{tool} is not installed, and FlashInfer's kernels need compiling")
    if progress is not None and specs:
        progress(0, len(specs), "")
    failed: list[str] = []
    with ThreadPoolExecutor(at_once) as workers:
        running = {workers.submit(spec.build, False): kernel for kernel, spec in specs.items()}
        for done, future in enumerate(as_completed(running)):
            if (why := future.exception()) is not None:
                failed.append(f"{running[future]}: {_compiler_error(why)}")
            elif progress is not None:
                progress(done + 1, len(specs), str(running[future]))
    if failed:
        raise Unsupported("; ".join(failed))


def _spec(kernel: Kernel) -> Any:
    """FlashInfer's description of the module: its sources, where it is built, where it lies."""
    dtypes = kernel.dtype, kernel.dtype, kernel.dtype, torch.int32
    dims, no_rope, half_sums = (kernel.head_dim, kernel.value_dim), 0, False
    make = importlib.import_module("flashinfer.jit").gen_batch_prefill_module
    return make(
        kernel.generation, *dtypes, *dims, no_rope, kernel.window, kernel.softcap, half_sums
    )


def _compiler_error(why: BaseException) -> str:
    tells = "error", "cannot find"  # compilers say the first, linkers the second before it
    lines = [line.strip() for line in str(why).splitlines() if any(t in line for t in tells)]
    return lines[0] if lines else _line(why)


def _line(why: BaseException) -> str:
    return str(why).strip().partition("\n")[0] or type(why).__name__
