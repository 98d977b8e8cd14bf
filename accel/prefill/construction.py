"""How a runner comes to its packed body: what attends where, which backend, and the self-test.

Decides at construction only. A model that cannot be packed is declined, with the reason in the
report; arguments that cannot be met raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accel.prefill.attention import AttentionBackend, AttentionGroup, Unsupported
from accel.prefill.buckets import Ladder
from accel.prefill.choice import choose
from accel.prefill.kv_cache import KVCache
from accel.prefill.model import PrefillModel
from accel.prefill.packed_body import PackedBody
from accel.prefill.reference_attention import ReferenceBackend
from accel.prefill.report import PrefillReport
from accel.prefill.self_test import SelfTest

MODES = ("breakable", "full", "eager")


@dataclass(frozen=True)
class Setup:
    """What the runner was asked for."""

    model: PrefillModel
    ladder: Ladder
    slots: int
    cache_tokens: int
    mode: str
    attention: str


def set_up(setup: Setup, report: PrefillReport) -> PackedBody | None:
    """The packed body, or None if the model is declined: `report.declined` says why then."""
    body, why = _tested_body(setup, report)
    if body is None or why is not None:
        report.declined, report.mode = why, "eager"
        return None
    report.layers, report.groups = len(body.groups), len(set(body.groups))
    report.cache_bytes = body.cache.nbytes if body.cache else 0
    report.workspace_bytes = body.attention.workspace_bytes if body.attention else 0
    return body


def _tested_body(setup: Setup, report: PrefillReport) -> tuple[PackedBody | None, str | None]:
    if why := setup.model.objection():
        return None, why
    try:
        body = _body(setup, report)
    except Unsupported as why_not:
        return None, str(why_not)
    why = _self_test(body, setup.ladder)
    if not setup.model.agree(why is None):
        why = why or "self-test: another rank's result differs"
    return body, why


def _body(setup: Setup, report: PrefillReport) -> PackedBody:
    model = setup.model
    groups, why_masked = _groups(model)
    if why_masked is not None:
        report.notes.append(f"attention stays the model's own, behind a mask: {why_masked}")
        if setup.mode == "breakable":
            report.mode = "full"
            report.notes.append("mode='full': without attention of ours there is nothing to break")
    backend: AttentionBackend = ReferenceBackend()
    if groups:
        static, paged = setup.mode == "full", bool(setup.cache_tokens)
        kinds = list(dict.fromkeys(groups))
        try:
            backend, passed = choose(
                setup.attention, model.device, kinds, static=static, paged=paged
            )
        except Unsupported as why:
            if setup.attention == "auto":
                raise
            raise ValueError(f"attention={setup.attention!r}: {why}") from None
        report.notes += passed
    report.attention = backend.name if groups else "own"
    cache = _cache(setup, groups, report)
    bound = setup.ladder.largest + (cache.rows if cache else 0)
    return PackedBody(
        model,
        groups,
        backend,
        rows=setup.ladder.largest,
        slots=setup.slots,
        cache=cache,
        kv_bound=bound,
    )


def _groups(model: PrefillModel) -> tuple[list[AttentionGroup], str | None]:
    """Every layer's attention group, in the body's order: seen in a body call with nothing in it.
    Or, if attention cannot be taken over, none, and why."""
    found: list[AttentionGroup] = []

    def look(
        group: AttentionGroup,
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        found.append(group)
        return q.new_zeros(q.shape[0], group.heads, group.value_dim)

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        model.body(ids, ids, look)
    except torch.OutOfMemoryError:
        raise
    except Exception as why:  # a forward that cannot do without a mask fails in its own way
        return [], str(why).partition("\n")[0]
    if not found:
        raise Unsupported("no layer asked for attention")
    return found, None


def _cache(setup: Setup, groups: Sequence[AttentionGroup], report: PrefillReport) -> KVCache | None:
    if not setup.cache_tokens:
        return None
    why = None
    if not groups:
        why = "attention is the model's own"
    elif any(group.head_dim != group.value_dim for group in groups):
        why = "keys and values differ in width (latent attention)"
    if why is not None:
        report.notes.append(f"nothing is cached: {why}")
        return None
    shapes = [(group.kv_heads, group.head_dim, group.value_dim) for group in groups]
    return KVCache(shapes, setup.cache_tokens, groups[0].dtype, setup.model.device)


def _self_test(body: PackedBody, ladder: Ladder) -> str | None:
    try:
        return SelfTest(body, ladder).objection()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"self-test: {type(error).__name__}: {error}".partition("\n")[0]
