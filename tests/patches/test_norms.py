"""RMS norms in one kernel: which modules are taken for one, and what stays as it was."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.nn import functional

import accel
from accel.patches import norms
from accel.patches.norms import form_of, fused_norms
from tests.patches.llm_families import own_hidden, prompts_of, tiny_lm

SIZE = 24
NORMS = {
    "llama.LlamaRMSNorm": "_plain",
    "qwen3.Qwen3RMSNorm": "_plain",
    "phi3.Phi3RMSNorm": "_plain",
    "gpt_oss.GptOssRMSNorm": "_plain",
    "deepseek_v3.DeepseekV3RMSNorm": "_plain",
    "glm_moe_dsa.GlmMoeDsaRMSNorm": "_plain",
    "gemma2.Gemma2RMSNorm": "_zero_centred",
    "gemma3.Gemma3RMSNorm": "_zero_centred",
    "qwen3_next.Qwen3NextRMSNorm": "_zero_centred",
    "qwen3_next.Qwen3NextRMSNormGated": None,
    "cohere.CohereLayerNorm": None,
    "nemotron.NemotronLayerNorm1P": None,
}


def norm_of(name: str, size: int = SIZE) -> Any:
    """A transformers norm with random weights."""
    family, _, kind = name.partition(".")
    made = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), kind)(size)
    torch.manual_seed(5)
    for weight in made.parameters():
        nn.init.normal_(weight)
    return made.requires_grad_(False)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


class Own(nn.Module):
    """A norm of one's own, right but for a fault."""

    def __init__(self, fault: str = "none") -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(SIZE)), 1e-6
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.fault == "centred":
            wide = wide - wide.mean(-1, keepdim=True)
        mean = wide.pow(2).mean(-1, keepdim=True)
        mean = mean.mean(-2, keepdim=True) if self.fault == "over tokens" else mean
        eps = 0 if self.fault == "no epsilon" else self.eps
        y = wide * torch.rsqrt(mean + eps) * self.weight.float()
        y = y.clamp(max=2) if self.fault == "clamped" else y
        return y if self.fault == "stays wide" else y.type_as(x)


@pytest.mark.parametrize(("name", "form"), NORMS.items())
def test_norms_are_known_by_what_they_compute(name: str, form: str | None) -> None:
    found = form_of(norm_of(name))
    assert getattr(found, "__name__", None) == form


FAULTS = ["centred", "over tokens", "no epsilon", "clamped", "stays wide"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_computes_something_else_is_left_alone(fault: str) -> None:
    assert form_of(Own()) is not None
    assert form_of(Own(fault)) is None


class Scaled(Own):
    """A norm that multiplies by a setting, too."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(self.scale, "now", self.scale)
        return super().forward(x) * (2 if self.training or scale is True else scale)


class Setting:
    now = 1


@pytest.mark.parametrize(
    "setting", [[], (1, [2]), Setting(), torch.ones(1), len], ids=lambda x: type(x).__name__
)
def test_settings_that_may_change_are_not_relied_on(setting: Any) -> None:
    norm = Own()
    norm.extra = setting
    assert form_of(norm) is None
    assert form_of(Scaled(Setting())) is None


def test_settings_that_compare_equal_are_told_apart() -> None:
    assert form_of(Scaled(1).eval()) is not None
    assert form_of(Scaled(True).eval()) is None
    assert form_of(Scaled(1).train()) is None


def test_settings_are_not_kept_alive() -> None:
    norm, table = Own(), torch.ones(SIZE)
    norm.table = table
    form_of(norm)
    gone = weakref.ref(table)
    del norm, table
    gc.collect()
    assert gone() is None


def test_a_subclass_with_another_helper_is_a_norm_of_its_own() -> None:
    gemma = norm_of("gemma2.Gemma2RMSNorm")

    class Twice(type(gemma)):  # type: ignore[misc]
        def _norm(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super()._norm(x)

    assert form_of(gemma) is not None
    assert form_of(Twice(SIZE)) is None


def test_one_weight_for_all_of_a_row_is_the_models_own_way() -> None:
    norm, rows = norm_of("llama.LlamaRMSNorm", 1), torch.randn(3, SIZE)
    own = norm(rows)
    with fused_norms(norm):
        assert torch.equal(norm(rows), own)


def test_a_copy_made_meanwhile_has_its_own_weights() -> None:
    norm, rows = norm_of("llama.LlamaRMSNorm"), torch.randn(3, SIZE)
    own = norm(rows)
    with fused_norms(norm):
        copies = copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))
    for copied in copies:
        copied.weight.mul_(2)
        assert torch.equal(copied(rows), 2 * own)


def test_a_hook_of_accelerate_put_there_meanwhile_stays() -> None:
    norm, rows = norm_of("llama.LlamaRMSNorm"), torch.randn(3, SIZE)
    own = norm(rows)
    with fused_norms(norm):
        add_hook_to_module(norm, Doubling())
    assert torch.equal(norm(rows), 2 * own)
    remove_hook_from_module(norm)
    assert torch.equal(norm(rows), own)


class Doubling(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return 2 * output


def test_what_holds_more_than_a_weight_is_left_alone() -> None:
    with_buffer, with_child, with_bias = Own(), Own(), Own()
    with_buffer.register_buffer("scale", torch.ones(1))
    with_child.inner = nn.Identity()
    with_bias.bias = nn.Parameter(torch.zeros(SIZE))
    assert [form_of(m) for m in (with_buffer, with_child, with_bias)] == [None] * 3


@pytest.mark.parametrize("name", [name for name, form in NORMS.items() if form])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_no_larger_than_the_models_own(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    norm = norm_of(name, 128)
    exact_norm = copy.deepcopy(norm).double()
    rows = torch.randn(1, 50, 128)
    norm, here = norm.to(device, dtype), rows.to(device, dtype)
    form, weight = form_of(norm), norm.weight.cpu().double()
    assert form is not None
    weight = weight + 1 if form.__name__ == "_zero_centred" else weight
    eps = getattr(exact_norm, "variance_epsilon", getattr(exact_norm, "eps", None))
    exact = functional.rms_norm(here.cpu().double(), (128,), weight, eps)
    own = error(norm(here).cpu(), exact)
    with fused_norms(norm) as count:
        ours = norm(here)
    assert (count, ours.dtype) == (1, dtype)
    assert error(ours.cpu(), exact) <= own * 1.05 + 1e-7


@contextlib.contextmanager
def counting() -> Iterator[mock.Mock]:
    """Counts calls of torch's function, on a machine without kernels of ours."""
    with (
        mock.patch.object(norms, "kernels_for", return_value=None),
        mock.patch.object(functional, "rms_norm", wraps=functional.rms_norm) as calls,
    ):
        yield calls


def test_other_threads_find_the_models_own(device: torch.device) -> None:
    norm = norm_of("llama.LlamaRMSNorm").to(device)
    rows, found = torch.randn(3, SIZE).to(device), []
    own = norm(rows)
    with fused_norms(norm), counting() as fused:
        elsewhere = threading.Thread(target=lambda: found.append(norm(rows)))
        elsewhere.start()
        elsewhere.join()
        assert fused.call_count == 0
        norm(rows)
        assert fused.call_count == 1
    assert torch.equal(found[0], own)


def test_everything_is_as_before_when_the_body_fails() -> None:
    decoder = nn.Sequential(norm_of("llama.LlamaRMSNorm"), Own("clamped"), nn.Linear(3, 3))
    before = [dict(vars(m)) for m in decoder.modules()]
    with pytest.raises(ZeroDivisionError), fused_norms(decoder):
        raise ZeroDivisionError
    assert [dict(vars(m)) for m in decoder.modules()] == before


def test_a_forward_that_someone_put_there_stays() -> None:
    norm = norm_of("llama.LlamaRMSNorm")
    norm.forward = lambda x: x + 1
    with fused_norms(norm) as count:
        assert count == 0
        assert norm(torch.ones(2, SIZE)).tolist() == [[2.0] * SIZE] * 2
    assert "forward" in vars(norm)


def test_hooks_on_a_norm_still_run() -> None:
    norm, seen = norm_of("llama.LlamaRMSNorm"), []
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    with fused_norms(norm):
        norm(torch.ones(2, SIZE))
    assert len(seen) == 1


def test_mixed_precision_keywords_and_autocast_take_the_models_own_way() -> None:
    norm = norm_of("llama.LlamaRMSNorm")
    half = torch.ones(2, SIZE, dtype=torch.bfloat16)
    own = norm(half)
    with fused_norms(norm), counting() as fused:
        assert norm(half).dtype == own.dtype
        assert torch.equal(norm(hidden_states=half), own)
        with torch.autocast("cpu", torch.bfloat16):
            norm(half.float())
        assert fused.call_count == 0


@pytest.fixture(params=["llama", "qwen3", "gemma3"])
def family(request: Any) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("fused", [True, False])
def test_a_runner_fuses_all_norms_of_a_body_or_none(
    fused: bool, family: str, device: torch.device
) -> None:
    model = tiny_lm(family, device)
    expected = sum(1 for m in model.modules() if form_of(m))
    assert expected >= 5
    (prompt,) = prompts_of(30)
    own = own_hidden(model, prompt)
    options: dict[str, Any] = {"max_tokens": 64, "mode": "eager", "attention": "reference"}
    runner = accel.prefill_runner(model, fused=fused, **options)
    with counting() as calls:
        hidden = runner([prompt]).hidden(0)
    assert calls.call_count == (expected if fused else 0)
    assert (hidden - own).abs().max() < 1e-5
    with counting() as calls:
        assert torch.equal(own_hidden(model, prompt), own)
    assert calls.call_count == 0
    runner.close()


@pytest.mark.parametrize("automatic", [False, True])
def test_norms_that_change_later_are_tried_out_of_the_recorders_sight(
    automatic: bool, device: torch.device
) -> None:
    model, prompts = tiny_lm("llama", device), prompts_of(30, 12)
    runner = accel.prefill_runner(model, max_tokens=64, attention="reference")
    assert runner._graphs is not None
    runner._graphs._ground.automatic = automatic
    for norm in (m for m in model.modules() if form_of(m)):
        norm.variance_epsilon = 3e-4 if automatic else 5e-4
    runner(prompts)
    assert runner.report.notes == [] and runner.report.eager_passes == 0
    runner.close()
