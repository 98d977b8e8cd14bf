"""What the built-in language model read, and what was kept from it: captions of random scenes.

Whether a caption is kept from the model follows from its letters alone, so that no seed of the
training can ever show it what it is later judged on. This module knows text, no tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from random import Random

from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.scene import random_scene

KEPT_BACK = 16
"""One caption in so many is kept from the training."""


def training_captions(seed: int) -> Iterator[str]:
    """Captions to learn from, without end; the seed decides which."""
    return (text for text in _captions(seed) if not is_held_out(text))


def held_out_captions(seed: int) -> Iterator[str]:
    """Captions that no training has seen, without end."""
    return (text for text in _captions(seed) if is_held_out(text))


def is_held_out(text: str) -> bool:
    """Whether this caption is kept from the training.

    >>> is_held_out("a red circle"), is_held_out("a gray star")
    (False, True)
    """
    return zlib.crc32(text.encode()) % KEPT_BACK == 0


def shuffled(text: str, rng: Random) -> str:
    """The words of `text` in another order. Raises ValueError where there is no other."""
    words = text.split()
    if len(set(words)) < 2:
        raise ValueError(f"the words of {text!r} have one order only")
    others = list(words)
    while others == words:
        rng.shuffle(others)
    return " ".join(others)


def _captions(seed: int) -> Iterator[str]:
    rng = Random(seed)
    while True:
        yield caption(random_scene(rng), rng)
