"""The tables of a scheduler that host and device both know: its timesteps and noise levels.

Knows tensors named `timesteps` and `sigmas`, which part of one another tensor is, and when somebody
wrote to it. Knows nothing of any scheduler's formulas, nor of who asks (scheduler_answers.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TABLES = ("timesteps", "sigmas")

LEAST_GAP = 1e-3
"""How far apart in log-SNR two steps of a schedule are, at least, where no system that a solver
builds from three of them can be singular in float32 (relative distances of 5e-5 and more)."""


class Known:
    """A table of a scheduler: a one-dimensional tensor, and its copy on the other side.

    >>> known = Known(torch.arange(3.0))
    >>> known.is_of(known.source), known.view_like(known.source[1:2], known.host()).tolist()
    (True, [1.0])
    """

    def __init__(self, source: Tensor) -> None:
        self.source, self._version = source, source._version
        self.storage = source.untyped_storage()._cdata
        self._host = source if source.is_cpu else None
        self._copies: dict[torch.device, Tensor] = {}

    def is_of(self, source: Any) -> bool:
        """Whether `source` is this table, and nobody wrote to it since."""
        return source is self.source and source._version == self._version

    def host(self) -> Tensor:
        """The values on the host; the host waits for them if it has not seen them yet."""
        if self._host is None:
            self._host = self.source.detach().cpu()
        return self._host

    def on(self, device: torch.device) -> Tensor:
        """A copy on `device`, made once, without waiting."""
        if device not in self._copies:
            self._copies[device] = upload(self.source.detach(), device, None)
        return self._copies[device]

    def holds(self, x: Tensor) -> bool:
        """Whether `x` is the table or a view into it."""
        if x.dtype is not self.source.dtype or x.untyped_storage()._cdata != self.storage:
            return False
        if self.source._version != self._version:
            return False
        start = x.storage_offset() - self.source.storage_offset()
        reach = sum((n - 1) * step for n, step in zip(x.size(), x.stride(), strict=True))
        return x.numel() > 0 and start >= 0 and start + reach < self.source.numel()

    def view_like(self, x: Tensor, copy: Tensor) -> Tensor:
        """The part of `copy`, the whole table elsewhere, that `x` is of the table."""
        start = x.storage_offset() - self.source.storage_offset()
        start += copy.storage_offset()
        return copy.as_strided(x.size(), x.stride(), start)


class HostValues:
    """The tables of one scheduler. Does not hold the scheduler."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._has_gaps: tuple[Known, bool] | None = None

    def look(self, scheduler: Any) -> list[Known]:
        """The scheduler's tables as they are now. Reads nothing."""
        for name in TABLES:
            source = vars(scheduler).get(name)
            known = self._known.get(name)
            if known is not None and known.is_of(source):
                continue
            self._known.pop(name, None)
            if _is_table(source):
                self._known[name] = Known(source)
        return list(self._known.values())

    def learn(self, scheduler: Any) -> None:
        """Looks, and takes both sides' copies now: `set_timesteps` has just waited anyway."""
        device = device_of(scheduler)
        for known in self.look(scheduler):
            if device is None or device.type == "cpu":
                return
            if known.source.is_cpu:
                known.on(device)
            else:
                known.host()

    def has_gaps(self) -> bool:
        """Whether the noise levels differ so much, one from the next, that no system of equations
        of a multistep solver over them is singular."""
        known = self._known.get("sigmas")
        if known is None:
            return False
        if self._has_gaps is None or self._has_gaps[0] is not known:
            self._has_gaps = known, _has_gaps(known.host())
        return self._has_gaps[1]


def device_of(scheduler: Any) -> torch.device | None:
    """Where a scheduler's timesteps are; None before it has any."""
    timesteps = vars(scheduler).get("timesteps")
    return timesteps.device if isinstance(timesteps, Tensor) else None


def _is_table(x: Any) -> bool:
    # An inference tensor does not tell when it is written to.
    return type(x) is Tensor and x.dim() == 1 and x.is_contiguous() and not x.is_inference()


def _has_gaps(sigmas: Tensor) -> bool:
    """By log-SNR, of both kinds of schedule: -log(s), and log((1 - s) / s) for flows."""
    levels = sigmas[:-1].double()  # the last step of all is of first order
    gaps = -levels.log().diff()
    if bool((levels < 1).all()):
        gaps = torch.minimum(gaps, ((1 - levels) / levels).log().diff())
    return bool(torch.isfinite(gaps).all() and (gaps > LEAST_GAP).all())


def upload(x: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """`x.to(device, dtype)` for a host tensor, through pinned memory: the host does not wait."""
    converted = x if dtype is None else x.to(dtype)
    return converted.pin_memory().to(device, non_blocking=True)
