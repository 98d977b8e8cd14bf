"""Sync-free schedulers: the same numbers bit for bit, the same state, and no wait in the loop."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from accel.patches.schedulers import install, is_sync_free, take_off
from tests.patches.scheduler_loops import (
    STEPS,
    Case,
    DeviceWork,
    assert_same,
    assert_same_loops,
    denoise,
    latents,
    waits,
)

FLOW, EULER, HEUN = (
    f"{n}Scheduler" for n in ("FlowMatchEulerDiscrete", "EulerDiscrete", "HeunDiscrete")
)
ANCESTRAL, DPM = "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler"
UNIPC, DDIM, DDPM = "UniPCMultistepScheduler", "DDIMScheduler", "DDPMScheduler"
LCM, PNDM, TCD = "LCMScheduler", "PNDMScheduler", "TCDScheduler"
V = {"prediction_type": "v_prediction"}
TRAILING = {"timestep_spacing": "trailing"}
THRESHOLD = {"thresholding": True, "sample_max_value": 1.5}
FLOWS = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SDE = {"algorithm_type": "sde-dpmsolver++"}

CASES = [
    Case(FLOW),
    Case(FLOW, {"shift": 3.0, "use_karras_sigmas": True}),
    Case(FLOW, {"use_dynamic_shifting": True}, schedule={"mu": 0.8}),
    Case(FLOW, {"stochastic_sampling": True, "shift_terminal": 0.1}),
    Case(FLOW, {"use_exponential_sigmas": True}),
    Case(FLOW, {"invert_sigmas": True}),
    Case(EULER),
    Case(EULER, {**V, "rescale_betas_zero_snr": True, **TRAILING}),
    Case(EULER, {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min"}),
    Case(EULER, {"interpolation_type": "log_linear", "timestep_spacing": "leading"}),
    Case(EULER, {**V, "timestep_type": "continuous", "use_karras_sigmas": True}),
    Case(EULER, step={"s_churn": 3.0, "s_noise": 1.01}),
    Case(ANCESTRAL),
    Case(ANCESTRAL, {**V, **TRAILING}),
    Case(DPM),
    Case(DPM, SDE),
    Case(DPM, {**SDE, **V, "use_karras_sigmas": True, "solver_type": "heun"}),
    Case(DPM, {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    Case(DPM, {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"}),
    Case(DPM, {"use_lu_lambdas": True, "euler_at_final": True}),
    Case(DPM, {"solver_order": 3, **THRESHOLD, "timestep_spacing": "leading"}),
    Case(DPM, {**FLOWS, "flow_shift": 3.0}),
    Case(UNIPC),
    Case(UNIPC, {"solver_order": 3, "solver_type": "bh1", "use_karras_sigmas": True}),
    Case(UNIPC, {**V, "predict_x0": False, "solver_order": 3, "final_sigmas_type": "sigma_min"}),
    Case(UNIPC, {**FLOWS, "flow_shift": 3.0, "solver_order": 3}),
    Case(UNIPC, {"disable_corrector": [0, 1], **THRESHOLD, **TRAILING}),
    Case(DDIM),
    Case(DDIM, {**V, **TRAILING, "rescale_betas_zero_snr": True, "clip_sample": False}),
    Case(DDIM, {"steps_offset": 1, "set_alpha_to_one": False}, {"eta": 0.7}),
    Case(DDIM, {**THRESHOLD, "timestep_spacing": "linspace"}, {"use_clipped_model_output": True}),
    Case(DDIM, {"prediction_type": "sample"}, {"eta": 1.0}),
    Case(LCM),
    Case(LCM, {**V, "clip_sample": True, "rescale_betas_zero_snr": True}),
    Case(LCM, {**THRESHOLD, "timestep_scaling": 7.0}),
    Case(PNDM),
    Case(PNDM, {"skip_prk_steps": True, "steps_offset": 1}),
    Case(PNDM, {**V, "skip_prk_steps": True, "set_alpha_to_one": True, **TRAILING}),
    Case(DDPM),
    Case(DDPM, {"variance_type": "fixed_small_log", **V}),
    Case(DDPM, {"variance_type": "fixed_large", **THRESHOLD}),
    Case(DDPM, {"variance_type": "fixed_large_log", **TRAILING}),
    Case(DDPM, {"variance_type": "learned_range"}, channels=8),
    Case(DDPM, {"variance_type": "learned"}, channels=8),
    Case(DDPM, schedule={"num_inference_steps": None, "timesteps": [900, 500, 100, 7, 0]}),
    Case(HEUN),
    Case(HEUN, {**V, "use_karras_sigmas": True, **TRAILING}),
    Case(HEUN, {"prediction_type": "sample", "clip_sample": True, "use_exponential_sigmas": True}),
    Case(TCD),
    Case(TCD, {**V, "clip_sample": True}, {"eta": 0.0}),
    Case(TCD, {"prediction_type": "sample"}, {"eta": 1.0}),
]
OTHERS = [
    Case(f"{name}Scheduler")
    for name in [
        *("CMStochasticIterative", "CogVideoXDDIM", "DDIMInverse", "DDIMParallel", "DDPMParallel"),
        *("DEISMultistep", "DPMSolverMultistepInverse", "DPMSolverSinglestep", "EDMEuler"),
        *("EDMDPMSolverMultistep", "FlowMatchHeunDiscrete", "FlowMatchLCM", "IPNDM", "SASolver"),
        *("KDPM2AncestralDiscrete", "KDPM2Discrete", "LTXEulerAncestralRF", "UnCLIP"),
    ]
]
READS_ALWAYS = [Case(name) for name in (DDIM, LCM, PNDM, DDPM, TCD)]


def both(case: Case, device: torch.device, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The same loop, stock and sync-free."""
    stock = denoise(case, case.scheduler(), device, *args, **kwargs)
    patched = case.scheduler()
    assert install(patched)
    return stock, denoise(case, patched, device, *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_the_same_and_wait_for_nothing(
    case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    """Also the first step, where no begin index is set."""
    stock = denoise(case, case.scheduler(), device, dtype)
    patched = case.scheduler()
    assert install(patched)
    loop = denoise(case, patched, device, dtype, forbidden=True)
    assert_same_loops(stock, loop)
    assert (loop.reads, loop.uploads) == (0, 0)
    assert stock.reads > 0 or device.type != "sim"


@pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=str)
def test_the_device_computes_the_same_things(case: Case, sim: torch.device) -> None:
    """From the same kinds of arguments: no number comes from the host that came from the device,
    nor the other way round. The simulated device would not show that in its bits."""
    notes = []
    for patched in (False, True):
        scheduler = case.scheduler()
        if patched:
            install(scheduler)
        scheduler.set_timesteps(**{"num_inference_steps": STEPS, **case.schedule}, device=sim)
        x = latents(sim)
        with DeviceWork() as work:
            for t in scheduler.timesteps:
                out = torch.cat([x * 0.5] * (case.channels // 4), dim=1)
                x = scheduler.step(out, t, x, **case.step)[0]
        notes.append(work.noted)
    missing = [note for note in notes[1] if note[0] not in ("full", "zeros")]
    assert missing == notes[0] and len(notes[0]) > STEPS


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_schedulers_of_diffusers_gain_too(case: Case, device: torch.device) -> None:
    stock, loop = both(case, device)
    assert_same_loops(stock, loop)
    assert (loop.reads, loop.uploads) == (0, 0)
    assert stock.reads > 0 or device.type != "sim"


@pytest.mark.parametrize("case", [c for c in CASES if not c.config and not c.step], ids=str)
def test_a_begin_index_and_a_start_in_the_middle(case: Case, device: torch.device) -> None:
    for begin in (True, False):

        def prepare(scheduler: Any, begin: bool = begin) -> None:
            if begin and hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(2)

        if case.name == PNDM:  # its first steps cannot be left out
            return
        stock, loop = both(case, device, start=2, prepare=prepare)
        assert_same_loops(stock, loop)
        assert (loop.reads, loop.uploads) == (0, 0)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_two_loops_on_one_scheduler_the_second_with_more_steps(
    case: Case, device: torch.device
) -> None:
    longer = copy.deepcopy(case)
    if "timesteps" not in case.schedule:
        longer.schedule["num_inference_steps"] = STEPS + 2
    schedulers = case.scheduler(), case.scheduler()
    assert install(schedulers[1])
    for once in (case, longer, case):
        stock, loop = (denoise(once, scheduler, device) for scheduler in schedulers)
        assert_same_loops(stock, loop)
        assert (loop.reads, loop.uploads) == (0, 0)


@pytest.mark.parametrize("case", [c for c in CASES if not c.config], ids=str)
def test_under_inference_mode(case: Case, device: torch.device) -> None:
    with torch.inference_mode():
        stock, loop = both(case, device)
        assert_same_loops(stock, loop)
    assert (loop.reads, loop.uploads) == (0, 0)


@pytest.mark.parametrize(
    "case", [Case(ANCESTRAL), Case(DPM, SDE), Case(LCM), Case(DDPM), Case(TCD)], ids=str
)
@pytest.mark.parametrize("several", [False, True])
def test_noise_drawn_on_the_host_is_uploaded_without_waiting(
    case: Case, several: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    loops = []
    pinned: list[Tensor] = []
    pin = Tensor.pin_memory

    def counted(x: Tensor) -> Tensor:
        pinned.append(x)
        return pin(x)

    monkeypatch.setattr(Tensor, "pin_memory", counted)
    for patched in (False, True):
        scheduler = case.scheduler()
        generators = [torch.Generator().manual_seed(i) for i in range(2)]
        if patched:
            install(scheduler)
        generator = generators if several else generators[0]
        loops.append(denoise(case, scheduler, device, generator=generator, forbidden=patched))
        states.append([generator.get_state() for generator in generators])
    assert_same_loops(*loops)
    assert_same(*states)
    assert loops[1].reads == 0
    drawn = [x for x in pinned if x.dim() == 4]
    assert device.type != "sim" or len(drawn) == loops[1].uploads == loops[0].uploads >= STEPS - 1


@pytest.mark.parametrize("case", [*READS_ALWAYS, Case(EULER), Case(UNIPC)], ids=str)
@pytest.mark.parametrize("form", ["clone", "host tensor", "number", "detached"])
def test_timesteps_in_other_forms(case: Case, form: str, device: torch.device) -> None:
    forms = {
        "clone": Tensor.clone,
        "host tensor": Tensor.cpu,
        "number": Tensor.item,
        "detached": Tensor.detach,
    }
    stock, loop = both(case, device, as_timestep=forms[form])
    assert_same_loops(stock, loop)
    assert loop.reads <= stock.reads


@pytest.mark.parametrize("case", [*READS_ALWAYS, Case(EULER), Case(FLOW), Case(UNIPC)], ids=str)
def test_timesteps_that_a_user_replaced_or_wrote_to(case: Case, device: torch.device) -> None:
    def replace(scheduler: Any) -> None:
        scheduler.timesteps = scheduler.timesteps.clone()

    def write(scheduler: Any) -> None:
        scheduler.timesteps[2:] -= 1

    for prepare in (replace, write):
        stock, loop = both(case, device, prepare=prepare)
        assert_same_loops(stock, loop)
        assert loop.reads <= 1  # the new values are looked at, once


def test_sigmas_that_a_user_replaced(device: torch.device) -> None:
    def replace(scheduler: Any) -> None:
        scheduler.sigmas = scheduler.sigmas * 1.5

    for case in (Case(EULER), Case(FLOW), Case(UNIPC)):
        stock, loop = both(case, device, prepare=replace)
        assert_same_loops(stock, loop)
        assert loop.reads == 0


def test_custom_sigmas(device: torch.device) -> None:
    for case in (
        Case(FLOW, schedule=sigmas(1.0, 0.7, 0.5, 0.2, 0.1)),
        Case(UNIPC, FLOWS, schedule=sigmas(1.0, 0.7, 0.5, 0.2, 0.1)),
        Case(EULER, schedule=sigmas(9.0, 4.0, 1.0, 0.0)),
    ):
        stock, loop = both(case, device)
        assert_same_loops(stock, loop)
        assert (loop.reads, loop.uploads) == (0, 0)


def test_a_singular_system_raises_as_it_does_without(device: torch.device) -> None:
    third = {**FLOWS, "solver_order": 3}
    for case in (
        Case(UNIPC, {**third, "lower_order_final": False}),
        Case(UNIPC, third, schedule=sigmas(0.9, 0.8, 0.5, 0.5, 0.4, 0.3, 0.2)),
    ):
        for patched in (False, True):
            scheduler = case.scheduler()
            if patched:
                install(scheduler)
            with pytest.raises(torch.linalg.LinAlgError):
                denoise(case, scheduler, device)


def sigmas(*values: float) -> dict[str, Any]:
    """A schedule of a user's own noise levels."""
    return {"num_inference_steps": None, "sigmas": np.array(values)}


@pytest.mark.parametrize("name", [EULER, DPM, DDIM, FLOW, LCM, UNIPC])
@pytest.mark.parametrize("placed", ["unset", "begun", "running"])
def test_adding_noise(name: str, placed: str, device: torch.device) -> None:
    case = Case(name)
    results = []
    for patched in (False, True):
        scheduler = case.scheduler()
        if patched:
            install(scheduler)
        scheduler.set_timesteps(STEPS, device=device)
        x, noise = latents(device), latents(device).flip(0)
        add = getattr(scheduler, "add_noise", None) or scheduler.scale_noise
        given = (x, noise) if name != FLOW else (x,)
        if placed != "unset" and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(1)
        if placed == "running":
            scheduler.step(x, scheduler.timesteps[1], x)
        batch = scheduler.timesteps[1:2].repeat(2)
        with waits(device) as counts:
            made = [
                add(*given, scheduler.timesteps[1:3], *([noise] if name == FLOW else []))
                for _ in range(2)
            ]
        made.append(add(*given, batch, *([noise] if name == FLOW else [])))
        results.append((made, vars(scheduler), counts()))
    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])
    assert results[1][2][0] == 0
    # The table of a DDIM scheduler goes to the device for good, once, as it does without us.
    assert results[1][2][1] <= (1 if name in (DDIM, LCM) else 0)


def test_a_step_after_noise_was_added_in_the_loop(device: torch.device) -> None:
    """The scheduler's table then is on the device, and stays there."""

    def prepare(scheduler: Any) -> None:
        x = latents(device)
        scheduler.add_noise(x, x, scheduler.timesteps[:2])

    for case in READS_ALWAYS:
        for dtype in (torch.float32, torch.bfloat16):
            stock, loop = both(case, device, dtype, prepare=prepare)
            assert_same_loops(stock, loop)
            assert (loop.reads, loop.uploads) == (0, 0)
            assert stock.scheduler.alphas_cumprod.device == device


def test_a_step_that_raises_leaves_the_same_state(device: torch.device) -> None:
    for case in (Case(LCM), Case(UNIPC), Case(DDIM)):
        states = []
        for patched in (False, True):
            scheduler = case.scheduler()
            if patched:
                install(scheduler)
            scheduler.set_timesteps(STEPS, device=device)
            x = latents(device)
            with pytest.raises((RuntimeError, AttributeError, TypeError)) as raised:
                scheduler.step(x, scheduler.timesteps[0], x[:, :3])
            states.append((str(raised.value), vars(scheduler)))
        assert_same(*states)


def test_gradients_flow_through_a_step(device: torch.device) -> None:
    gradients = []
    for patched in (False, True):
        scheduler = diffusers.DDIMScheduler()
        if patched:
            install(scheduler)
        scheduler.set_timesteps(STEPS, device=device)
        x = latents(device).requires_grad_()
        scheduler.step(x * 0.3, scheduler.timesteps[1], x).prev_sample.sum().backward()
        gradients.append(x.grad)
    assert_same(*gradients)


@pytest.mark.parametrize("name", [FLOW, DDIM, UNIPC])
def test_nothing_is_left_behind(name: str, device: torch.device) -> None:
    case = Case(name)
    scheduler, stock = case.scheduler(), case.scheduler()
    methods = {n: inspect.signature(getattr(scheduler, n)) for n in ("step", "set_timesteps")}
    assert install(scheduler) and install(scheduler)
    assert scheduler.__class__ is type(stock) and isinstance(scheduler, type(stock))
    assert methods == {n: inspect.signature(getattr(scheduler, n)) for n in methods}
    assert repr(scheduler) == repr(stock)
    denoise(case, scheduler, device)
    take_off(scheduler)
    take_off(scheduler)
    assert type(scheduler) is type(stock) and not is_sync_free(scheduler)
    assert_same(
        vars(denoise(case, scheduler, device).scheduler),
        vars(denoise(case, stock, device).scheduler),
    )


def test_taken_off_in_the_middle_of_a_loop_and_a_method_kept(device: torch.device) -> None:
    case = Case(DDIM)
    stock = denoise(case, case.scheduler(), device)
    scheduler = case.scheduler()
    install(scheduler)
    scheduler.set_timesteps(STEPS, device=device)
    step, x = scheduler.step, latents(device)
    for place, t in enumerate(scheduler.timesteps):
        if place == 3:
            take_off(scheduler)
        x = step(torch.sin(x * 3) * 0.7, t, x).prev_sample
    assert_same(x, stock.outputs[-1].prev_sample)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_copies_are_of_the_plain_class_and_go_on_where_they_were(
    duplicate: Any, sim: torch.device
) -> None:
    scheduler, stock = diffusers.LCMScheduler(), diffusers.LCMScheduler()
    install(scheduler)
    for one in (scheduler, stock):
        one.set_timesteps(STEPS)  # tensors of the simulated device cannot be pickled
    other = duplicate(scheduler)
    assert type(other) is diffusers.LCMScheduler and is_sync_free(scheduler)
    assert_same(vars(other), vars(stock))
    x = latents(torch.device("cpu"))
    other.step(x, other.timesteps[0], x)
    assert (other.step_index, scheduler.step_index) == (1, None)


def test_a_copy_on_the_device_steps_alone(device: torch.device) -> None:
    """As pipelines do that denoise sound along with pictures."""
    case = Case(FLOW)
    scheduler = case.scheduler()
    install(scheduler)
    scheduler.set_timesteps(STEPS, device=device)
    other, x = copy.copy(scheduler), latents(device)
    for one in (scheduler, other, scheduler):
        one.step(x, one.timesteps[one.step_index or 0], x)
    assert (scheduler.step_index, other.step_index) == (2, 1)


def test_configurations_and_files_name_the_plain_class(tmp_path: Path) -> None:
    scheduler = diffusers.EulerDiscreteScheduler(use_karras_sigmas=True)
    plain = dict(scheduler.config)
    install(scheduler)
    assert dict(scheduler.config) == plain
    for made in (
        scheduler.from_config(scheduler.config),
        type(scheduler).from_config(scheduler.config),
        scheduler.__class__(),
    ):
        assert type(made) is diffusers.EulerDiscreteScheduler
    assert type(diffusers.DDIMScheduler.from_config(scheduler.config)) is diffusers.DDIMScheduler
    scheduler.save_pretrained(tmp_path)
    loaded = diffusers.EulerDiscreteScheduler.from_pretrained(tmp_path)
    assert loaded.config._class_name == "EulerDiscreteScheduler" and loaded.config.use_karras_sigmas


class Own(diffusers.DDIMScheduler):
    """A user's."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        result.prev_sample += 1
        return result


def test_classes_of_users_are_left_alone(device: torch.device) -> None:
    scheduler = Own()
    assert not install(scheduler) and type(scheduler) is Own
    take_off(scheduler)
    assert type(scheduler) is Own


def test_a_method_that_a_user_put_on_the_instance_is_the_one_that_runs(
    device: torch.device,
) -> None:
    case = Case(DDIM)
    loops = []
    for patched in (False, True):
        scheduler = case.scheduler()
        if patched:
            install(scheduler)
        plain = scheduler.step
        scheduler.step = lambda out, t, x, plain=plain: plain(out * 0.5, t, x)
        scheduler._get_variance = lambda t, prev: torch.tensor(0.01)
        loops.append(denoise(case, scheduler, device))
        del scheduler.step, scheduler._get_variance
    assert_same_loops(*loops)
    assert loops[1].reads == 0


def test_a_schedule_on_the_host_is_none_of_our_business(device: torch.device) -> None:
    for case in (*READS_ALWAYS, Case(EULER), Case(UNIPC)):
        results = []
        for patched in (False, True):
            scheduler = case.scheduler()
            if patched:
                install(scheduler)
            scheduler.set_timesteps(STEPS)
            torch.manual_seed(0)
            x = latents(device)
            for t in scheduler.timesteps:
                x = scheduler.step(torch.sin(x), t, x)[0]
            results.append((x, vars(scheduler)))
        assert_same(*results)


def test_per_token_timesteps(device: torch.device) -> None:
    results = []
    for patched in (False, True):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        if patched:
            install(scheduler)
        scheduler.set_timesteps(STEPS, device=device)
        x, per_token = latents(device)[0], scheduler.timesteps[:4].repeat(4, 1)
        t = scheduler.timesteps[0]
        results.append(scheduler.step(x, t, x, per_token_timesteps=per_token))
    assert_same(*results)
