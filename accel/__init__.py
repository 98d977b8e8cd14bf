"""accel: breakable CUDA graphs for diffusers pipelines and LLM prefill.

This module knows only names: `patch`, `unpatch`, `report`, `verify`, `warm` and `prefill_runner`
are imported when first used, so that `import accel` brings in neither diffusers nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel.patches.llm import prefill_runner
    from accel.patches.pipeline import patch, report, unpatch
    from accel.patches.verification import verify
    from accel.patches.warming import warm

__version__ = "0.1.0"
__all__ = ["patch", "prefill_runner", "report", "unpatch", "verify", "warm"]

_LAZY = {
    "patch": "pipeline",
    "unpatch": "pipeline",
    "report": "pipeline",
    "verify": "verification",
    "warm": "warming",
    "prefill_runner": "llm",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'accel' has no attribute {name!r}")
    return getattr(import_module(f"accel.patches.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
