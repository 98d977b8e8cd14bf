"""The hook refuses what it cannot honour, and nobody else ever runs it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from accel.patches.attention import NAME, accel_prefill, attending, implementation, register
from accel.prefill.attention import AttentionGroup, Unsupported
from tests.patches.llm_families import own_logits, prompts_of, tiny_lm

Q, K = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)


def call(model: Any, **keywords: Any) -> list[AttentionGroup]:
    """Calls the hook inside a runner's call; the groups that the runner heard of."""
    seen: list[AttentionGroup] = []

    def attend(group: AttentionGroup, sinks: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        assert q.shape == (6, 4, 8) and k.shape == v.shape == (6, 2, 8)
        seen.append(group)
        return q.clone()

    with attending(model, attend):
        arguments: dict[str, Any] = {"query": Q, "key": K, "value": K, **keywords}
        out, weights = accel_prefill(arguments.pop("module", nn.Identity()), **arguments)
    assert out.shape == (1, 6, 4, 8) and weights is None
    return seen


def test_a_group_is_what_the_layer_asked_for() -> None:
    model = tiny_lm("llama")
    sinks = torch.zeros(4)
    options: dict[str, Any] = {"scaling": 0.5, "sliding_window": 7, "softcap": 9.0, "s_aux": sinks}
    group = AttentionGroup(4, 2, 8, 8, 0.5, window=7, softcap=9.0, sinks=True)
    assert call(model, **options) == [group]
    assert call(model) == [AttentionGroup(4, 2, 8, 8, 8**-0.5)]


@pytest.mark.parametrize("harmless", [{"position_ids": K}, {"indices": None}, {"is_causal": True}])
def test_what_changes_nothing_is_let_through(harmless: dict[str, Any]) -> None:
    assert len(call(tiny_lm("llama"), **harmless)) == 1


@pytest.mark.parametrize(
    "keywords, says",
    [
        ({"indices": K}, "takes indices="),
        ({"position_bias": K}, "takes position_bias="),
        ({"is_causal": False}, "takes is_causal="),
        ({"output_attentions": True}, "takes output_attentions="),
        ({"attention_mask": K}, "comes with a mask"),
        ({"dropout": 0.1}, "dropout: call model.eval"),
        ({"key": K[:, :, :5], "value": K[:, :, :5]}, "not of the same packed tokens"),
        ({"query": Q.half()}, "queries are torch.float16, keys torch.float32"),
    ],
)
def test_what_it_does_not_know_is_refused(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        call(tiny_lm("llama"), **keywords)


def test_attention_that_is_not_causal_is_refused() -> None:
    module = nn.Identity()
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(Unsupported, match="not causal"):
        call(tiny_lm("llama"), module=module)


def test_it_raises_outside_a_runners_call() -> None:
    with pytest.raises(RuntimeError, match="inside a prefill runner's call only"):
        accel_prefill(nn.Identity(), Q, K, K)


def test_another_thread_gets_an_error_and_no_wrong_result() -> None:
    model, errors = tiny_lm("llama"), []

    def elsewhere() -> None:
        try:
            own_logits(model, [1, 2, 3])
        except RuntimeError as error:
            errors.append(str(error))

    with attending(model, lambda *_: Q):
        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join()
    assert len(errors) == 1 and "another thread" in errors[0]


def test_another_threads_mask_is_never_that_of_a_runners_call() -> None:
    """Its forward begins while the name is set, and attends after it was taken back."""
    model, errors, taken_back = tiny_lm("llama"), list[str](), threading.Event()
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    begun = threading.Event()

    def wait(*_: Any) -> None:
        begun.set()
        taken_back.wait(20)

    def elsewhere() -> None:
        try:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        except RuntimeError as error:
            errors.append(str(error))
        begun.set()

    hook = model.get_decoder().layers[0].register_forward_pre_hook(wait)
    worker = threading.Thread(target=elsewhere)
    with attending(model.get_decoder(), lambda *_: Q):
        worker.start()
        assert begun.wait(20)
    taken_back.set()
    worker.join()
    hook.remove()
    assert len(errors) == 1 and "another thread" in errors[0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_mask_is_built_and_the_name_is_taken_back(family: str) -> None:
    model = tiny_lm(family)
    before = model.config._attn_implementation
    masks: list[Any] = []
    layer = model.get_decoder().layers[0]
    layer.register_forward_pre_hook(
        lambda *call: masks.append(call[2].get("attention_mask")), with_kwargs=True
    )

    def attend(group: Any, sinks: Any, q: torch.Tensor, k: Any, v: Any) -> torch.Tensor:
        assert model.config._attn_implementation == NAME
        return q.clone()

    with torch.no_grad(), attending(model.get_decoder(), attend):
        model.get_decoder()(input_ids=torch.tensor([[3, 4]]), use_cache=False)
    assert masks == [None]
    assert model.config._attn_implementation == before


def test_the_name_is_taken_back_after_an_error() -> None:
    model = tiny_lm("llama")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="half-way"), attending(model, lambda *_: Q):
        raise ValueError("half-way")
    assert model.config._attn_implementation == before


def test_a_model_without_a_config_is_refused() -> None:
    register()
    with pytest.raises(Unsupported, match="no config"), implementation(nn.Linear(2, 2), NAME):
        pass


def test_the_same_logits_before_and_after() -> None:
    model, [prompt] = tiny_lm("qwen3"), prompts_of(9)
    before = own_logits(model, prompt)
    call(model)
    assert torch.equal(own_logits(model, prompt), before)
