"""A fake clock: what the host and the device would have spent, so that timing rules can be tested.

Time moves only when an operation is issued, the host waits, or a test says so. Seconds throughout.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

DEVICE_SECONDS_PER_OP = 10e-6


@dataclass
class Clock:
    """Host time, and the prices of things.

    `op_cost` is what an operation keeps the device busy for, `op_host` what the host spends to
    issue it, both by operator name without overload ("mm"; other names get the default price).
    `replay_host` is what launching a segment costs the host. A replayed operation costs the device
    what it costs in eager, times `replay_factor`.
    """

    host: float = 0.0
    default_cost: float = DEVICE_SECONDS_PER_OP
    default_host: float = 0.0
    replay_host: float = 0.0
    replay_factor: float = 1.0
    op_cost: dict[str, float] = field(default_factory=dict)
    op_host: dict[str, float] = field(default_factory=dict)

    def advance(self, seconds: float) -> None:
        """The host does something else for a while."""
        self.host += seconds

    def cost(self, name: str) -> float:
        """Device seconds of the operation `name`."""
        return self.op_cost.get(name, self.default_cost)

    def host_cost(self, name: str) -> float:
        """Host seconds to issue the operation `name`."""
        return self.op_host.get(name, self.default_host)


@dataclass
class Counters:
    """What the device was asked to do since it was last reset."""

    executed: int = 0
    recorded: int = 0
    replays: int = 0
    replayed: int = 0
    host_reads: int = 0
    uploads: int = 0
    by_name: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class Event:
    """A point in a stream's work."""

    def __init__(self, clock: Clock, time: float) -> None:
        self._clock = clock
        self.time = time

    def query(self) -> bool:
        """Whether the device has passed this point."""
        return self._clock.host >= self.time

    def synchronize(self) -> None:
        """The host waits until the device has passed this point."""
        self._clock.host = max(self._clock.host, self.time)

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds of device time from here to `end_event`."""
        return (end_event.time - self.time) * 1e3
