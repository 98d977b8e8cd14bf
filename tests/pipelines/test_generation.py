from typing import Any

import pytest
import torch

from accel.pipelines import tiny
from accel.pipelines.errors import AccelError, BadInput
from accel.pipelines.generation import (
    call_arguments,
    call_defaults,
    completed,
    guidance_argument,
    make,
    with_size,
)
from accel.pipelines.settings import Settings

SETTINGS = Settings("a red circle", seed=1, steps=2, width=64, height=64)


@pytest.fixture(scope="module")
def pipe() -> Any:
    made = tiny.pipeline("sd15")
    made.set_progress_bar_config(disable=True)
    return made


class Unconditional:
    """A pipeline that takes no prompt."""

    def __call__(self, batch_size: int = 1, num_inference_steps: int = 10) -> None: ...


def test_arguments_carry_the_pipelines_own_names(pipe: Any) -> None:
    settings = SETTINGS.changed(guidance=2.0, negative_prompt="blue", extra={"clip_skip": 1})
    assert call_arguments(pipe, settings) == {
        "prompt": "a red circle",
        "negative_prompt": "blue",
        "num_inference_steps": 2,
        "guidance_scale": 2.0,
        "width": 64,
        "height": 64,
        "clip_skip": 1,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"negative_prompt": "x"}, "--negative-prompt: Unconditional takes no negative_prompt"),
        ({"guidance": 2.0}, "--guidance: Unconditional takes no guidance_scale"),
        ({"width": 64, "height": 64}, "--size: Unconditional takes no width"),
        ({"prompt": "x"}, "a prompt: Unconditional takes no prompt"),
        ({"extra": {"eta": 1}}, "--set eta: Unconditional takes no eta"),
    ],
)
def test_what_a_pipeline_has_no_argument_for_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call_arguments(Unconditional(), Settings(**change))
    assert call_arguments(Unconditional(), Settings(steps=3)) == {"num_inference_steps": 3}


def test_defaults_are_written_out(pipe: Any) -> None:
    whole = completed(pipe, Settings("x"))
    assert (whole.steps, whole.guidance) == (50, 7.5)
    assert completed(pipe, SETTINGS).steps == 2


def test_guidance_goes_where_it_guides() -> None:
    both = {"guidance_scale": 3.5, "true_cfg_scale": 1.0}
    assert guidance_argument(both) == "guidance_scale"
    assert guidance_argument({**both, "guidance_scale": None}) == "true_cfg_scale"
    assert guidance_argument({"true_cfg_scale": 4.0}) == "true_cfg_scale"
    assert guidance_argument({}) is None


def test_a_seed_is_a_picture(pipe: Any) -> None:
    first, again = (make(pipe, SETTINGS, latents=True) for _ in range(2))
    other = make(pipe, SETTINGS.changed(seed=2), latents=True)
    assert first.image.tobytes() == again.image.tobytes() != other.image.tobytes()
    assert torch.equal(first.latents, again.latents)
    assert not torch.equal(first.latents, other.latents)


def test_steps_are_heard(pipe: Any) -> None:
    heard: list[int] = []
    make(pipe, SETTINGS, on_step=heard.append)
    assert heard == [1, 2]


def test_latents_are_what_the_vae_was_given(pipe: Any) -> None:
    take = make(pipe, SETTINGS, latents=True)
    generator = torch.Generator().manual_seed(1)
    arguments = call_arguments(pipe, SETTINGS)
    direct = pipe(**arguments, generator=generator, output_type="latent").images
    assert torch.equal(take.latents, direct)


def test_latents_are_found_without_step_callbacks(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(pipe, SETTINGS, latents=True)
    known = {k: v for k, v in call_defaults(pipe).items() if k != "callback_on_step_end"}
    monkeypatch.setattr("accel.pipelines.generation.call_defaults", lambda pipe: known)
    found = make(pipe, SETTINGS, latents=True)
    assert torch.equal(found.latents, expected.latents)
    assert found.image.tobytes() == expected.image.tobytes()


def test_the_size_is_written_out_once_known(pipe: Any) -> None:
    image = make(pipe, SETTINGS).image
    known = with_size(pipe, Settings("x"), image)
    assert (known.width, known.height) == (64, 64)
    asked = with_size(pipe, Settings("x", width=63, height=65), image)
    assert (asked.width, asked.height) == (63, 65)


class Returns:
    """A pipeline that returns what it was told to."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def __call__(self, generator: Any = None) -> Any:
        return self.output


class Output(dict[str, Any]):
    """As pipelines return it: keys are attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__.update(values)


def test_what_is_no_picture_is_told() -> None:
    with pytest.raises(BadInput, match="Returns makes audios, not pictures"):
        make(Returns(Output(audios=[1])), Settings())
    with pytest.raises(AccelError, match="returned Tensor, not pictures"):
        make(Returns(Output(images=torch.zeros(1))), Settings())


def test_frames_of_a_video_are_pictures() -> None:
    video = torch.linspace(0, 1, 3 * 4 * 4 * 3).reshape(1, 3, 4, 4, 3).numpy()
    take = make(Returns(Output(frames=video)), Settings())
    assert len(take.images) == 3
    assert take.image.getpixel((0, 0)) == (0, 2, 4)
