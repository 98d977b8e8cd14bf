"""RMS norms where there are kernels of our own: which rows they take, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from accel.patches import norms
from accel.patches.kernels import WIDEST
from accel.patches.norms import fused_norms
from tests.patches.counting_kernels import CountingKernels
from tests.patches.test_norms import NORMS, Own, error, norm_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CENTRED = {"llama.LlamaRMSNorm": False, "gemma3.Gemma3RMSNorm": True}
Asked = list[torch.device]


@pytest.fixture
def asked(kernels: CountingKernels, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The devices whose kernels a norm asked for."""
    devices: Asked = []

    def kernels_for(device: torch.device) -> CountingKernels:
        devices.append(device)
        return kernels

    monkeypatch.setattr(norms, "kernels_for", kernels_for)
    return devices


@pytest.mark.parametrize(("name", "centred"), CENTRED.items())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(24,), (7, 24), (1, 7, 3, 24)], ids=str)
def test_contiguous_rows_take_one(
    name: str,
    centred: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    kernels: CountingKernels,
    asked: Asked,
) -> None:
    norm, rows = norm_of(name).to(device, dtype), torch.randn(shape).to(device, dtype)
    own = norm(rows)
    with fused_norms(norm):
        ours = norm(rows)
    assert (kernels.norms, kernels.centred, asked) == (1, {centred}, [rows.device])
    assert (ours.shape, ours.dtype) == (own.shape, dtype)
    torch.testing.assert_close(ours, own, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    norm(rows)
    assert kernels.norms == 1


@pytest.mark.parametrize("name", [name for name, form in NORMS.items() if form])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_get_what_the_norm_has_and_err_no_more(
    name: str, dtype: torch.dtype, device: torch.device, kernels: CountingKernels
) -> None:
    """Rows as small as the epsilon's root, so that it counts."""
    norm = norm_of(name, 128).to(device, dtype)
    rows = (torch.randn(1, 50, 128) * 1e-3).to(device, dtype)
    weight = norm.weight.cpu().double() + (NORMS[name] == "_zero_centred")
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    exact = functional.rms_norm(rows.cpu().double(), (128,), weight, epsilon)
    own = error(norm(rows).cpu(), exact)
    with fused_norms(norm):
        ours = norm(rows)
    assert kernels.norms == 1
    assert error(ours.cpu(), exact) <= own * 1.05 + 1e-7


OTHERS = {
    "strided": torch.randn(5, 48)[:, ::2],
    "transposed": torch.randn(1, 3, 5, 24).transpose(1, 2),
    "repeated": torch.randn(1, 24).expand(5, 24),
    "float64": torch.randn(5, 24).double(),
}


@pytest.mark.parametrize("rows", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", CENTRED)
def test_others_stay_torchs(
    name: str, rows: torch.Tensor, kernels: CountingKernels, asked: Asked
) -> None:
    """What is not contiguous, or of a precision that would lose some."""
    norm = norm_of(name).to(rows.dtype)
    own = norm(rows)
    with fused_norms(norm):
        ours = norm(rows)
    assert (kernels.norms, asked) == (0, [])
    torch.testing.assert_close(ours, own)


def test_a_weight_that_is_not_contiguous_stays_torchs(kernels: CountingKernels) -> None:
    norm, rows = norm_of("llama.LlamaRMSNorm"), torch.randn(5, 24)
    norm.weight = torch.nn.Parameter(torch.randn(48)[::2], requires_grad=False)
    own = norm(rows)
    with fused_norms(norm):
        torch.testing.assert_close(norm(rows), own)
    assert kernels.norms == 0


@pytest.mark.parametrize(("size", "taken"), [(WIDEST, 1), (WIDEST + 8, 0)])
def test_rows_too_wide_to_be_held_stay_torchs(
    size: int, taken: int, kernels: CountingKernels
) -> None:
    norm, rows = norm_of("llama.LlamaRMSNorm", size), torch.randn(2, size)
    own = norm(rows)
    with fused_norms(norm):
        torch.testing.assert_close(norm(rows), own)
    assert kernels.norms == taken


def test_without_an_epsilon_rows_stay_torchs(kernels: CountingKernels) -> None:
    """Torch has one of its own for each precision."""
    norm, rows = torch.nn.RMSNorm(24), torch.randn(5, 24)
    own = norm(rows)
    with fused_norms(norm) as count:
        assert torch.equal(norm(rows), own)
    assert (count, kernels.norms) == (1, 0)


def test_an_epsilon_that_changes_is_that_of_the_call(kernels: CountingKernels) -> None:
    norm, rows = Own(), torch.randn(5, 24)
    with fused_norms(norm):
        norm(rows)
        norm.eps = 0.5
        found = norm(rows)
    torch.testing.assert_close(found, functional.rms_norm(rows, (24,), norm.weight, 0.5))
    assert kernels.norms == 2


def test_rows_without_memory_ask_for_kernels_too(kernels: CountingKernels, asked: Asked) -> None:
    """Then as many tensors are made as on the device."""
    norm = norm_of("llama.LlamaRMSNorm")
    with fused_norms(norm):
        norm.to("meta")
        assert norm(torch.empty(5, 24, device="meta")).device.type == "meta"
        with pytest.raises(RuntimeError):  # as torch's function has it
            norm(torch.randn(5, 24))
    assert asked == [torch.device("meta")]


def test_mixed_precision_and_keywords_stay_the_models(kernels: CountingKernels) -> None:
    norm, half = norm_of("llama.LlamaRMSNorm"), torch.ones(2, 24, dtype=torch.bfloat16)
    calls: list[Any] = []
    with fused_norms(norm):
        calls += norm(half), norm(hidden_states=half.float())
        with torch.autocast("cpu", torch.bfloat16):
            calls.append(norm(half.float()))
    assert len(calls) == 3 and kernels.norms == 0


def test_a_kernel_that_is_not_there_leaves_torchs_function(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "kernels_for", lambda device: None)
    norm, rows = norm_of("gemma3.Gemma3RMSNorm").to(device), torch.randn(5, 24).to(device)
    own = norm(rows)
    with fused_norms(norm):
        torch.testing.assert_close(norm(rows), own)
