"""Draws with the trained pipeline and judges the pictures: pass rates, contact sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image, ImageDraw

from accel.pipelines.demo import translate
from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.measuring import Expectation
from accel.pipelines.demo.scene import random_scene
from accel.pipelines.demo.vocabulary import SHAPES
from demo_training.parts import scheduler
from demo_training.studio import Studio

Prompt = tuple[str, int, Expectation]
"""Text, seed, what the picture must show."""


@dataclass(frozen=True)
class Settings:
    """How pictures are sampled."""

    steps: int
    guidance: float
    shift: float


def sample(
    pipe: StableDiffusionPipeline,
    prompts: Sequence[Prompt],
    settings: Settings,
    batch: int = 128,
) -> list[Image.Image]:
    """One picture for each prompt; a seed's noise is the same on every device."""
    pipe.scheduler = scheduler(settings.shift)
    pictures: list[Image.Image] = []
    for low in range(0, len(prompts), batch):
        some = prompts[low : low + batch]
        # Searching for the fastest convolutions takes longer than so few calls.
        with torch.backends.cudnn.flags(enabled=True, benchmark=False):
            pictures += pipe(
                [translate(text) for text, *_ in some],
                num_inference_steps=settings.steps,
                guidance_scale=settings.guidance,
                generator=[torch.Generator("cpu").manual_seed(seed) for _, seed, _ in some],
            ).images
    return pictures


def random_prompts(count: int, seed: int) -> list[Prompt]:
    """Prompts in random wording whose pictures can be measured."""
    rng = Random(seed)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        scene = random_scene(rng)
        text = caption(scene, rng)
        expected = Expectation.of_scene(scene)
        if expected is not None and _is_explicit(text, expected):
            prompts.append((text, len(prompts), expected))
    return prompts


def _is_explicit(text: str, expected: Expectation) -> bool:
    """Whether the wording leaves nothing out that is expected (a colour, the background)."""
    words = text.split()
    open_words = ("shape", "thing", "object", "shapes", "things", "objects")
    named = sum(things.colour in words for things in expected.things)
    return (
        named == len(expected.things)
        and expected.background in text
        and not any(word in words for word in open_words)
    )


@dataclass(frozen=True)
class Verdict:
    """What is wrong with each picture, in order; nothing for one that shows what it should."""

    faults: list[list[str]]

    @property
    def passed(self) -> int:
        """Pictures with the right colours, counts and places, whatever their silhouettes."""
        return sum(all(map(_is_about_shape, lines)) for lines in self.faults)

    def __str__(self) -> str:
        strictly = sum(not lines for lines in self.faults)
        return f"{self.passed} of {len(self.faults)} pass, {strictly} with shapes"


def _is_about_shape(complaint: str) -> bool:
    return complaint.rpartition(", not ")[2] in SHAPES


def judge(
    studio: Studio, pictures: Sequence[Image.Image], expected: Sequence[Expectation]
) -> Verdict:
    """Compares each picture with what it should show."""
    pixels = [np.asarray(picture) for picture in pictures]
    return Verdict(studio.judge([(p, e, True) for p, e in zip(pixels, expected, strict=True)]))


def contact_sheet(
    pictures: Sequence[Image.Image], titles: Sequence[str], path: Path, columns: int = 10
) -> None:
    """Thumbnails in rows, each with its title below it."""
    side, below = 144, 44
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (side + 6), rows * (side + below)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        x, y = index % columns * (side + 6), index // columns * (side + below)
        sheet.paste(picture.resize((side, side), Image.Resampling.LANCZOS), (x, y))
        for line in range(4):
            pen.text((x, y + side + 10 * line), title[line * 25 : line * 25 + 25], fill="black")
    sheet.save(path)


def add_strip(pictures: Sequence[Image.Image], path: Path) -> None:
    """Appends one row of thumbnails to the picture at `path`: progress over time."""
    side = 96
    rows = Image.open(path).convert("RGB") if path.exists() else Image.new("RGB", (0, 0))
    width = max(rows.width, side * len(pictures))
    grown = Image.new("RGB", (width, rows.height + side), "white")
    grown.paste(rows, (0, 0))
    for index, picture in enumerate(pictures):
        grown.paste(picture.resize((side, side)), (index * side, rows.height))
    grown.save(path)
