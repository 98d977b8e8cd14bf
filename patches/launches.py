"""Launches of Triton's kernels, which after the first of a kind cost the host little.

Knows what of its arguments a compiled kernel depends on, on NVIDIA's devices; neither what a kernel
computes nor Triton itself: kernels are given.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch

ALIGNED = 16
"""Addresses (in bytes) and numbers that are multiples of it lead to another kernel than others."""

_compiled: dict[Hashable, Any] = {}
"""Kept as long as Triton keeps them itself, which tells no fewer kinds apart."""
_compiling = threading.Lock()
"""Between compiling and loading, Triton shows other threads a kernel that is not there yet."""


def launch(
    kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], shape: dict[str, int], warps: int = 4
) -> None:
    """Launches `kernel` on the device of its first argument. `shape` has its constants, in the
    order of its parameters, which come after all `args`. Triton's own way from arguments to what it
    compiled for them takes the host 40 us: others of the same kind lead there at once.

    >>> said = []
    >>> class Compiled:
    ...     def __getitem__(self, grid):
    ...         return lambda *args: said.append(("kept", grid, *args[1:]))
    >>> class Kernel:
    ...     fn = print
    ...     def __getitem__(self, grid):
    ...         return lambda *args, **more: said.append(("anew", grid, more)) or Compiled()
    >>> kernel, x = Kernel(), torch.ones(4)
    >>> launch(kernel, (1, 1), (x, 3), {"WIDTH": 8})
    >>> launch(kernel, (2, 1), (x, 5), {"WIDTH": 8})
    >>> said
    [('anew', (1, 1), {'WIDTH': 8, 'num_warps': 4}), ('kept', (2, 1, 1), 5, 8)]
    """
    key = kernel.fn, args[0].device, warps, *map(kind_of, args), *shape.values()
    known = _compiled.get(key)
    with torch.cuda.device_of(args[0]):
        if known is not None:
            known[*grid, 1](*args, *shape.values())
            return
        with _compiling:  # interpreted kernels give None, and are asked again
            _compiled[key] = kernel[grid](*args, **shape, num_warps=warps)


def kind_of(argument: Any) -> Hashable:
    """What of an argument Triton compiles for: of a tensor its precision and whether wide loads may
    begin there; of an integer whether it is one, how it divides, and whether 32 bits hold it.

    >>> kind_of(48) == kind_of(160), kind_of(48) == kind_of(50), kind_of(0.5) == kind_of(2.5)
    (True, False, True)
    """
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED == 0
    if type(argument) is int:
        return argument == 1, argument % ALIGNED == 0, -(2**31) <= argument < 2**31
    return type(argument).__name__
