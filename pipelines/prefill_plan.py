"""`accel prefill --plan`: what graphs up to a ceiling will take, and whether this card has room.

The decoder's body runs on meta tensors, which have shapes and no memory: no weight is loaded, and
a card is needed only to say what is free on it. Graphs of all buckets share the memory of the
largest, so a ceiling takes the activations of one forward of that size, and a result's hidden
states. Not in it: attention's temporaries and workspaces of libraries, for which `LIBRARIES` is set
aside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.patches.llm import TransformersModel
from accel.pipelines.errors import AccelError, BadInput, first_line
from accel.pipelines.language_models import LanguageModel
from accel.pipelines.loading import Placement
from accel.pipelines.models import Trust
from accel.prefill.arena import peak
from accel.prefill.attention import AttentionGroup, Unsupported
from accel.prefill.buckets import Ladder
from accel.prefill.memory_plan import Lives

LIBRARIES = 512 * 2**20
"""Bytes kept free: workspaces of cuBLAS and of attention kernels, the allocator's rounding."""


def plan(
    model: LanguageModel, where: Placement, max_tokens: int, trust: Trust | None = None
) -> dict[str, Any]:
    """Bytes of weights, and for every ceiling up to `max_tokens` bytes of activations, of hidden
    states, of everything, and whether that `fits` beside `LIBRARIES` in what is free on the device
    now (None without a card). Raises `AccelError` where a model runs on no meta tensors."""
    try:
        empty = _without_weights(model, where, trust or Trust())
        body = _packed(empty)
        weights = _weight_bytes(model, empty)
        free = torch.cuda.mem_get_info(where.device)[0] if where.device.type == "cuda" else None
        rows = [_ceiling(body, tokens, weights, free) for tokens in _ceilings(max_tokens)]
    except AccelError:
        raise
    except Unsupported as why:
        raise AccelError(f"--plan: no graphs of --model {model.name} as planned: {why}") from why
    except Exception as error:  # models raise what they like where shapes depend on values
        raise AccelError(
            f"--plan: what --model {model.name} takes cannot be told without running it: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return {
        "weight_bytes": weights,
        "library_bytes": LIBRARIES,
        "free_bytes": free,
        "ceilings": rows,
        "largest_that_fits": max((r["tokens"] for r in rows if r["fits"]), default=None),
    }


def _ceilings(max_tokens: int) -> list[int]:
    """Of the buckets some to choose from: four a doubling, and the largest."""
    sizes = Ladder(max_tokens).sizes
    return [n for n in sizes if n == max_tokens or 4 * n % (1 << n.bit_length() - 1) == 0]


def _without_weights(model: LanguageModel, where: Placement, trust: Trust) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            model.folder, trust_remote_code=trust.code, local_files_only=True
        )
    except Exception as error:
        raise BadInput(f"--model {model.name} cannot be loaded: {first_line(error)}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=where.dtype, trust_remote_code=trust.code
        ).eval()


def _packed(empty: Any) -> TransformersModel:
    body = TransformersModel(empty)
    if why := body.objection():
        raise Unsupported(why)
    return body


def _weight_bytes(model: LanguageModel, empty: Any) -> int:
    """Quantized weights take what their files take, others what their dtype says."""
    if "quantization_config" in model.config:
        return sum(path.stat().st_size for path in model.folder.glob("*.safetensors"))
    return sum(tensor.nbytes for tensor in (*empty.parameters(), *empty.buffers()))


def _ceiling(
    body: TransformersModel, tokens: int, weights: int, free: int | None
) -> dict[str, Any]:
    activations = _activation_bytes(body, tokens)
    output = tokens * body.hidden_size * body.dtype.itemsize
    total = weights + activations + output
    return {
        "tokens": tokens,
        "activation_bytes": activations,
        "output_bytes": output,
        "total_bytes": total,
        "fits": None if free is None else total + LIBRARIES <= free,
    }


@torch.no_grad()
def _activation_bytes(body: TransformersModel, tokens: int) -> int:
    """The peak of what one forward of `tokens` rows has alive, its ids and result included."""
    attended: list[AttentionGroup] = []

    def attend(
        group: AttentionGroup, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        attended.append(group)
        return q.new_empty(q.shape[0], group.heads, group.value_dim)

    with Lives() as noted:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=body.device)
        body.body(ids, torch.zeros_like(ids), attend)
    if not attended:
        raise Unsupported("no layer asks for attention")
    return peak(noted.events)
