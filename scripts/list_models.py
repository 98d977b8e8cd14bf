"""Writes `docs/models.md`: what becomes of every tiny denoiser of the zoo on the simulated device.

    python scripts/list_models.py --output docs/models.md

Each family is called with fresh latents, prompts and timesteps, in two shapes, and compared with
eager bit for bit; one wrong bit, and nothing is written. Same code and versions, same page, but for
its date. No GPU is needed.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.backend import register_backend
from accel.memory import Pool
from accel.patches.caches import opened
from accel.patches.shims import shimmed
from accel.pipelines.tiny import FAMILIES, FLEX_FAMILIES
from accel.pipelines.tiny_family import Family
from accel.pipelines.versions import installed
from accel.reporting import BreakReport, PartReport
from accel.runner import GraphRunner
from accel.signature import map_tree

# The simulated device is a test double: it lives in tests/, which is installed nowhere.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.accel.same import assert_same
from tests.accel.test_families import CALLS
from tests.simulated import new_device

COMMAND = "python scripts/list_models.py --output docs/models.md"
UNEVENTFUL = ("first call of the module", "first call of this signature")
"""Reasons for an eager call that every family has."""
PAGE = """\
# Models

Made on {date} with {versions}
by `{command}` on the simulated device that the tests use:
it records and replays like a GPU, and computes with the CPU's kernels.
`tests/accel/test_families.py` makes the same calls on CUDA where there is one. What waits for the
host there, but not here, is a break there only.

A *family* is a denoiser class of diffusers with a tiny configuration, random weights, and the
arguments that a pipeline passes to it; a class called in more than one way has several. Each of
these {families} families, of {classes} classes, was called {calls} times, with fresh latents,
prompts and timesteps each time: three times in one shape, three in another, once more in the first.
{equal} gave what eager gives, bit for bit, in every call; none gave anything else. {recorded} are
recorded, {declined} are declined with a reason, {elsewhere} do not run on this device.

- **segments**: stretches of recorded work in a recording; of each recording, if they differ.
  Between two of them is a break, or a mere cut: what is long is recorded in pieces.
- **breaks**: what runs eagerly between segments, at every replay: kind, operation, and the line of
  diffusers that calls it. *automatic*: it cannot be recorded. *guarded*: it brings a value to the
  host; a replay that brings another one is abandoned, for an eager call or another recording.
- **recorded, replayed, eager**: how many of the {calls} calls. Two are always eager: the first ones
  of a shape.
- **remarks**: why a family is declined, or why more calls than these two were eager.

Which exported denoisers have no family, and why, is written in `tests/pipelines/test_tiny.py`.
What [shims](#shims) do is part of the table; what they save is in the one after it.

| family | class | segments | breaks | recorded | replayed | eager | remarks |
|---|---|---|---|---|---|---|---|
"""
SHIMS = """
## Shims

A recording is spared breaks whose outcome Python can foresee, or has to ask for once only, by
shims for a few classes (`patches/shims.py`). Caches among the arguments are keyed by what is in
them, where as objects they would make every call eager (`patches/caches.py`). Eager calls run the
plain class; recordings are equal to it bit for bit, here too. The families for which that makes a
difference, without → with: the last recording's segments and breaks, and how many of the {calls}
calls were replays.

| family | segments | breaks | replayed |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What became of a family: `report` of its runner, or why the simulated device cannot run it.

    >>> Row("a", Family("A", {}, dict), unfit="no kernel").line()
    '| a | `A` | - | - | - | - | - | not on the simulated device: no kernel |'
    """

    name: str
    family: Family
    report: PartReport | None = None
    unfit: str | None = None
    without: PartReport | None = None
    """Of a runner without shims."""

    def difference(self) -> str | None:
        """The row of the table of shims, if they make a difference."""
        if self.report is None or self.without is None:
            return None
        pairs = list(zip(_last(self.without), _last(self.report), strict=True))
        if all(without == with_shims for without, with_shims in pairs):
            return None
        cells = [self.name, *(f"{without} → {with_shims}" for without, with_shims in pairs)]
        return f"| {' | '.join(cells)} |"

    def line(self) -> str:
        """The row of the table."""
        cells = [self.name, f"`{self.family.kind}`"]
        if self.report is None:
            cells += ["-"] * 5 + [f"not on the simulated device: {self.unfit}"]
        else:
            counts = self.report.captures, self.report.replays, self.report.eager_calls
            cells += [_segments(self.report), _breaks(self.report)]
            cells += [str(count) for count in counts] + [_remarks(self.report)]
        return f"| {' | '.join(cells)} |"


def run(name: str, family: Family) -> Row:
    """Calls a family through runners, as `patch` would and without shims. Raises AssertionError
    where a result is not eager's."""
    register_backend("sim", new_device())
    device = torch.device("sim:0")
    plain, watched = family.make(seed=0), family.make(seed=0).to(device)

    bare = family.make(seed=0).to(device)
    options: dict[str, Any] = {"capture": "always", "name": name}
    forward = shimmed(watched.forward, watched)
    runner = GraphRunner(forward, pool=Pool(device), module=watched, **options)
    without = GraphRunner(bare, pool=Pool(device), module=bare, **options)
    for seed, variant in CALLS:
        with torch.no_grad():
            place, expected = f"{name}({seed=}, {variant=})", plain(**family.inputs(seed, variant))
            try:
                _, given = opened((), _moved(family.inputs(seed, variant), device))
                result = runner(**given)
            except ValueError as error:
                if not runner.report.captures and "sim device" in str(error):  # eager raised it
                    return Row(name, family, unfit=_cell(str(error).partition(".")[0]))
                raise
            assert_same(_moved(result, "cpu"), expected, place=place)
            result = without(**_moved(family.inputs(seed, variant), device))
            assert_same(_moved(result, "cpu"), expected, place=f"{place} without shims")
    return Row(name, family, runner.report, without=without.report)


def page(rows: list[Row], date: str) -> str:
    """The whole text of `docs/models.md`."""
    ran = [row.report for row in rows if row.report is not None]
    recorded = sum(report.captures > 0 for report in ran)
    versions = ", ".join(f"{name} {installed(name)}" for name in ("diffusers", "torch"))
    head = PAGE.format(
        date=date,
        command=COMMAND,
        versions=versions,
        families=len(rows),
        classes=len({row.family.kind for row in rows}),
        calls=len(CALLS),
        equal=len(ran),
        recorded=recorded,
        declined=len(ran) - recorded,
        elsewhere=len(rows) - len(ran),
    )
    differences = [line for row in rows if (line := row.difference()) is not None]
    lines = [row.line() for row in rows]
    tables = [head, *lines, SHIMS.format(calls=len(CALLS)), *differences]
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in tables)


def _moved(tree: Any, device: torch.device | str) -> Any:
    return map_tree(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def _last(report: PartReport) -> tuple[Any, ...]:
    """Segments and breaks of the last recording, and replays."""
    graph = report.graphs[-1] if report.graphs else None
    counts = ("-", "-") if graph is None else (graph.segments, len(graph.breaks))
    return *counts, report.replays


def _segments(report: PartReport) -> str:
    counts = [str(graph.segments) for graph in report.graphs]
    return ", ".join(counts if len(set(counts)) > 1 else counts[:1]) or "-"


def _breaks(report: PartReport) -> str:
    """Those of all recordings, each once, with how often a recording has it if more than once."""
    most: Counter[str] = Counter()
    for graph in report.graphs:
        most |= Counter(_break(found) for found in graph.breaks)
    told = (f"{words}, {count} times" if count > 1 else words for words, count in most.items())
    return "<br>".join(told) or "-"


def _break(found: BreakReport) -> str:
    where = found.where.rpartition("diffusers/")[2]
    if "patches/" in where:  # a shim's own, and its line would change with every edit
        where = "patches/" + where.rpartition("patches/")[2].partition(":")[0]
    guarded = ", guarded" if found.guarded else ""
    return f"{found.kind}{guarded}: `{found.what}` at `{where}`"


def _remarks(report: PartReport) -> str:
    reasons = [reason for reason in report.reasons if reason not in UNEVENTFUL]
    declined = [] if report.captures else ["declined"]
    return ": ".join([*declined, "; ".join(_cell(reason) for reason in reasons)]) or "-"


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


def _chosen(names: Iterable[str]) -> dict[str, Family]:
    known = {**FAMILIES, **FLEX_FAMILIES}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"no tiny family {unknown[0]!r}: --only may name {', '.join(known)}")
    return {name: known[name] for name in names or known}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="default: all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [run(name, family) for name, family in _chosen(asked.only).items()]
    asked.output.write_text(page(rows, datetime.date.today().isoformat()), encoding="utf-8")
    print(asked.output)


if __name__ == "__main__":
    main()
