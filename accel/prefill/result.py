"""What a prefill returns: logits, hidden states, and handles on cached keys and values."""

from __future__ import annotations

import operator
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel.prefill.kv_cache import KVCache


class Handle:
    """A prompt whose keys and values stay cached: `runner(prompts, prefix=handle)` goes on behind
    it, `release()` gives its pages back, and so does the end of the last reference."""

    def __init__(self, cache: KVCache, ids: Sequence[int], pages: Sequence[int]) -> None:
        self.cache, self.ids, self.pages = cache, array("q", ids), tuple(pages)
        self.made_of: object = None
        """The weights and the state of the model that computed them."""
        self._asked_for = False
        """Whether anyone has it but the result. Else its pages may go to a later call."""
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, cache.release, self.pages)

    @property
    def tokens(self) -> int:
        """Tokens that are cached."""
        return len(self.ids)

    @property
    def alive(self) -> bool:
        """Whether the pages are still held."""
        return self._end.alive

    def release(self) -> None:
        """Gives the pages back now; the handle is of no use afterwards."""
        self._end()

    def ask_for(self) -> bool:
        """From now on its pages go to no later call; False if they have gone already."""
        with self._lock:
            self._asked_for = True
            return self.alive

    def dismiss(self) -> bool:
        """Gives the pages back if nobody has asked for it, at the same time in another thread,
        say; False if there was nothing to give."""
        with self._lock:
            dismissed = self.alive and not self._asked_for
            if dismissed:
                self.release()
            return dismissed

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a layer's keys and values, each `[tokens, kv_heads, dim]`."""
        rows = self.cache.places(self.pages, self.tokens).to(self.cache.keys(layer).device)
        keys, values = self.cache.keys(layer), self.cache.values(layer)
        return keys.flatten(0, 1)[rows], values.flatten(0, 1)[rows]


class Result:
    """What one call of a runner computed. Tensors are copies: later calls leave them alone.

    `logits` is `[requests, vocab]`, after each prompt's last token. Where the runner caches, every
    prompt's keys and values stay until the result dies, `release` is called, or a later call needs
    their place; those that `handle` was asked for stay in any case.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        hidden: Sequence[torch.Tensor],
        handles: Sequence[Handle],
        hand_over: Callable[..., dict[str, Any]],
        layers: int,
    ) -> None:
        self.logits = logits
        self._hidden, self._handles = list(hidden), list(handles)
        self._hand_over, self._layers = hand_over, layers

    def __len__(self) -> int:
        return len(self._hidden)

    def hidden(self, i: int) -> torch.Tensor:
        """`[tokens, hidden]` of prompt `i`, as the head got them; a prefix's tokens are not in."""
        return self._hidden[i]

    def handle(self, i: int) -> Handle:
        """Prompt `i`, prefix included, in the cache. Raises ValueError if it is not there."""
        if not self._handles:
            raise ValueError("nothing is cached: prefill_runner(..., cache_tokens=) keeps keys")
        handle = self._handles[i]
        if not handle.ask_for():
            raise ValueError(
                f"prompt {i} is no longer cached, a later call took its place: ask for handle({i}) "
                "before, or raise cache_tokens="
            )
        return handle

    def generate_kwargs(self, first_tokens: Sequence[int] | torch.Tensor) -> dict[str, Any]:
        """Arguments for `model.generate`, which goes on behind `first_tokens`, one per prompt.
        Raises ValueError if they are not cached."""
        handles = [self.handle(i) for i in range(len(self))]
        if isinstance(first_tokens, torch.Tensor):
            first_tokens = first_tokens.flatten().tolist()
        try:
            first = [operator.index(token) for token in first_tokens]
        except TypeError as error:
            raise ValueError(f"first tokens are whole numbers, one a prompt: {error}") from None
        if len(first) != len(handles):
            raise ValueError(f"{len(first)} first tokens for {len(handles)} prompts")
        cached = [[h.keys_values(layer) for layer in range(self._layers)] for h in handles]
        return self._hand_over([h.ids for h in handles], first, cached)

    def release(self) -> None:
        """Gives all cached prompts back."""
        for handle in self._handles:
            handle.release()
