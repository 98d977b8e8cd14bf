"""The shipped weights: 60 prompts from the demo's world, judged on the pixels at fixed seeds."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel.pipelines.demo import (
    DEFAULT_GUIDANCE,
    DEFAULT_STEPS,
    SIZE,
    demo_folder,
    load_demo,
    translate,
)
from accel.pipelines.demo.measuring import Expectation, complaints

PROMPTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "prompts.json").read_text(encoding="utf-8")
)
pytestmark = pytest.mark.timeout(900)  # sixty pictures, on whatever machine this is

NEEDED = 54
BATCH = 12


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    pipe = load_demo()
    drawn: list[Image.Image] = []
    for low in range(0, len(PROMPTS), BATCH):
        some = PROMPTS[low : low + BATCH]
        drawn += pipe(
            [translate(entry["prompt"]) for entry in some],
            num_inference_steps=DEFAULT_STEPS,
            guidance_scale=DEFAULT_GUIDANCE,
            generator=[torch.Generator().manual_seed(entry["seed"]) for entry in some],
        ).images
    return drawn


def test_at_least_54_of_60_prompts_show_what_they_ask_for(pictures: list[Image.Image]) -> None:
    assert len({entry["prompt"] for entry in PROMPTS}) == 60
    failures = {
        entry["prompt"]: found
        for entry, picture in zip(PROMPTS, pictures, strict=True)
        if (found := complaints(picture, Expectation.from_dict(entry), shapes=False))
    }
    assert len(PROMPTS) - len(failures) >= NEEDED, failures


def test_most_silhouettes_are_the_shapes_asked_for(pictures: list[Image.Image]) -> None:
    right = sum(
        not complaints(picture, Expectation.from_dict(entry))
        for entry, picture in zip(PROMPTS, pictures, strict=True)
    )
    assert right >= 48


def test_pictures_are_full_size_and_differ(pictures: list[Image.Image]) -> None:
    assert {picture.size for picture in pictures} == {(SIZE, SIZE)}
    stack = np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures])
    assert stack.std(axis=0).mean() > 40  # between pictures
    assert (stack.std(axis=(1, 2)).max(axis=1) > 5).all()  # within each


def test_the_folder_is_a_stock_pipeline_for_a_process_without_accel(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from diffusers import DiffusionPipeline\n"
        "pipe = DiffusionPipeline.from_pretrained(sys.argv[1])\n"
        "pipe('a red circle on a blue background').images[0].save(sys.argv[2])\n"
        "assert not any(name.split('.')[0] == 'accel' for name in sys.modules)\n"
    )
    out = tmp_path / "circle.png"
    subprocess.run([sys.executable, "-c", code, str(demo_folder()), str(out)], check=True)
    assert Image.open(out).size == (SIZE, SIZE)


def test_the_weights_are_safetensors_and_fit_into_12_megabytes() -> None:
    files = [path for path in demo_folder().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


def test_one_picture_takes_less_than_three_seconds_even_on_one_core() -> None:
    pipe = load_demo()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pipe("a red circle", num_inference_steps=1)
        begin = time.process_time()  # processor time: a busy machine does not count
        pipe("a red circle", num_inference_steps=DEFAULT_STEPS, guidance_scale=DEFAULT_GUIDANCE)
        assert time.process_time() - begin < 3
    finally:
        torch.set_num_threads(threads)
