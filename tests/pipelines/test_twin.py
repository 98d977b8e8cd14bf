from typing import Any

import pytest

from accel.pipelines import tiny
from accel.pipelines.generation import make
from accel.pipelines.settings import Settings
from accel.pipelines.twin import twin

SETTINGS = Settings("a red circle", seed=1, steps=2, width=64, height=64)


@pytest.mark.parametrize("name", ["sd15", "flux", "zimage"])
def test_a_twin_makes_the_same_picture_from_the_same_weights(name: str) -> None:
    pipe = tiny.pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    other = twin(pipe)
    for module, copy in _modules(pipe, other):
        assert module is not copy
        for first, second in zip(module.parameters(), copy.parameters(), strict=True):
            assert first is second
    assert other.tokenizer is pipe.tokenizer
    assert other.scheduler is not pipe.scheduler
    first, second = make(pipe, SETTINGS, latents=True), make(other, SETTINGS, latents=True)
    assert first.image.tobytes() == second.image.tobytes()


def test_what_is_done_to_a_twin_leaves_the_original_alone() -> None:
    pipe = tiny.pipeline("sd15")
    pipe.set_progress_bar_config(disable=True)
    before = make(pipe, SETTINGS).image.tobytes()
    other = twin(pipe)
    other.unet.forward = None
    other.vae = None
    assert make(pipe, SETTINGS).image.tobytes() == before


def _modules(pipe: Any, other: Any) -> list[tuple[Any, Any]]:
    names = [n for n, c in pipe.components.items() if hasattr(c, "parameters")]
    assert names
    return [(getattr(pipe, n), getattr(other, n)) for n in names]
