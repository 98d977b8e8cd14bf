"""A second pipeline over the same weights: one runs eagerly, the other patched, in turns.

Patching and unpatching one pipeline in turns would throw its graphs away every time.
"""

from __future__ import annotations

import copy
from typing import Any


def twin(pipe: Any) -> Any:
    """A copy of `pipe` with modules and scheduler of its own, whose parameters and buffers are the
    very tensors of the original: it costs no weight memory, and patching it leaves `pipe` alone."""
    from torch import nn

    shared: list[Any] = []
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            shared += [*component.parameters(), *component.buffers()]
        elif not hasattr(component, "step"):  # tokenizers and processors keep no state of a run
            shared.append(component)
    return copy.deepcopy(pipe, {id(thing): thing for thing in shared if thing is not None})
