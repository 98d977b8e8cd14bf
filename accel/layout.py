"""How tensors lie in memory: bytes, strides, alignment, and others that lie alike.

Knows single tensors. Does not know why anyone needs another like one (breaks.py, recorded.py).
"""

from __future__ import annotations

import torch

from accel.backend import Backend

ALIGNMENT = 16
"""Bytes: what vectorised kernels look at when they choose how to read a tensor."""


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` as a flat uint8 tensor: comparing bytes, not numbers, sees NaN and -0.

    >>> bytes_of(torch.tensor(-0.0).expand(1)).tolist()
    [0, 0, 0, 128]
    """
    plain = x.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def misalignment(x: torch.Tensor, backend: Backend) -> int:
    """Bytes past an aligned address. A single element has no vectorised reads: 0, so that the
    timesteps of a schedule, views at ever other offsets, share one signature.

    >>> x = torch.ones(8, device=device)
    >>> misalignment(x, backend), misalignment(x[1:], backend)
    (0, 4)
    """
    off = backend.address(x) % ALIGNMENT
    return off if off and not x.is_cpu and x.numel() > 1 and distinct(x).numel() > 1 else 0


def distinct(x: torch.Tensor) -> torch.Tensor:
    """`x` without its repetitions: expanded dimensions (stride 0) cut to one element.

    >>> distinct(torch.ones(1).expand(3)).shape
    torch.Size([1])
    """
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def span(x: torch.Tensor) -> int:
    """How many elements of its storage lie between the first and the last of `x`, both included.

    >>> span(torch.ones(4)[::2])
    3
    """
    reach = sum((n - 1) * st for n, st in zip(x.shape, x.stride(), strict=True))
    return 1 + reach if x.numel() else 0


def overlaps(x: torch.Tensor) -> bool:
    """Whether two elements of `x` (without expanded dimensions) share memory.

    >>> overlaps(torch.ones(4).as_strided((2, 2), (1, 1))), overlaps(torch.ones(4)[::2])
    (True, False)
    """
    dims = sorted((st, n) for n, st in zip(x.shape, x.stride(), strict=True) if n > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def like_in_memory(x: torch.Tensor, backend: Backend) -> torch.Tensor:
    """An uninitialised tensor with the shape, exact strides, dtype, device and alignment of `x`;
    an empty one has an address too, to be told from others by.

    >>> like_in_memory(torch.ones(2, 3).t(), backend).stride()
    (1, 3)
    """
    skipped = misalignment(x, backend) // x.element_size()
    flat = torch.empty(skipped + max(span(x), 1), dtype=x.dtype, device=x.device)
    return laid_out(x, flat.untyped_storage(), skipped)


def laid_out(x: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """A tensor like `x` over other memory, which begins `offset` elements in. Not a view: its base
    would count as one more holder, and changes in place would not always be allowed.

    >>> x = torch.arange(4.0)
    >>> laid_out(x[:2], x.untyped_storage(), 2).tolist()
    [2.0, 3.0]
    """
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(storage, offset, x.size(), x.stride())
