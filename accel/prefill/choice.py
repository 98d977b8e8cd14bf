"""Which attention backend serves a model on a device, and why not the others.

Knows the backends by name. `auto` takes FlashInfer where it is installed and needs no compiling,
else torch's own kernel; on devices without CUDA kernels it takes the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from accel.prefill.attention import AttentionBackend, AttentionGroup, Unsupported
from accel.prefill.reference_attention import ReferenceBackend


def _flashinfer(device: torch.device) -> AttentionBackend:
    try:
        from accel.prefill.flashinfer_attention import FlashInferBackend
    except ImportError as missing:
        raise Unsupported(
            f"{missing.name or missing} is not installed: pip install accel-graph[flashinfer]"
        ) from missing
    return FlashInferBackend(device)


def _torch(device: torch.device) -> AttentionBackend:
    from accel.prefill.torch_attention import TorchBackend

    return TorchBackend(device)


def _reference(device: torch.device) -> AttentionBackend:
    return ReferenceBackend()


_MAKERS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "flashinfer": _flashinfer,
    "torch": _torch,
    "reference": _reference,
}
NAMES = ("auto", *_MAKERS)


def choose(
    name: str, device: torch.device, groups: Sequence[AttentionGroup], *, static: bool, paged: bool
) -> tuple[AttentionBackend, list[str]]:
    """A backend that serves all of `groups`, and why those before it do not.

    `static`: full graphs will be captured; `paged`: prefixes will be cached. Raises `Unsupported`
    with all reasons in one line.

    >>> choose("auto", torch.device("cpu"), [], static=False, paged=False)[0].name
    'reference'
    """
    if name not in NAMES:
        raise ValueError(f"attention={name!r}: one of {', '.join(NAMES)}")
    automatic = ("flashinfer", "torch") if device.type == "cuda" else ("reference",)
    passed: list[str] = []
    for candidate in automatic if name == "auto" else (name,):
        named = f"{candidate}: " if name == "auto" else ""
        try:
            backend = _MAKERS[candidate](device)
        except Unsupported as why:
            passed.append(f"{named}{why}")
            continue
        why_not = _objection(backend, groups, static, paged)
        if why_not is None and name == "auto":
            why_not = next(filter(None, map(backend.preparation, groups)), None)
        if why_not is None:
            return backend, passed
        passed.append(f"{named}{why_not}")
    raise Unsupported("; ".join(passed))


def _objection(
    backend: AttentionBackend, groups: Sequence[AttentionGroup], static: bool, paged: bool
) -> str | None:
    """What the backend cannot do that it must. Full graphs of paged batches are not a must: such
    batches can run eagerly."""
    needs = [(False, False)]
    needs += [(False, True)] if paged else []
    needs += [(True, False)] if static else []
    for group in groups:
        for static_now, paged_now in needs:
            if why := backend.objection(group, static=static_now, paged=paged_now):
                return why
    return None
