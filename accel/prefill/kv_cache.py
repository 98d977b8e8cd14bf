"""The paged key/value cache: where every layer's keys and values lie, and who holds which page.

Knows layers by their shapes. A page holds `page_size` tokens of one request, in every layer at the
same place. Pages are counted: a prefix that several requests continue is there once. One more page
than can be taken is the dummy page: padded rows are written there, and nothing reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from accel.prefill.slots import HOST

PAGE_SIZE = 16


class CacheFull(ValueError):
    """The cache has not enough free pages; the message says how many tokens are held.

    >>> raise CacheFull("full")
    Traceback (most recent call last):
    accel.prefill.kv_cache.CacheFull: full
    """


class KVCache:
    """Keys and values of all layers, in pages.

    `shapes` are (kv_heads, head_dim, value_dim), layer by layer; `tokens` is how many fit, rounded
    up to pages.

    >>> cache = KVCache([(2, 8, 8)], tokens=40, dtype=torch.float32, device=device)
    >>> cache.keys(0).shape, cache.pages, cache.dummy_page
    (torch.Size([4, 16, 2, 8]), 3, 3)
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self.page_size = page_size
        self.pages = self.pages_for(tokens)
        self.dummy_page = self.pages
        where = self.pages + 1, page_size
        # Zeros: what the dummy page holds is multiplied by zero somewhere, and 0 · NaN is NaN.
        self._keys = [
            torch.zeros(*where, heads, dim, dtype=dtype, device=device) for heads, dim, _ in shapes
        ]
        self._values = [
            torch.zeros(*where, heads, dim, dtype=dtype, device=device) for heads, _, dim in shapes
        ]
        self._free = list(range(self.pages))[::-1]
        self._holders = [0] * self.pages
        # Reentrant: the garbage collector may release a handle while this thread takes pages.
        self._lock = threading.RLock()

    def keys(self, layer: int) -> torch.Tensor:
        """`[pages + 1, page_size, kv_heads, head_dim]`, contiguous; the last page is the dummy."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """`[pages + 1, page_size, kv_heads, value_dim]`, contiguous."""
        return self._values[layer]

    @property
    def dummy_row(self) -> int:
        """The row (page · page_size + place) that padded tokens are written to."""
        return self.dummy_page * self.page_size

    @property
    def rows(self) -> int:
        """Tokens that fit."""
        return self.pages * self.page_size

    @property
    def nbytes(self) -> int:
        """Device memory of all layers, in bytes."""
        return sum(x.nbytes for x in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of all layers."""
        return [*self._keys, *self._values]

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit."""
        return len(self._free) * self.page_size

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """Puts `k` and `v`, `[n, kv_heads, dim]`, into the cache's rows `rows`, `[n]` int64."""
        self._keys[layer].flatten(0, 1).index_copy_(0, rows, k)
        self._values[layer].flatten(0, 1).index_copy_(0, rows, v)

    def places(self, pages: Sequence[int], tokens: int) -> torch.Tensor:
        """The rows of a request's first `tokens` tokens, given its pages: int64, on the host."""
        token = torch.arange(tokens, device=HOST)
        mine = torch.tensor(pages, dtype=torch.int64, device=HOST)
        return mine[token // self.page_size] * self.page_size + token % self.page_size

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` tokens of one request take."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> tuple[int, ...]:
        """Takes free pages. Raises `CacheFull`."""
        with self._lock:
            if count > len(self._free):
                held = (self.pages - len(self._free)) * self.page_size
                raise CacheFull(
                    f"the cache holds {held} of {self.rows} tokens and {count * self.page_size} "
                    "more are needed: let go of results and handles, or raise cache_tokens="
                )
            taken = tuple(self._free.pop() for _ in range(count))
            for page in taken:
                self._holders[page] = 1
            return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of `pages`. Raises ValueError if any has none: then it may be
        someone else's next."""
        with self._lock:
            if not all(self._holders[page] for page in pages):
                raise ValueError("a cached prefix was released while it was asked for")
            for page in pages:
                self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less; a page without any is free."""
        with self._lock:
            for page in pages:
                self._holders[page] -= 1
                if not self._holders[page]:
                    self._free.append(page)

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page in all layers: a request continues in a page that others go on reading."""
        for tensor in self.tensors:
            tensor[target].copy_(tensor[source])
