"""Tiny video denoisers of flex attention, which torch offers only for devices it knows by name.

Knows each family's smallest sensible configuration and call, like `tiny_videos`. Apart from the
others, since no test double of a device can run them: tests need a GPU.
"""

from __future__ import annotations

from typing import Any

from accel.pipelines.tiny_family import Draw, Family
from accel.pipelines.tiny_images import SIZES
from accel.pipelines.tiny_more_videos import anyflow
from accel.pipelines.tiny_videos import FRAMES, WAN


def _anyflow_far(draw: Draw, variant: int) -> dict[str, Any]:
    """A step of the second chunk, which reads what the first has left in the cache."""
    rows, columns = SIZES[variant]
    full, compressed = rows // 2 * columns // 2, rows // 4 * columns // 4
    caches = [
        {
            "full_cache": draw.normal(2, 2, 2, 3 * FRAMES * full, 16),
            "compressed_cache": draw.normal(2, 2, 2, FRAMES * compressed, 16),
        }
        for _ in range(2)
    ]
    return {
        **anyflow(draw, variant),
        "chunk_partition": [1, FRAMES],
        "kv_cache": caches,
        "kv_cache_flag": {"num_cached_chunks": 1, "is_cache_step": False},
    }


def _kandinsky6_sr(draw: Draw, variant: int) -> dict[str, Any]:
    return {
        "hidden_states": draw.normal(1, FRAMES, 8, 8 + 8 * variant, 9),
        "timestep": draw.times(1),
    }


ANYFLOW_FAR = {**WAN, "chunk_partition": (1, FRAMES)}
KANDINSKY6_SR = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "time_dim": 32,
    "model_dim": 32,
    "ff_dim": 64,
    "num_visual_blocks": 2,
    "axes_dims": (8, 4, 4),
    "nabla_window": (1, 1, 1),
}
FLEX_FAMILIES: dict[str, Family] = {
    "anyflow_far": Family("AnyFlowFARTransformer3DModel", ANYFLOW_FAR, _anyflow_far),
    "kandinsky6_sr": Family("Kandinsky6SRTransformer3DModel", KANDINSKY6_SR, _kandinsky6_sr),
}
