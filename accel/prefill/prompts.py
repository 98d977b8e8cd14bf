"""A call's prompts: what is wrong with them, and where their keys and values go.

Knows ids, prefixes and pages. Does not know how they are run.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel.prefill.batch import Request
from accel.prefill.kv_cache import CacheFull, KVCache
from accel.prefill.model import PrefillModel
from accel.prefill.passes import Piece
from accel.prefill.result import Handle


@dataclass
class Prompt:
    """New token ids behind a cached prefix, and the pages of both once there are some."""

    ids: array[int]
    prefix: Handle | None = None
    pages: tuple[int, ...] = ()

    @property
    def cached(self) -> int:
        """Tokens of the prefix."""
        return self.prefix.tokens if self.prefix else 0

    def request(self, piece: Piece, cache: KVCache | None) -> Request:
        """The request for a piece of this prompt: what lies before it is cached by then. Pages for
        what comes later are not in it: the number of keys is told from them."""
        pages = cache.pages_for(self.cached + piece.stop) if cache else 0
        return Request(
            self.ids[piece.start : piece.stop], self.cached + piece.start, self.pages[:pages]
        )


class Guests:
    """Cached prompts that nobody has asked for: they stay as long as there is room."""

    def __init__(self) -> None:
        self._handles: list[weakref.ref[Handle]] = []

    def add(self, handles: Sequence[Handle]) -> None:
        """Takes note of a call's prompts."""
        alive = [handle for handle in self._handles if handle() is not None]
        self._handles = [*alive, *map(weakref.ref, handles)]

    def dismiss_one(self) -> bool:
        """Gives the oldest one's pages back; False if there is none."""
        while self._handles:
            handle = self._handles.pop(0)()
            if handle is not None and handle.dismiss():
                return True
        return False


class Prompts:
    """The prompts of one call. With a cache, each has a handle that holds its pages."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = list(prompts)
        self.handles: list[Handle] = []

    def take_pages(self, cache: KVCache, guests: Guests, catch_up: Callable[[], None]) -> None:
        """Gives every prompt its pages; `guests` go where they are needed. Raises `CacheFull`.
        Whoever held a page until now may still read it on the device: `catch_up` comes after that,
        and before anything is written."""
        while True:
            try:
                self._take_pages(cache, catch_up)
                break
            except CacheFull:
                if not guests.dismiss_one():
                    raise
        guests.add(self.handles)
        catch_up()

    def _take_pages(self, cache: KVCache, catch_up: Callable[[], None]) -> None:
        """Full pages of a prefix are shared, a part-filled one is copied, since others may go on in
        it. Raises `CacheFull`, holding nothing then."""
        try:
            for prompt in self.prompts:
                prompt.pages = _pages(cache, prompt, catch_up)
                whole = prompt.prefix.ids + prompt.ids if prompt.prefix else prompt.ids
                self.handles.append(Handle(cache, whole, prompt.pages))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives all pages back."""
        for handle in self.handles:
            handle.release()
        self.handles = []


def _pages(cache: KVCache, prompt: Prompt, catch_up: Callable[[], None]) -> tuple[int, ...]:
    shared, part = divmod(prompt.cached, cache.page_size)
    needed = cache.pages_for(prompt.cached + len(prompt.ids))
    if prompt.prefix is None:
        return cache.take(needed)
    with _held(cache, prompt.prefix):
        fresh = cache.take(needed - shared)
        cache.share(prompt.prefix.pages[:shared])
        if part:
            catch_up()
            cache.copy_page(prompt.prefix.pages[shared], fresh[0])
        return (*prompt.prefix.pages[:shared], *fresh)


@contextlib.contextmanager
def _held(cache: KVCache, prefix: Handle) -> Iterator[None]:
    """Keeps a prefix's pages: another thread may release the handle at any time, and what is taken
    next would be these pages. Raises ValueError if it has."""
    cache.share(prefix.pages)
    try:
        if not prefix.alive:  # released before, and its pages taken by another prompt of this call
            raise ValueError("a cached prefix was released while it was asked for")
        yield
    finally:
        cache.release(prefix.pages)


def open_prompts(
    model: PrefillModel,
    prompts: Sequence[Sequence[int]],
    prefix: Handle | Sequence[Handle | None] | None = None,
    cache: KVCache | None = None,
) -> Prompts:
    """Checked prompts; prefixes must lie in `cache`. Raises ValueError in one line for the first
    that cannot be run."""
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.tolist()
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__"):
        kind = type(prompts).__name__
        raise ValueError(f"prompts are a list of lists of token ids, this is one {kind}")
    if not len(prompts):
        raise ValueError("no prompts: at least one list of token ids is needed")
    prefixes = _prefixes(len(prompts), prefix, cache)
    vocab_size = model.vocab_size
    ids = [_ids(i, prompt, vocab_size) for i, prompt in enumerate(prompts)]
    _check_range(ids, vocab_size)
    return Prompts([Prompt(mine, before) for mine, before in zip(ids, prefixes, strict=True)])


def _ids(i: int, prompt: Sequence[int] | torch.Tensor, vocab_size: int) -> array[int]:
    if isinstance(prompt, (str, bytes)):
        raise ValueError(f"prompt {i} is a string: give token ids, tokenizer(text).input_ids")
    tokens: object = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
    if not isinstance(tokens, Iterable):
        raise ValueError(f"prompt {i} is {tokens!r}: a prompt is a list of token ids")
    found = [*tokens]
    if not found:
        raise ValueError(f"prompt {i} is empty: a prompt has at least one token")
    try:
        return array("q", found)
    except (TypeError, OverflowError) as error:
        raise _objection(i, found, vocab_size) or error from None


def _check_range(prompts: Sequence[array[int]], vocab_size: int) -> None:
    """Raises ValueError for ids that are none. Looks at those of all prompts at once."""
    low, high = torch.frombuffer(bytearray().join(prompts), dtype=torch.int64).aminmax()
    if low.item() < 0 or high.item() >= vocab_size:
        found = (_objection(i, ids, vocab_size) for i, ids in enumerate(prompts))
        raise next(why for why in found if why is not None)


def _objection(i: int, tokens: Iterable[Any], vocab_size: int) -> ValueError | None:
    """What is wrong with the first of prompt `i`'s tokens with which something is."""
    for token in tokens:
        try:
            number = operator.index(token)
        except TypeError:
            return ValueError(f"prompt {i} holds {token!r}: token ids are whole numbers")
        if not 0 <= number < vocab_size:
            return ValueError(
                f"prompt {i} holds the id {number}: ids go from 0 to {vocab_size - 1}"
            )
    return None


def _prefixes(
    count: int, prefix: Handle | Sequence[Handle | None] | None, cache: KVCache | None
) -> Sequence[Handle | None]:
    prefixes = [prefix] * count if prefix is None or isinstance(prefix, Handle) else list(prefix)
    if len(prefixes) != count:
        raise ValueError(f"{len(prefixes)} prefixes for {count} prompts")
    for i, handle in enumerate(prefixes):
        if handle is not None and not handle.alive:
            raise ValueError(f"the prefix of prompt {i} was released")
        if handle is not None and handle.cache is not cache:
            raise ValueError(f"the prefix of prompt {i} lies in another runner's cache")
    return prefixes
