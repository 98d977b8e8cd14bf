"""Rotary embeddings in fewer kernels: which functions are taken for one, and what stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import accel
from accel.patches import rotary
from accel.patches.rotary import fused_rotary, turned
from tests.patches.counting_kernels import CountingKernels
from tests.patches.llm_families import own_hidden, prompts_of, tiny_lm

TURN_HALVES = {"llama": True, "qwen3": True, "gemma3": True, "cohere": False, "gpt_oss": False}


def file_of(family: str) -> Any:
    return import_module(f"transformers.models.{family}.modeling_{family}")


def drawn(*shape: int, device: torch.device | str = "cpu") -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return (torch.rand(shape) * 2 - 1).to(device)


def inputs(device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """q, k, cos, sin; the first two as attention has them, transposed."""
    angles = drawn(1, 6, 8, device=device) * 3
    q, k = (drawn(1, 6, heads, 8, device=device).transpose(1, 2) for heads in (4, 2))
    return [q, k, angles.cos(), angles.sin()]


@pytest.fixture
def op_by_op() -> Iterator[mock.Mock]:
    """Counts what is turned in torch's ops."""
    with mock.patch.object(rotary, "turned", wraps=turned) as counting:
        yield counting


@pytest.fixture
def counted(op_by_op: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The same where there are no kernels."""
    monkeypatch.setattr(rotary, "kernels_for", lambda device: None)
    return op_by_op


@pytest.fixture
def llama(device: torch.device) -> Any:
    model = tiny_lm("llama", device)
    with fused_rotary(model):
        return model


@pytest.mark.parametrize(("family", "turns"), TURN_HALVES.items())
def test_functions_are_known_by_what_they_do(family: str, turns: bool) -> None:
    own = getattr(file_of(family), rotary.NAME)
    assert rotary._turns_halves(getattr(own, "__wrapped__", own)) is turns


def test_a_function_that_turns_the_other_way_is_left_alone() -> None:
    def back(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return turned(q, cos, -sin), turned(k, cos, -sin)

    def only_queries(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return turned(q, cos, sin), k

    def by_head(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return own(q, k, cos, sin, 0)  # of one sequence the same

    own = getattr(file_of("llama"), rotary.NAME)
    own = getattr(own, "__wrapped__", own)
    assert not rotary._turns_halves(back) and not rotary._turns_halves(only_queries)
    assert not rotary._turns_halves(by_head) and rotary._turns_halves(own)


def test_a_function_that_computes_in_float32_is_left_alone() -> None:
    """As HunYuan-VL's: fewer kernels in half precision would round worse."""

    def wide(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        q_wide, k_wide, cos, sin = (x.float() for x in (q, k, cos, sin))
        return turned(q_wide, cos, sin).type_as(q), turned(k_wide, cos, sin).type_as(k)

    assert not rotary._turns_halves(wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_no_larger_than_the_models_own(dtype: torch.dtype, llama: Any) -> None:
    given = [x.to(dtype) for x in inputs(llama.device)]
    apply = getattr(file_of("llama"), rotary.NAME)
    exact = apply(*(x.double() for x in given))
    own = apply(*given)
    with fused_rotary(llama):
        ours = apply(*given)
    for one, other, truth in zip(own, ours, exact, strict=True):
        assert (other.shape, other.stride(), other.dtype) == (one.shape, one.stride(), dtype)
        errors = [(x.double() - truth).norm() / truth.norm() for x in (one, other)]
        assert errors[1] <= errors[0] * 1.05 + 1e-7


def test_elsewhere_it_is_the_models_own(llama: Any, counted: mock.Mock) -> None:
    given, apply = inputs(llama.device), getattr(file_of("llama"), rotary.NAME)
    apply(*given)
    with fused_rotary(llama):
        elsewhere = threading.Thread(target=lambda: apply(*given))
        elsewhere.start()
        elsewhere.join()
        assert counted.call_count == 0
        apply(*given)
    assert counted.call_count == 2
    with pytest.raises(ZeroDivisionError), fused_rotary(llama):
        raise ZeroDivisionError
    apply(*given)
    assert counted.call_count == 2


def test_parts_of_heads_mixed_precision_and_more_arguments_are_the_models_own(
    llama: Any, counted: mock.Mock
) -> None:
    q, k, cos, sin = inputs(llama.device)
    apply = getattr(file_of("llama"), rotary.NAME)
    by_token = [x.transpose(1, 2) for x in (q, k)]
    with fused_rotary(llama):
        apply(q.to(torch.bfloat16), k, cos, sin)
        apply(*by_token, cos, sin, unsqueeze_dim=2)
        apply(*by_token, cos, sin, 2)
        with pytest.raises(RuntimeError):
            apply(q, k, cos[..., :4], sin[..., :4])
    assert counted.call_count == 0


def test_the_stand_in_is_there_once_and_tells_what_it_stands_for(llama: Any) -> None:
    first = getattr(file_of("llama"), rotary.NAME)
    with fused_rotary(llama):
        assert getattr(file_of("llama"), rotary.NAME) is first
    assert first.__name__ == rotary.NAME
    assert first.__wrapped__.__module__ == file_of("llama").__name__


def test_files_that_share_a_function_or_get_it_back_are_all_served(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = getattr(file_of("llama"), rotary.NAME)
    for _ in range(2):
        for family in ("llama", "mistral"):
            monkeypatch.setattr(file_of(family), rotary.NAME, stand_in.__wrapped__)
            with fused_rotary(tiny_lm(family)):
                assert getattr(file_of(family), rotary.NAME) is stand_in


def test_functions_are_tried_out_of_sight_of_modes() -> None:
    own = getattr(file_of("llama"), rotary.NAME)
    with FakeTensorMode():
        assert rotary._turns_halves(getattr(own, "__wrapped__", own))


def test_it_can_still_be_compiled(llama: Any) -> None:
    apply, given = getattr(file_of("llama"), rotary.NAME), inputs()
    compiled = torch.compile(lambda *x: apply(*x), backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*given), apply(*given)))


@pytest.mark.parametrize(
    ("family", "fused"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", True)]
)
def test_a_runner_turns_every_layer_so_or_none(
    family: str, fused: bool, device: torch.device, counted: mock.Mock
) -> None:
    """None with experts, to whom another rounding may send other tokens."""
    model = tiny_lm(family, device)
    turns = fused and family == "qwen3"
    (prompt,) = prompts_of(30)
    own = own_hidden(model, prompt)
    options: dict[str, Any] = {"max_tokens": 64, "mode": "eager", "attention": "reference"}
    runner = accel.prefill_runner(model, fused=fused, **options)
    counted.reset_mock()
    hidden = runner([prompt]).hidden(0)
    assert counted.call_count == (2 * model.config.num_hidden_layers if turns else 0)
    assert (hidden - own).abs().max() < 1e-5
    assert torch.equal(own_hidden(model, prompt), own)
    runner.close()


def test_with_kernels_a_layer_takes_one(
    device: torch.device, kernels: CountingKernels, op_by_op: mock.Mock
) -> None:
    model, (prompt,) = tiny_lm("llama", device), prompts_of(30)
    own = own_hidden(model, prompt)
    with fused_rotary(model):
        op_by_op.reset_mock()  # the function may have been tried just now
        ours = own_hidden(model, prompt)
    assert (kernels.turns, op_by_op.call_count) == (model.config.num_hidden_layers, 0)
    assert (ours - own).abs().max() < 1e-5
    assert torch.equal(own_hidden(model, prompt), own)
    assert kernels.turns == model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_gets_all_precisions_that_it_computes(
    dtype: torch.dtype, llama: Any, kernels: CountingKernels
) -> None:
    given = [x.to(dtype) for x in inputs(llama.device)]
    apply = getattr(file_of("llama"), rotary.NAME)
    own = apply(*given)
    with fused_rotary(llama):
        ours = apply(*given)
    assert kernels.turns == 1
    torch.testing.assert_close(ours, own, rtol=0, atol=4 * torch.finfo(dtype).eps)


def _two_sequences(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, 2 * x))


def _dims_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


NO_KERNEL: dict[str, tuple[Any, tuple[int, ...]]] = {
    "two sequences": (_two_sequences, (0, 1, 2, 3)),
    "two sequences of queries": (_two_sequences, (0, 2, 3)),
    "two sequences of keys": (_two_sequences, (1,)),
    "strided queries": (_dims_first, (0,)),
    "strided keys": (_dims_first, (1,)),
    "strided cosines": (_dims_first, (2,)),
    "strided sines": (_dims_first, (3,)),
    "double precision": (torch.Tensor.double, (0, 1, 2, 3)),
}


@pytest.mark.parametrize("case", NO_KERNEL)
def test_what_a_kernel_does_not_take_is_turned_op_by_op(
    case: str, kernels: CountingKernels, op_by_op: mock.Mock
) -> None:
    given, (change, which) = inputs(), NO_KERNEL[case]
    for i in which:
        given[i] = change(given[i])
    apply, model = getattr(file_of("llama"), rotary.NAME), tiny_lm("llama")
    own = apply(*given)
    with fused_rotary(model):
        op_by_op.reset_mock()  # the function may have been tried just now
        ours = getattr(file_of("llama"), rotary.NAME)(*given)
    assert (kernels.turns, op_by_op.call_count) == (0, 2)
    torch.testing.assert_close(ours, own)


def test_angles_on_another_device_are_no_kernels(
    sim: torch.device, kernels: CountingKernels
) -> None:
    """Whatever becomes of them: a kernel would read an address of another device."""
    q, k, cos, sin = inputs(sim)
    with fused_rotary(tiny_lm("llama")):
        apply = getattr(file_of("llama"), rotary.NAME)
        for given in ((q, k, cos.cpu(), sin.cpu()), (q, k.cpu(), cos, sin)):
            with pytest.raises(RuntimeError):
                apply(*given)
    assert kernels.turns == 0


def test_compiled_meanwhile_it_is_the_models_own(
    llama: Any, kernels: CountingKernels, op_by_op: mock.Mock
) -> None:
    apply, given = getattr(file_of("llama"), rotary.NAME), inputs()
    compiled = torch.compile(lambda *x: apply(*x), backend="eager", fullgraph=True)
    with fused_rotary(llama):
        inside = compiled(*given)
    assert all(map(torch.equal, inside, apply(*given)))
    assert (kernels.turns, op_by_op.call_count) == (0, 0)
