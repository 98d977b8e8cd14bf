"""Draws captioned scenes in worker processes and keeps them, with their tokens, on the device.

It knows processes and tensors; what a scene is, `accel.pipelines.demo` knows.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_context
from multiprocessing.pool import Pool
from multiprocessing.synchronize import Event
from random import Random

import numpy as np
import torch
from PIL import Image

from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.drawing import draw_scene
from accel.pipelines.demo.measuring import Expectation, complaints
from accel.pipelines.demo.scene import random_scene

CAPTIONS = 8
"""Wordings for each scene."""

CHUNK = 250
"""Scenes that a worker draws at a time."""

_canvas: np.ndarray | None = None  # in a worker: every scene's pixels, shared with the parent
_stopped: Event | None = None  # in a worker: whether drawing is over

Judged = tuple[np.ndarray, Expectation, bool]


class Studio:
    """Worker processes that draw scenes, and later judge pictures.

    Made before the device is touched: the workers are forks of this process, and a fork of a
    process that holds CUDA may not use it.
    """

    def __init__(self, scenes: int, side: int, workers: int, seed: int) -> None:
        self.scenes = max(CHUNK, scenes // CHUNK * CHUNK)
        self.side = side
        shape = (self.scenes, side, side, 3)
        # An anonymous map is shared by forks whatever the size of /dev/shm.
        self.pixels = np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), np.uint8).reshape(shape)
        context = get_context("fork")
        self._stopped = context.Event()
        self._pool: Pool = context.Pool(workers, _open, (self.pixels, self._stopped))
        jobs = [(seed, chunk) for chunk in range(self.scenes // CHUNK)]
        self._drawn = self._pool.imap_unordered(_draw_chunk, jobs)

    def drawn(self) -> Iterable[tuple[int, list[str]]]:
        """(first scene, captions of `CHUNK` scenes, `CAPTIONS` each) as they are finished."""
        return self._drawn

    def stop_drawing(self) -> None:
        """Leaves the scenes that nobody has begun undrawn."""
        self._stopped.set()

    def judge(self, work: Sequence[Judged]) -> list[list[str]]:
        """The complaints about each (picture, expectation, whether shapes count)."""
        return self._pool.map(_judge, work, chunksize=4)

    def close(self) -> None:
        """Ends the workers."""
        self._pool.terminate()


def _open(pixels: np.ndarray, stopped: Event) -> None:
    global _canvas, _stopped
    _canvas, _stopped = pixels, stopped


def _draw_chunk(job: tuple[int, int]) -> tuple[int, list[str]]:
    assert _canvas is not None and _stopped is not None
    seed, chunk = job
    if _stopped.is_set():
        return chunk * CHUNK, []
    rng = Random(seed * 1_000_003 + chunk)
    texts: list[str] = []
    for index in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        scene = random_scene(rng)
        _canvas[index] = np.asarray(draw_scene(scene, _canvas.shape[1], rng))
        texts += [caption(scene, rng) for _ in range(CAPTIONS)]
    return chunk * CHUNK, texts


def _judge(work: Judged) -> list[str]:
    pixels, expected, shapes = work
    return complaints(Image.fromarray(pixels), expected, shapes=shapes)


class Dataset:
    """Scenes on the device, growing while they are drawn: pixels (uint8) or latents, tokens."""

    def __init__(
        self,
        studio: Studio,
        tokenize: Callable[[list[str]], torch.Tensor],
        device: torch.device,
    ) -> None:
        count, side = studio.scenes, studio.side
        self.device = device
        self._studio = studio
        self.pixels = torch.empty((count, side, side, 3), dtype=torch.uint8, device=device)
        length = tokenize([""]).shape[1]
        self.tokens = torch.empty((count, CAPTIONS, length), dtype=torch.int16, device=device)
        self.latents: torch.Tensor | None = None
        self.ready = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._collect, args=(studio, tokenize), daemon=True)
        self._thread.start()

    def _collect(self, studio: Studio, tokenize: Callable[[list[str]], torch.Tensor]) -> None:
        try:
            for first, texts in studio.drawn():
                if not texts:
                    continue
                low, high = self.ready, self.ready + CHUNK
                self.pixels[low:high] = torch.from_numpy(studio.pixels[first : first + CHUNK]).to(
                    self.device
                )
                tokens = tokenize(texts).to(torch.int16).view(CHUNK, CAPTIONS, -1)
                self.tokens[low:high] = tokens.to(self.device)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.ready = high
        except BaseException as error:
            self.error = error
            raise

    def wait_for(self, scenes: int) -> None:
        """Returns when at least `scenes` are ready (all of them, if there are fewer)."""
        while self.ready < min(scenes, len(self.pixels)) and self.error is None:
            self._thread.join(0.05)
        if self.error is not None:
            raise RuntimeError("drawing scenes failed") from self.error

    def finish(self) -> None:
        """Ends the drawing: what is ready now is all there will be."""
        self._studio.stop_drawing()
        self._thread.join()
        self.wait_for(0)

    def crops(self, count: int, side: int) -> torch.Tensor:
        """(count, 3, side, side) squares cut out of random pictures, in [-1, 1], float32."""
        chosen = torch.randint(self.ready, (count,), device=self.device)
        room = self.pixels.shape[1] - side + 1
        corners = torch.randint(room, (2, count, 1), device=self.device)
        rows, columns = corners + torch.arange(side, device=self.device)
        return as_signal(self.pixels[chosen[:, None, None], rows[:, :, None], columns[:, None]])

    def latents_and_tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random latents, float32, each with the tokens of one of its captions, int64."""
        assert self.latents is not None
        chosen = torch.randint(len(self.latents), (count,), device=self.device)
        wording = torch.randint(CAPTIONS, (count,), device=self.device)
        return self.latents[chosen].float(), self.tokens[chosen, wording].long()


def as_signal(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 (n, height, width, 3) as float32 (n, 3, height, width) in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)
