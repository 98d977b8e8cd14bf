"""Results as tables for people: benchmark, check, doctor. Knows rich, decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from accel.pipelines.doctor import Finding
from accel.pipelines.plotting import title


def print_bench(result: dict[str, Any]) -> None:
    """Draws what `benchmark.bench` returned."""
    active = result["inactive"] is None
    ways = ("eager", "patched") if active else ("eager",)
    sides = [result[way] for way in ways]
    table = Table("", *ways)
    table.add_row("median picture", *(f"{side['median_s']:.3f} s" for side in sides))
    table.add_row("step", *(_ms(side["step_ms"]) for side in sides))
    table.add_row("first picture", *(f"{side['warm_up_s'][0]:.3f} s" for side in sides))
    if active:
        table.add_row("set-up", "", f"{result['patched']['setup_s']:.3f} s")
    table.add_row("peak memory", *(gib(side["peak_bytes"]) for side in sides))
    table.add_row("reserved memory", *(gib(side["reserved_bytes"]) for side in sides))
    console = new_console()
    say(console, title(result))  # a title of the table's would be broken at its width
    console.print(table)
    if active:
        say(console, f"eager / patched: {result['ratio']:.2f}")
    else:
        why = f"not accelerated here: {result['inactive']}"
        say(console, f"nothing is patched, so all figures are eager ones; {why}")
    say(console, _equality(result))


def _equality(result: dict[str, Any]) -> str:
    if result["pixel_variance"] == 0:
        return "pictures: flat, so their equality proves nothing"
    latents = {True: "equal", False: "DIFFERENT", None: "not shown"}[result["latents_equal"]]
    pictures = "equal" if result["pictures_equal"] else "DIFFERENT"
    return (
        f"PNG bytes of all pictures: {pictures}; latents: {latents}; "
        f"pixel variance {result['pixel_variance']:.1f}"
    )


def print_check(result: dict[str, Any]) -> None:
    """Draws what `checking.verify` returned, the verdict last."""
    table = Table("run", "latents", "PNG bytes", "pixel variance")
    words = {True: "equal", False: "DIFFERENT", None: "not shown"}
    for check in result["checks"]:
        latents, pictures = words[check["latents_equal"]], words[check["pictures_equal"]]
        table.add_row(check["run"], latents, pictures, f"{check['pixel_variance']:.1f}")
    console = new_console()
    console.print(table)
    for note in result["calls"]["notes"]:
        say(console, f"call by call: {note}")
    say(console, result["verdict"])


def print_explanation(result: dict[str, Any]) -> None:
    """Draws what `explaining.explain` returned: a row a part, then every break and every reason."""
    report = result["report"]
    console = new_console()
    if report["inactive"] is not None:
        say(console, f"nothing is accelerated: {report['inactive']}")
    if not report["parts"]:
        return
    table = Table("part", Column("class", overflow="fold"))
    for heading in ("captured", "recaptured", "replayed", "eager", "segments", "breaks"):
        table.add_column(heading)
    for part in report["parts"]:
        table.add_row(*_row(part))
    console.print(table)
    for part in report["parts"]:
        for line in dict.fromkeys(_remarks(part)):
            say(console, f"{part['name']}: {line}")
    say(console, f"memory of the graphs: {gib(report['pool_bytes'])}")


def _row(part: dict[str, Any]) -> list[str]:
    graphs = part["graphs"]
    counts = [part[name] for name in ("captures", "recaptures", "replays", "eager_calls")]
    segments = ", ".join(str(graph["segments"]) for graph in graphs) or "-"
    breaks = ", ".join(str(len(graph["breaks"])) for graph in graphs) or "-"
    return [part["name"], part["kind"], *map(str, counts), segments, breaks]


def _remarks(part: dict[str, Any]) -> Iterator[str]:
    if part["declined"] is not None:
        yield f"declined: {part['declined']}"
    for graph in part["graphs"]:
        for found in graph["breaks"]:
            guarded = ", guarded" if found["guarded"] else ""
            yield f"{found['kind']} break at {found['where']}: {found['what']}{guarded}"
    if part["guard_misses"]:
        yield f"replays given up, since something had changed: {part['guard_misses']}"
    for what, count in part["changes"].items():
        yield f"changed x{count}: {what}"
    if part["evictions"]:
        yield f"graphs given up for memory: {part['evictions']}"
    for reason, count in part["reasons"].items():
        yield f"eager x{count}: {reason}"


def print_doctor(findings: list[Finding]) -> None:
    """Draws what `doctor.examine` found, warnings last."""
    table = Table("what", "found")
    for finding in findings:
        table.add_row(finding.name, finding.value)
    console = new_console()
    console.print(table)
    for finding in findings:
        if finding.warning is not None:
            say(console, f"warning: {finding.name}: {finding.warning}")


def new_console() -> Console:
    """Stdout as wide as the terminal; into a file or a pipe wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def say(console: Console, line: str) -> None:
    """One line stays one line, brackets and numbers as they are: people grep in it."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f} GiB"
