"""`accel_prefill` in transformers' AttentionInterface: attention handed to a prefill runner.

Knows what transformers passes to an attention function, and refuses what it does not know: a
keyword that is silently ignored is a wrong answer. There is no mask under this name, so none is
built. The name is set on a decoder for the length of one body call and read back; other threads
that run the same model meanwhile get an error, not a wrong result.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accel.prefill.attention import AttentionGroup, Unsupported
from accel.prefill.model import Attend

NAME = "accel_prefill"
"""Without "flash", "sdpa", "eager", "paged|" or "/" in it: transformers takes such names apart."""

_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache"})
"""What decoders hand through to every attention function and causal attention does not need."""
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
}
_call = threading.local()
_ELSEWHERE = (
    f"{NAME} attends inside a prefill runner's call only: another thread is running a "
    "runner on this model just now"
)


class OfThisThread(str):
    """An attention function's name, which no other thread can look up: it would build the mask of
    this function, or none, and may find the model's own back in place when it comes to attend."""

    _thread: int

    def __new__(cls, name: str) -> OfThisThread:
        new = super().__new__(cls, name)
        new._thread = threading.get_ident()
        return new

    def __hash__(self) -> int:
        if threading.get_ident() != self._thread:
            raise RuntimeError(_ELSEWHERE)
        return super().__hash__()


def accel_prefill(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attends through the calling thread's runner.

    `query` is `[1, heads, tokens, dim]`, `key` and `value` `[1, kv_heads, tokens, dim]`; returns
    `[1, tokens, heads, dim]`. Raises RuntimeError outside a runner's call and `Unsupported` for
    what the runner could not honour.
    """
    attend: Attend | None = getattr(_call, "attend", None)
    if attend is None:
        raise RuntimeError(_ELSEWHERE)
    _refuse_more_than_causal(module, attention_mask, dropout)
    _refuse_unknown(others)
    _refuse_unpacked(query, key, value)
    group = AttentionGroup(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux is not None,
        dtype=query.dtype,
    )
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(group, s_aux, *rows)[None], None


def _refuse_more_than_causal(module: nn.Module, mask: torch.Tensor | None, dropout: float) -> None:
    if mask is not None:
        raise Unsupported("attention comes with a mask")
    if dropout:
        raise Unsupported("attention has dropout: call model.eval()")
    if getattr(module, "is_causal", True) is False:
        raise Unsupported("attention is not causal")


def _refuse_unpacked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2]:
        raise Unsupported("queries and keys are not of the same packed tokens")
    if not query.dtype == key.dtype == value.dtype:
        raise Unsupported(f"queries are {query.dtype}, keys {key.dtype}, values {value.dtype}")


def _refuse_unknown(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is None or name in _HARMLESS or value in _MUST_BE.get(name, ()):
            continue
        raise Unsupported(f"attention takes {name}=, which changes it in a way unknown here")


def register() -> None:
    """Makes the name known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, accel_prefill)


@contextlib.contextmanager
def attending(decoder: nn.Module, attend: Attend) -> Iterator[None]:
    """While open, attention of `decoder` in this thread is done by `attend`."""
    register()
    outer, _call.attend = getattr(_call, "attend", None), attend
    try:
        with implementation(decoder, OfThisThread(NAME)):
            yield
    finally:
        _call.attend = outer


@contextlib.contextmanager
def implementation(decoder: nn.Module, name: str) -> Iterator[None]:
    """While open, every config in `decoder` names the attention function `name`. Raises
    `Unsupported` if it does not stick."""
    configs = {id(c): c for m in decoder.modules() if (c := getattr(m, "config", None)) is not None}
    before = [
        (config, config._attn_implementation)
        for config in configs.values()
        if hasattr(config, "_attn_implementation")
    ]
    if not before:
        raise Unsupported("the model has no config that names its attention function")
    try:
        for config, _ in before:
            config._attn_implementation = name
        if any(config._attn_implementation != name for config, _ in before):
            raise Unsupported(f"the model does not take the attention function {name!r}")
        yield
    finally:
        for config, old in reversed(before):
            config._attn_implementation = old
