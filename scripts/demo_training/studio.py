"""Worker processes that draw captioned scenes and judge pictures.

It knows processes and pixels; what a scene is, `accel.pipelines.demo` knows, and nothing here knows
of the device.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.drawing import draw_scene
from accel.pipelines.demo.measuring import Expectation, complaints
from accel.pipelines.demo.scene import random_scene

CAPTIONS = 8
"""Wordings for each scene."""

CHUNK = 250
"""Scenes that a worker draws at a time."""

Tokenize = Callable[[str], list[int]]
"""A text's token ids, always the same number of them."""

Judged = tuple[NDArray[np.uint8], Expectation, bool]

_sheets: NDArray[np.uint8] | None = None  # in a worker: pixels shared with the parent
_tokenize: Tokenize | None = None


class Studio:
    """Draws `scenes` scenes in the background, a few chunks ahead of whoever collects them.

    Made before the device is touched: the workers are forks of this process, and a fork of a
    process that holds CUDA may not use it. Workers also tokenize: in the parent, turning texts
    into lists of numbers would hold the interpreter's lock that training needs.
    """

    def __init__(self, scenes: int, side: int, workers: int, seed: int, tokenize: Tokenize) -> None:
        self.scenes = max(CHUNK, scenes // CHUNK * CHUNK)
        self.side, self.seed = side, seed
        self.tokens = len(tokenize(""))
        shape = (2 * workers, CHUNK, side, side, 3)
        # An anonymous map is shared by forks whatever the size of /dev/shm.
        self._sheets = np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), np.uint8).reshape(shape)
        self._free = list(range(len(self._sheets)))
        self._lent: int | None = None
        self._asked: list[tuple[int, AsyncResult[NDArray[np.int16]]]] = []
        self._chunks = iter(range(self.scenes // CHUNK))
        self._pool: Pool = get_context("fork").Pool(workers, _open, (self._sheets, tokenize))
        self._ask()

    def collect(self) -> tuple[NDArray[np.uint8], NDArray[np.int16]] | None:
        """A finished chunk, None while there is none: pixels (`CHUNK`, side, side, 3), good until
        the next call, and tokens (`CHUNK`, `CAPTIONS`, length)."""
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None
            self._ask()
        for place, (sheet, answer) in enumerate(self._asked):
            if answer.ready():
                del self._asked[place]
                self._lent = sheet
                return self._sheets[sheet], answer.get()
        return None

    def judge(self, work: Sequence[Judged]) -> list[list[str]]:
        """The complaints about each (picture, expectation, whether shapes count)."""
        verdicts: list[list[str]] = self._pool.map(_judge, work, chunksize=4)
        return verdicts

    def close(self) -> None:
        """Ends the workers."""
        self._pool.terminate()
        self._pool.join()

    def _ask(self) -> None:
        while self._free and (chunk := next(self._chunks, None)) is not None:
            sheet = self._free.pop()
            answer = self._pool.apply_async(_draw_chunk, (self.seed, chunk, sheet))
            self._asked.append((sheet, answer))


def _open(sheets: NDArray[np.uint8], tokenize: Tokenize) -> None:
    global _sheets, _tokenize
    _sheets, _tokenize = sheets, tokenize


def _draw_chunk(seed: int, chunk: int, sheet: int) -> NDArray[np.int16]:
    assert _sheets is not None and _tokenize is not None
    rng = Random(seed * 1_000_003 + chunk)
    tokens = []
    for pixels in _sheets[sheet]:
        scene = random_scene(rng)
        pixels[:] = np.asarray(draw_scene(scene, pixels.shape[0], rng))
        tokens.append([_tokenize(caption(scene, rng)) for _ in range(CAPTIONS)])
    return np.array(tokens, dtype=np.int16)


def _judge(work: Judged) -> list[str]:
    pixels, expected, shapes = work
    return complaints(Image.fromarray(pixels), expected, shapes=shapes)


def drawn_scenes(number: int, side: int, seed: int) -> list[tuple[Image.Image, Expectation]]:
    """Random scenes that can be measured, drawn, with what they show."""
    rng = Random(seed)
    found: list[tuple[Image.Image, Expectation]] = []
    while len(found) < number:
        scene = random_scene(rng)
        expected = Expectation.of_scene(scene)
        if expected is not None:
            found.append((draw_scene(scene, side, rng), expected))
    return found
