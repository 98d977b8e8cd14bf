"""warm(): after it a call replays from its first step, and nothing else has changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.patches.overview import Report
from accel.patches.warming import MOST_RUNS
from accel.pipelines import tiny
from tests.patches.faulty import STEPS, Pipe
from tests.patches.test_modular import modular


def counts(report: Report) -> dict[str, tuple[int, int]]:
    return {part.name: (part.captures, part.eager_calls) for part in report.parts}


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["sd15", "zimage"])
def test_after_it_a_pipeline_only_replays(name: str, device: torch.device) -> None:
    pipe = accel.patch(tiny.pipeline(name).to(device), capture="always")
    pipe.set_progress_bar_config(disable=True)
    report = accel.warm(pipe, "a cat", generator=seeded(), **tiny.CALLS[name])
    assert all(part.captures >= 1 for part in report.parts), str(report)
    before = counts(report)
    pipe("a dog", generator=seeded(), **tiny.CALLS[name])
    assert counts(accel.report(pipe)) == before


def test_parts_that_run_once_a_picture_are_recorded_too(device: torch.device) -> None:
    pipe = accel.patch(Pipe(device), capture="always")
    report = accel.warm(pipe, num_inference_steps=1)
    assert [part.captures for part in report.parts] == [1, 1]
    assert all(part.replays >= 1 for part in report.parts)


def test_a_warm_pipe_is_run_once(device: torch.device) -> None:
    pipe = accel.patch(Pipe(device), capture="always")
    replays = accel.warm(pipe)["unet"].replays
    assert accel.warm(pipe)["unet"].replays == replays + STEPS


def test_a_modular_pipeline_is_warmed(device: torch.device, tmp_path: Path) -> None:
    tiny.save_pipeline(tmp_path / "saved", "sdxl")
    pipe = accel.patch(modular(tmp_path / "saved", device), capture="always")
    call = {"num_inference_steps": 3, "height": 64, "width": 64, "output": "images"}
    before = counts(accel.warm(pipe, prompt="a cat", **call))
    assert before["unet"][0] >= 1
    pipe(prompt="a cat", generator=seeded(), **call)
    assert counts(accel.report(pipe)) == before


def test_random_numbers_attributes_and_schedulers_are_left_alone(device: torch.device) -> None:
    pipe = accel.patch(Pipe(device), capture="always")
    generator = seeded(5)
    pipe(generator=generator, num_inference_steps=3)
    attributes, schedule = dict(vars(pipe)), dict(vars(pipe.scheduler))
    states = generator.get_state(), torch.get_rng_state()
    accel.warm(pipe, num_inference_steps=4, generator=generator)
    accel.warm(pipe, num_inference_steps=4)  # draws from the default generator
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert vars(pipe).keys() == attributes.keys()
    assert all(vars(pipe)[name] is value for name, value in attributes.items())
    assert vars(pipe.scheduler).keys() == schedule.keys()
    assert all(vars(pipe.scheduler)[name] is value for name, value in schedule.items())


def test_everything_is_put_back_after_an_error(device: torch.device) -> None:
    pipe = accel.patch(Pipe(device), capture="always")

    def fail(x: Tensor) -> Tensor:
        pipe.last_timestep = "changed"
        raise RuntimeError("lost in space")

    pipe.meddle, state = fail, torch.get_rng_state()
    with pytest.raises(RuntimeError, match="lost in space"):
        accel.warm(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert pipe.last_timestep is None


def test_a_part_that_stays_eager_does_not_keep_it_running(device: torch.device) -> None:
    pipe = Pipe(device)
    pipe.unet.first.register_forward_hook(lambda module, args, output: None)
    report = accel.warm(accel.patch(pipe, capture="always"))
    assert report["vae"].captures == 1
    assert report["unet"].captures == 0
    assert report["unet"].eager_calls <= (MOST_RUNS - 2) * STEPS


def test_a_call_that_always_brings_something_new_ends(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    net = accel.patch(nn.Linear(4, 4).to(device), capture="always")

    class Growing:
        rows = 0

        @property
        def components(self) -> dict[str, Any]:
            return {"net": net}

        def __call__(self) -> None:
            # The class's rows: what is on the pipe is put back before every run.
            type(self).rows += 1
            with torch.no_grad():
                for _ in range(2):
                    net(torch.ones(self.rows, 4, device=device))

    growing = accel.patch(Growing(), capture="always")
    with caplog.at_level(logging.WARNING, logger="accel"):
        report = accel.warm(growing)
    assert Growing.rows == MOST_RUNS
    assert report["net"].captures == MOST_RUNS
    assert f"{MOST_RUNS} runs of this call, and each still brought something new" in caplog.text


def test_a_pipe_that_is_not_patched_is_told_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"this Pipe is not patched: call accel\.patch\(\.\.\.\)"):
        accel.warm(Pipe(torch.device("cpu")))


def test_an_argument_that_the_call_does_not_take_is_refused(device: torch.device) -> None:
    pipe = Pipe(device)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'promt'$") as plain:
        pipe(promt="a cat")
    for where in (device, torch.device("cpu")):
        with pytest.raises(TypeError) as refused:
            accel.warm(accel.patch(Pipe(where), capture="always"), promt="a cat")
        # Without a GPU nothing is run, but the words are python's own.
        assert str(refused.value) == str(plain.value)


def test_nothing_is_run_where_nothing_records() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a device that records")
    pipe = accel.patch(Pipe(torch.device("cpu")))
    report = accel.warm(pipe)
    assert report.inactive is not None
    assert pipe.last_timestep is None
