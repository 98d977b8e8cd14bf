"""verify(): equal, or the step, the module and what was frozen; the pipe is left alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.patches import verification
from accel.patches.verification import Verification
from accel.patches.witness import Witness
from accel.pipelines import tiny
from accel.recorded import Recorded
from tests.patches import faulty
from tests.patches.faulty import Fault, Pipe
from tests.patches.test_modular import modular


@pytest.fixture
def pipe(device: torch.device) -> Pipe:
    faulty.calls_so_far = 0
    return Pipe(device)


def patched(pipe: Pipe, fault: Fault | None = None) -> Pipe:
    if fault is not None:
        pipe.unet.second.inner.fault = fault
    return accel.patch(pipe, capture="always")


def check(pipe: Pipe, **call: Any) -> Verification:
    options = {
        "prompt": "a cat",
        "num_inference_steps": faulty.STEPS,
        "generator": seeded(),
        **call,
    }
    found = accel.verify(pipe, **options)
    assert isinstance(found, Verification)
    json.dumps(found.to_dict(), allow_nan=False)
    return found


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def worsen_replays(
    monkeypatch: pytest.MonkeyPatch, worse: Callable[[Any], Any], kind: str, nth: int
) -> None:
    """Makes the `nth` replay, from 0, of what returns tensors of 8 ("unet") or 3 columns wrong."""
    replay, count = Recorded.replay, iter(range(1000))
    columns = {"unet": 8, "vae": 3}[kind]

    def wrong(self: Recorded, tensors: list[Tensor]) -> Any:
        result = replay(self, tensors)
        is_it = isinstance(result, Tensor) and result.shape[-1] == columns
        return worse(result) if is_it and next(count) == nth else result

    monkeypatch.setattr(Recorded, "replay", wrong)


@pytest.mark.parametrize("name", ["sd15", "flux", "wan"])
def test_a_pipeline_is_equal_to_itself(name: str, device: torch.device) -> None:
    pipe = tiny.pipeline(name).to(device)
    pipe.set_progress_bar_config(disable=True)
    accel.patch(pipe, capture="always")
    found = accel.verify(pipe, "a cat", generator=seeded(), **tiny.CALLS[name])
    assert found.equal and found.passed, str(found)
    assert (found.first_difference, found.non_finite, found.notes) == (None, None, [])
    assert found.replays >= 20
    assert found.runs >= 10
    assert str(found).startswith(f"equal: {found.runs} runs, {found.calls} calls compared, ")


def test_a_modular_pipeline_is_equal_to_itself(device: torch.device, tmp_path: Path) -> None:
    tiny.save_pipeline(tmp_path / "saved", "sdxl")
    pipe = accel.patch(modular(tmp_path / "saved", device), capture="always")
    call = {"num_inference_steps": 3, "height": 64, "width": 64, "generator": seeded()}
    found = accel.verify(pipe, prompt="a cat", **call)  # returns its whole state
    assert found.equal and found.notes == [], str(found)
    assert found.replays >= 20


def test_a_patched_pipe_stays_patched_with_its_graphs(pipe: Pipe) -> None:
    patched(pipe)
    for _ in range(3):
        pipe(generator=seeded())
    captures = [part.captures for part in accel.report(pipe).parts]
    assert check(pipe).equal
    replays = accel.report(pipe)["unet"].replays
    pipe(generator=seeded())
    assert [part.captures for part in accel.report(pipe).parts] == captures
    assert accel.report(pipe)["unet"].replays == replays + faulty.STEPS


def test_a_plain_pipe_is_plain_again(pipe: Pipe) -> None:
    before = dict(vars(pipe.unet)), dict(vars(pipe.vae))
    found = check(pipe)
    assert found.equal and found.runs >= 10
    assert (dict(vars(pipe.unet)), dict(vars(pipe.vae))) == before
    with pytest.raises(ValueError, match="not patched"):
        accel.report(pipe)


def test_random_numbers_attributes_weights_and_schedulers_are_left_alone(pipe: Pipe) -> None:
    patched(pipe)
    generator = seeded(5)
    pipe(generator=generator, num_inference_steps=3)
    attributes, schedule = dict(vars(pipe)), dict(vars(pipe.scheduler))
    weights = {name: p.detach().cpu().clone() for name, p in pipe.unet.state_dict().items()}
    states = generator.get_state(), torch.get_rng_state()
    assert check(pipe, generator=generator).equal
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert vars(pipe).items() == attributes.items()
    now = vars(pipe.scheduler)
    assert now.keys() == schedule.keys()
    assert all(now[name] is value for name, value in schedule.items())
    for name, p in pipe.unet.state_dict().items():
        assert torch.equal(p.cpu(), weights[name])


def test_a_call_without_a_generator_draws_the_same_in_every_run(pipe: Pipe) -> None:
    torch.manual_seed(3)
    found = check(patched(pipe), generator=None)
    assert found.equal, str(found)


def test_a_counter_that_no_guard_sees_is_found(pipe: Pipe, device: torch.device) -> None:
    found = check(patched(pipe, faulty.counting(period=faulty.STEPS)))
    assert not found.equal and not found.passed
    first = found.first_difference
    assert first is not None
    assert (first.component, first.call, first.step) == ("unet", 2, 2)  # eager, recorded, replayed
    assert first.submodule == "second.inner"
    assert first.max_abs == pytest.approx(0.001, abs=1e-5)
    assert first.max_rel is not None and 0 < first.max_rel < 0.01
    assert any("faulty.calls_so_far goes from 6 to 7 in an eager call" in n for n in found.notes)
    assert "the graphs of unet are dropped: eager until accel.unpatch()" in found.notes
    assert "unet, call 2 at step 2, in second.inner, patched, run 1" in str(found)


def test_after_a_difference_the_pipe_runs_on_rightly(pipe: Pipe, device: torch.device) -> None:
    check(patched(pipe, faulty.counting(period=faulty.STEPS)))
    plain = Pipe(device)
    plain.unet.second.inner.fault = faulty.counting(period=faulty.STEPS)
    for seed in range(3):
        faulty.calls_so_far = 0
        expected = plain(generator=seeded(seed))["picture"]
        faulty.calls_so_far = 0
        assert torch.equal(pipe(generator=seeded(seed))["picture"], expected)
    unet = accel.report(pipe)["unet"]
    assert unet.graphs == [] and unet.declined is not None
    assert unet.declined.startswith("accel.verify() found: unet, call 2 at step 2")
    assert accel.report(pipe)["vae"].declined is None
    accel.patch(accel.unpatch(pipe), capture="always")
    assert accel.report(pipe)["unet"].declined is None


def test_a_pipe_that_differs_from_itself_is_told_apart(pipe: Pipe) -> None:
    found = check(patched(pipe, faulty.counting()))
    first = found.first_difference
    assert first is not None and first.run == "a second eager run"
    assert (first.component, first.step, first.submodule) == ("unet", 0, "second.inner")
    assert first.max_abs == pytest.approx(0.001 * faulty.STEPS, abs=1e-5)
    assert found.notes[0].startswith("not because of accel: two eager runs")
    assert "faulty.calls_so_far goes from" in found.notes[1]


def test_a_python_value_that_froze_is_found_where_the_results_are_equal(pipe: Pipe) -> None:
    def fault(x: Tensor, timestep: Tensor) -> Tensor:
        faulty.calls_so_far += 1
        return x

    first = check(patched(pipe, fault)).first_difference
    assert first is not None
    assert (first.component, first.max_abs) == ("unet", None)
    assert first.what.startswith("Python state froze: tests.patches.faulty.calls_so_far goes from")


def test_a_counter_that_the_engine_declines_is_no_difference(pipe: Pipe) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    pipe.unet.first.norm = nn.Sequential(pipe.unet.first.norm, Counting())
    found = check(patched(pipe))
    assert found.equal, str(found)
    assert accel.report(pipe)["unet"].declined == "the forward changes its own state"


def test_numbers_that_are_none_are_found(pipe: Pipe) -> None:
    found = check(patched(pipe, faulty.not_a_number(step=3)))
    assert found.equal and not found.passed
    wrong = found.non_finite
    assert wrong is not None
    assert (wrong.component, wrong.call, wrong.step, wrong.run) == ("unet", 3, 3, "eager")
    assert wrong.submodule == "second.inner"
    assert "not finite: unet, call 3 at step 3, in second.inner, eager" in str(found)


def test_a_replay_that_goes_wrong_is_found(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    worsen_replays(monkeypatch, lambda result: result + 0.5, "unet", nth=5)
    first = check(patched(pipe)).first_difference
    assert first is not None
    assert (first.component, first.call, first.step) == ("unet", 3, 3)
    assert first.run == "patched, run 2 of the same call"
    assert first.max_abs == pytest.approx(0.5, abs=1e-4)
    assert first.submodule is None  # no submodule returned it


def test_a_replay_that_returns_no_number_is_found(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    worsen_replays(monkeypatch, lambda result: result * torch.nan, "vae", nth=0)
    found = check(patched(pipe))
    assert found.first_difference is not None and found.non_finite is not None
    assert (found.first_difference.component, found.first_difference.step) == ("vae", None)
    assert (found.first_difference.max_abs, found.first_difference.max_rel) == (None, None)
    assert found.non_finite.run == found.first_difference.run


def test_sizes_are_known_where_nothing_could_be_kept(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "Witness", functools.partial(Witness, room=0))
    worsen_replays(monkeypatch, lambda result: result + 0.5, "unet", nth=0)
    first = check(patched(pipe)).first_difference
    assert first is not None and first.max_abs == pytest.approx(0.5, abs=1e-4)


def test_what_another_prompt_changes_unseen_is_found(pipe: Pipe) -> None:
    words = ["a cat"]

    def note(x: Tensor) -> Tensor:
        words[0] = "long" if float(x.sum()) != note.usual else "short"  # type: ignore[attr-defined]
        return x

    note.usual = float(torch.randn(4, 8, generator=seeded()).add_(0.01 * 5).sum())  # type: ignore[attr-defined]
    pipe.meddle = note
    found = check(patched(pipe, lambda x, timestep: x + len(words[0])))
    first = found.first_difference
    assert first is not None
    assert first.run == "patched, another seed, prompt and number of steps, run 1"
    assert (first.step, first.submodule) == (0, "second.inner")


def test_weights_that_a_replay_does_not_follow_are_found(pipe: Pipe) -> None:
    last = list(pipe.unet.parameters())[-1]
    known: dict[str, Any] = {}

    def fault(x: Tensor, timestep: Tensor) -> Tensor:
        if known.get("version") != last._version:
            known.update(version=last._version, copy=float(last.detach().cpu().sum()))
        return x * known["copy"]

    first = check(patched(pipe, fault)).first_difference
    assert first is not None and first.run == "patched, weights changed in place, run 1"
    assert (first.component, first.step) == ("unet", 0)


def runs_counted(pipe: Pipe, at: int, do: Callable[[Tensor], Tensor]) -> list[int]:
    """Has `do` done to the noise in the run with the number `at`; the list's length is the runs."""
    runs: list[int] = []

    def meddle(x: Tensor) -> Tensor:
        runs.append(len(runs))
        return do(x) if runs[-1] == at else x

    pipe.meddle = meddle
    return runs


def test_what_differs_between_the_parts_is_told(pipe: Pipe) -> None:
    runs_counted(pipe, 3, lambda x: x + 0.25)
    found = check(patched(pipe))
    first = found.first_difference
    assert first is not None
    assert (first.component, first.step, first.submodule) == ("unet", 0, None)
    assert first.what == "what it is given already differs"
    dropped = {part.name for part in accel.report(pipe).parts if part.declined is not None}
    assert dropped == {"unet", "vae"}


def test_what_differs_when_nobody_watches_is_told(pipe: Pipe) -> None:
    runs = runs_counted(pipe, -1, lambda x: x)
    assert check(patched(pipe)).equal
    runs_counted(pipe, len(runs) - 1, lambda x: x + 0.25)
    accel.patch(accel.unpatch(pipe), capture="always")
    first = check(pipe).first_difference
    assert first is not None
    assert (first.component, first.run) == ("output", "patched, with nobody watching")


def test_an_error_of_the_patched_run_alone_is_a_difference(pipe: Pipe) -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("lost\nin space")

    runs_counted(pipe, 2, fail)
    first = check(patched(pipe)).first_difference
    assert first is not None
    assert first.what == "raises RuntimeError: lost"


def test_an_error_of_the_eager_run_is_the_callers(pipe: Pipe) -> None:
    patched(pipe)
    with pytest.raises(TypeError, match="colour"):
        accel.verify(pipe, colour="red")
    assert check(pipe).equal


def test_a_call_that_cannot_be_varied_is_compared_without(pipe: Pipe) -> None:
    def refuse(x: Tensor) -> Tensor:
        raise ValueError("only four steps")

    runs_counted(pipe, 5, refuse)
    found = check(patched(pipe))
    assert found.equal
    words = "not tried: another seed, prompt and number of steps: ValueError: only four steps"
    assert found.notes == [words]


def test_a_module_is_verified_too(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
    with torch.no_grad():
        found = accel.verify(accel.patch(net, capture="always"), torch.ones(2, 4, device=device))
    assert found.equal and found.replays > 0


def test_nothing_is_proven_where_nothing_records() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a device that records")
    found = check(Pipe(torch.device("cpu")))
    assert (found.equal, found.runs) == (True, 0)
    assert found.notes == ["nothing was accelerated: no CUDA device: everything runs eagerly"]
    # What says why is the note: accel.report knows nothing of a pipe that is not patched.
    assert "accel.report" not in str(found)


def test_an_argument_that_the_call_does_not_take_is_refused(device: torch.device) -> None:
    for where in (device, torch.device("cpu")):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'promt'$"):
            check(Pipe(where), promt="a cat")


def test_what_cannot_be_patched_cannot_be_verified() -> None:
    with pytest.raises(TypeError, match="takes a diffusers pipeline or a module, not str"):
        accel.verify("a folder")


def test_nothing_compared_is_said() -> None:
    assert str(Verification()).startswith("equal: trivially, as nothing was accelerated")
    assert "trivially" not in str(Verification(runs=2, calls=1))
