"""What is known of one signature: its recordings, what they cost and whether they pay.

Knows by which numbers recordings are judged, and for how long none is made. Does not know calls
(runner.py) nor how a recording is made (recorded.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from accel.recorded import Recorded
from accel.reporting import PartReport

HOST_SLACK = 0.15
"""Share of the device's time still to come when the host returns, from which graphs do not help."""
LEAST_GAIN = 1.05
"""Eager time over replay time below which a recording is dropped again."""
JUDGED_REPLAYS = 2
"""Replays over which the gain is confirmed."""
VARIANTS = 4
"""Recordings a signature, and plain values an argument, may have."""
BARRED_CALLS = 64
"""Calls that a signature over the memory limit waits before it may be recorded again."""
WEIGHTS_MOVED = "where the weights lie, or which there are"


@dataclass
class Entry:
    """What is known of one signature; `report` is that of its runner.

    >>> entry = Entry(PartReport("unet", "UNet2DConditionModel"))
    >>> entry.decline("the device is the bottleneck")
    >>> entry.barred, entry.report.declined
    (inf, 'the device is the bottleneck')
    """

    report: PartReport
    seen: bool = False
    """Whether it has had the eager call that comes before a recording."""
    variants: list[Recorded] = field(default_factory=list)
    barred: float = 0
    """Calls to come that are not recorded, and why."""
    barred_for: str = ""
    eager_seconds: float = 0.0
    judged: list[float] = field(default_factory=list)
    """Seconds of the first replays."""
    on_trial: bool = False
    """Whether the next replay is still to be timed."""
    misses: int = 0
    stale_turns: int = 0
    fruitless: int = 0
    """Misses, and twice the times that weights moved, since a replay was used last."""
    last_use: int = 0
    bytes: int = 0

    def bar(self, reason: str, calls: float = BARRED_CALLS) -> None:
        """No recording for some calls."""
        self.barred, self.barred_for = calls, reason

    def decline(self, reason: str, calls: float = math.inf) -> None:
        """No recording, nor replay, for some calls or for ever."""
        self.forget()
        self.bar(reason, calls)
        self.report.declined = reason

    def decline_if_fruitless(self, cost: int, reason: str) -> None:
        """Counts what recordings have cost in vain."""
        self.fruitless += cost
        if self.fruitless > 2 * VARIANTS:
            self.decline(reason, BARRED_CALLS)

    def judge_eager(self, seconds: float, lag: float, device: float) -> None:
        """After a timed eager call, of which `lag` seconds came after the host was done and of
        which the device took `device`: a host that is not the bottleneck has nothing to gain."""
        self.eager_seconds = seconds
        self.on_trial = seconds > 0 and len(self.judged) < JUDGED_REPLAYS
        if lag >= HOST_SLACK * device:
            self.decline(
                f"the device is the bottleneck: when the host was done, {lag * 1e3:.1f} of "
                f"{device * 1e3:.1f} ms of its work were still to come"
            )

    def judge_replay(self, seconds: float) -> None:
        """After one of the first replays: recordings that gain too little are dropped."""
        self.judged.append(seconds)
        self.on_trial = len(self.judged) < JUDGED_REPLAYS
        gain = self.eager_seconds / max(min(self.judged), 1e-9)
        if not self.on_trial and gain < LEAST_GAIN:
            self.decline(f"a replay is only {gain:.2f} times as fast as an eager call")

    def drop_stale(self, version: int) -> bool:
        """Drops recordings whose weights moved since that version, or whose outside tensors the
        model has replaced. Whether there were any."""
        stale = [(v, r) for v in self.variants if (r := v.held.stale()) or v.state[0] != version]
        if not stale:
            return False
        for variant, replaced in stale:
            self.report.changes[replaced or WEIGHTS_MOVED] += 1
            self.drop(variant)
        self.report.recaptures += len(stale)
        replaced = next((reason for _, reason in stale if reason), None)
        if replaced is not None:
            self.stale_turns += 1
            if self.stale_turns > 2:
                self.decline(replaced)
        else:
            self.decline_if_fruitless(2, "the weights move at every call")
        return True

    def add(self, variant: Recorded) -> None:
        """Takes in a recording, the likeliest to fit next; the least used one goes for it."""
        for least_used in self.variants[VARIANTS - 1 :]:
            self.drop(least_used)
        self.variants.insert(0, variant)
        self.bytes = max(self.bytes, variant.report.pool_bytes)
        self.report.captures += 1
        self.report.graphs.append(variant.report)
        if self.report.declined == self.barred_for:
            self.report.declined = None  # for the time being, that was

    def forget(self) -> None:
        """Drops every recording."""
        for variant in self.variants[:]:
            self.drop(variant)

    def drop(self, variant: Recorded) -> None:
        """Gives one recording up."""
        self.variants.remove(variant)
        self.report.graphs.remove(variant.report)
        variant.discard()
