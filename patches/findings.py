"""What a verification found: equal, or the first place that differs, and by how much.

Holds facts and prints them. How they are found is verification.py's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Difference:
    """The first call that is not what the eager one is.

    `call` counts the component's calls in a run and `step` the steps of the scheduler, both from 0
    (`step` is None outside the denoising loop). `submodule` is the innermost whose result differs,
    if it could be found. `max_abs` is the largest difference, `max_rel` that over the largest
    magnitude expected; None where there is no such number. `run` and `what` say in words which run
    it was and what differed.

    >>> print(Difference("unet", 3, 3, "patched", "what it returns differs", "mid_block", 0.5, 0.1))
    unet, call 3 at step 3, in mid_block, patched: what it returns differs; largest difference 0.5,
    relative 0.1
    """

    component: str
    call: int
    step: int | None
    run: str
    what: str
    submodule: str | None = None
    max_abs: float | None = None
    max_rel: float | None = None

    def __str__(self) -> str:
        sizes = ""
        if self.max_abs is not None:
            relative = "" if self.max_rel is None else f", relative {self.max_rel:.3g}"
            sizes = f"; largest difference {self.max_abs:.3g}{relative}"
        return f"{_place(self)}, {self.run}: {self.what}{sizes}"


@dataclass
class NotFinite:
    """The first call that returned an infinite number or NaN; the fields are as in `Difference`."""

    component: str
    call: int
    step: int | None
    run: str
    submodule: str | None = None

    def __str__(self) -> str:
        return f"not finite: {_place(self)}, {self.run}"


@dataclass
class Verification:
    """What `accel.verify` returns. `equal` says that everything was the same bit for bit, `passed`
    also that every number was finite. `runs` is how often the pipeline ran, `calls` how many calls
    of patched parts were compared with eager ones, `replays` how many calls were replays.

    >>> print(Verification(runs=12, calls=30, replays=24))
    equal: 12 runs, 30 calls compared, 24 replays
    """

    equal: bool = True
    runs: int = 0
    calls: int = 0
    replays: int = 0
    first_difference: Difference | None = None
    non_finite: NotFinite | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all was equal and finite."""
        return self.equal and self.non_finite is None

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and strings."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        counts = f"{self.runs} runs, {self.calls} calls compared, {self.replays} replays"
        if self.calls == 0:
            counts = "trivially, as nothing was accelerated"
        found = counts if self.first_difference is None else str(self.first_difference)
        lines = [f"equal: {found}" if self.equal else f"differs: {found}"]
        if self.non_finite is not None:
            lines.append(str(self.non_finite))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _place(found: Difference | NotFinite) -> str:
    step = "" if found.step is None else f" at step {found.step}"
    inside = "" if found.submodule is None else f", in {found.submodule}"
    return f"{found.component}, call {found.call}{step}{inside}"
