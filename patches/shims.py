"""Shims: a few forwards of diffusers recorded without breaks, with the same result bit for bit.

A shim spares a recording breaks whose outcome Python knows beforehand. It is in place only while a
call is recorded: eager calls run the plain classes, and nothing of it is left on a module. Nothing
needs shims to be right, and each fits one text of the library's code only: where that reads
otherwise, it stays away, and there are breaks. Knows these classes; how a recording is made it
does not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from accel.graph import current_recording
from accel.item_slots import patched
from accel.patches import caches

Forward = Callable[..., Any]


def shimmed(forward: Forward, module: nn.Module) -> Forward:
    """`forward` of `module`, for a runner to call: with shims in a recording, plain in eager calls.
    Arguments are those of `accel.patches.caches.opened`.

    >>> layer = nn.Linear(2, 2)
    >>> shimmed(layer.forward, layer)(torch.zeros(1, 2)).shape
    torch.Size([1, 2])
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if current_recording() is None:
            args, kwargs = caches.originals(args, kwargs)
            return forward(*args, **kwargs)
        call = caches.Reading(args, kwargs)
        result = _shim_of(module)(module, forward, call.args, call.kwargs)
        call.close()
        return result

    return run


def _plainly(model: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _shim_of(module: nn.Module) -> Callable[[Any, Forward, Any, Any], Any]:
    """What is to call the forward of a module. Compiled code is left alone: it would be compiled
    anew for what stands in a function's place."""
    shim = _SHIMS.get(type(module).__name__)
    if shim is None or any(m._compiled_call_impl is not None for m in module.modules()):
        return _plainly
    fits = _text(type(module).__module__, shim.of) == shim.text and not _has_own(module, shim.of)
    return shim.run if fits else _plainly


class Shim(NamedTuple):
    """What stands around the forward of a class while it is recorded, and the functions of its
    file that it was written for, with the digest of their text; none where any text will do."""

    run: Callable[[Any, Forward, Any, Any], Any]
    of: tuple[str, ...] = ()
    text: str = hashlib.sha256().hexdigest()[:16]


def _text(module: str, names: tuple[str, ...]) -> str:
    """A digest of the text of functions of a Python module; "" where they are not found."""
    try:
        file = sys.modules[module]
        found = [functools.reduce(getattr, name.split("."), file) for name in names]
        return _digest(*found)
    except (AttributeError, KeyError, OSError, TypeError):
        return ""


@functools.cache
def _digest(*functions: Any) -> str:
    text = "".join(map(inspect.getsource, functions))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _has_own(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a method of the module's class is covered by one of its own; that its forward is, is
    our doing."""
    kind = type(module).__name__
    methods = {name.removeprefix(f"{kind}.") for name in names if name.startswith(f"{kind}.")}
    return not vars(module).keys().isdisjoint(methods - {"forward"})


def _bound(model: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """A call's arguments by name, the model first. The signature of a wrapper may hide them."""
    return inspect.signature(type(model).forward).bind(model, *args, **kwargs)


def _in_place_of(module: nn.Module, name: str, function: Forward) -> AbstractContextManager[Any]:
    """While open, `function` stands in a method's place for the thread that records. Others, which
    may be in the midst of the same forward, get the method."""
    method = getattr(module, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (method if current_recording() is None else function)(*args, **kwargs)

    return mock.patch.object(module, name, run)


def _hidream(model: Any, forward: Forward, args: Any, kwargs: Any) -> Any:
    """The picture's size, put on the device and read back number by number at the end."""
    patchify = model.patchify

    def with_sizes_on_the_host(latents: Tensor) -> tuple[Any, ...]:
        tokens, masks, _, ids = patchify(latents)
        rows, columns = (size // model.config.patch_size for size in latents.shape[-2:])
        return tokens, masks, [(rows, columns)] * len(latents), ids

    with _in_place_of(model, "patchify", with_sizes_on_the_host):
        return forward(*args, **kwargs)


def _omnigen(model: Any, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Each call leaves a table behind that the next one computes anew: what this recording made
    must not stay on the model."""
    table = model.rope.inv_freq
    try:
        return forward(*args, **kwargs)
    finally:
        model.rope.inv_freq = table


def _nucleus(model: Any, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Experts choose their tokens, so each gets as many as the others: nothing to ask about."""
    with contextlib.ExitStack() as stack:
        for layer in model.modules():
            if type(layer).__name__ == "NucleusMoELayer" and not layer.experts.use_grouped_mm:
                run = _evenly(layer.experts.forward, layer.num_experts)
                stack.enter_context(_in_place_of(layer.experts, "forward", run))
        return forward(*args, **kwargs)


def _evenly(experts: Forward, number: int) -> Forward:
    def run(tokens: Tensor, counts: Tensor) -> Any:
        share = len(tokens) // number
        return experts(tokens, torch.full((number,), share, dtype=counts.dtype, device="cpu"))

    return run


def _glm_image(model: Any, forward: Forward, args: Any, kwargs: Any) -> Any:
    """`embedding[drop] *= 0.0`, written as a choice: the number of dropped tokens does not matter.
    The forward gets nothing to drop."""
    call = _bound(model, args, kwargs)
    drop, embed = call.arguments["prior_token_drop"], model.prior_token_embedding
    plain = embed.forward

    def dropped(tokens: Tensor) -> Tensor:
        embedding = plain(tokens)
        return torch.where(drop.unsqueeze(-1), embedding * 0.0, embedding)

    call.arguments["prior_token_drop"] = slice(0, 0)
    with _in_place_of(embed, "forward", dropped):
        return forward(*call.args[1:], **call.kwargs)


def _all_have(blocks: nn.ModuleList, attention: str, processor: str) -> bool:
    """Whether attention is computed by that processor everywhere: others may treat masks else."""
    kinds = {type(getattr(block, attention).processor).__name__ for block in blocks}
    return kinds == {processor}


def _with_rows_by_choice(model: Any, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Padding gets its token by a mask that Python made, broken geometry the identity."""
    with _rows_by_choice():
        return forward(*args, **kwargs)


def _qwen_image21(model: Any, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Where in the sequence pictures are steers Python at eleven places: it is read once."""
    call = _bound(model, args, kwargs)
    if not _all_have(model.transformer_blocks, "attn", "QwenImage21AttnProcessor"):
        return forward(*args, **kwargs)
    call.arguments["img_mask"] = call.arguments["img_mask"].cpu()
    with _host_masks_as_positions():
        return forward(*call.args[1:], **call.kwargs)


def _mochi(model: Any, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Every layer asks which tokens of each prompt are real: the mask is read once."""
    call = _bound(model, args, kwargs)
    mask, embed = call.arguments["encoder_attention_mask"], model.time_embed
    if not _all_have(model.transformer_blocks, "attn1", "MochiAttnProcessor2_0"):
        return forward(*args, **kwargs)

    def embedded(times: Tensor, prompts: Tensor, _: Tensor, *rest: Any, **options: Any) -> Any:
        return plain(times, prompts, mask, *rest, **options)

    call.arguments["encoder_attention_mask"], plain = mask.cpu(), embed.forward
    with _in_place_of(embed, "forward", embedded):
        return forward(*call.args[1:], **call.kwargs)


_SHIMS = {
    "MochiTransformer3DModel": Shim(
        _mochi,
        (
            "MochiTransformer3DModel.forward",
            "MochiTransformerBlock.forward",
            "MochiAttnProcessor2_0.__call__",
        ),
        "2687cac810efa887",
    ),
    "ZImageControlNetModel": Shim(_with_rows_by_choice),
    "SanaWMTransformer3DModel": Shim(_with_rows_by_choice),
    "QwenImage21Transformer2DModel": Shim(
        _qwen_image21,
        (
            "QwenImage21Transformer2DModel.forward",
            "QwenImage21Transformer2DModel.build_token_metadata",
            "QwenImage21Rope.forward",
            "QwenImage21AttnProcessor.__call__",
            "_select_modulation_rows",
        ),
        "8803a17cf1e76652",
    ),
    "HiDreamImageTransformer2DModel": Shim(
        _hidream,
        (
            "HiDreamImageTransformer2DModel.forward",
            "HiDreamImageTransformer2DModel.patchify",
            "HiDreamImageTransformer2DModel.unpatchify",
        ),
        "e8c64db1d1a9284e",
    ),
    "NucleusMoEImageTransformer2DModel": Shim(
        _nucleus,
        ("NucleusMoELayer.forward", "SwiGLUExperts._run_experts_for_loop"),
        "3641b69daa35d223",
    ),
    "OmniGenTransformer2DModel": Shim(
        _omnigen, ("OmniGenSuScaledRotaryEmbedding.forward",), "bd86ef9bbbd24d3d"
    ),
    "GlmImageTransformer2DModel": Shim(
        _glm_image, ("GlmImageTransformer2DModel.forward",), "677ec91548a863fb"
    ),
}


@contextlib.contextmanager
def _rows_by_choice() -> Iterator[None]:
    """`x[mask] = row` written as a choice: how many rows the mask has does not matter."""
    plain: Any = torch.Tensor.__setitem__

    def assign(self: Tensor, index: Any, value: Any) -> None:
        if current_recording() is not None and _is_row_for_all(self, index, value):
            mask = index.reshape(*index.shape, *[1] * (self.dim() - index.dim()))
            self.copy_(torch.where(mask, value, self))
        else:
            plain(self, index, value)

    with patched(torch.Tensor, __setitem__=assign):
        yield


@contextlib.contextmanager
def _host_masks_as_positions() -> Iterator[None]:
    """Masks on the host, as indices into the device's tensors, become the positions they name."""
    plain_item: Any = torch.Tensor.__getitem__
    plain_assign: Any = torch.Tensor.__setitem__

    def item(self: Tensor, index: Any) -> Any:
        return plain_item(self, _positions(self, index))

    def assign(self: Tensor, index: Any, value: Any) -> None:
        plain_assign(self, _positions(self, index), value)

    with patched(torch.Tensor, __getitem__=item, __setitem__=assign):
        yield


def _positions(x: Tensor, index: Any) -> Any:
    parts = index if type(index) is tuple else (index,)
    if x.is_cpu or current_recording() is None or not any(map(_is_host_mask, parts)):
        return index
    named = [part.nonzero(as_tuple=True) if _is_host_mask(part) else (part,) for part in parts]
    return tuple(itertools.chain.from_iterable(named))


def _is_host_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool and x.is_cpu


def _is_row_for_all(x: Tensor, index: Any, value: Any) -> bool:
    """Whether `x[index] = value` gives all rows that a boolean mask names the same value."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not index.dim():
        return False
    if not isinstance(value, Tensor) or (value.dtype, value.device) != (x.dtype, x.device):
        return False
    if (index.device, index.shape) != (x.device, x.shape[: index.dim()]) or value.dim() > x.dim():
        return False
    row = (*[1] * index.dim(), *x.shape[index.dim() :])[x.dim() - value.dim() :]
    return all(size in (1, own) for size, own in zip(value.shape, row, strict=True))
