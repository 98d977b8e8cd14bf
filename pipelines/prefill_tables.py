"""What `accel prefill` found, for people. Knows rich, decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from accel.pipelines.tables import gib, new_console, say

PADDING = (
    "a batch is padded to a bucket, 64 tokens or more, and its attention is plain torch: on a CPU "
    "that can be slower than the model's own forward"
)
"""Why packed prefill may lose where no graph makes up for it."""

SHOWN = 72
"""Letters of a prompt that a heading shows."""


def print_prefill(result: dict[str, Any]) -> None:
    """Draws what `prefilling.fulfil` returned: the answers, then how long they took."""
    console = new_console()
    for answer in result["prompts"]:
        say(console, f"{_shortened(answer['prompt'])} ({_count(answer['tokens'], 'token')})")
        for line in _scores(answer) if "scores" in answer else _next(answer):
            say(console, f"  {line}")
    console.print(_times(result))
    for line in _remarks(result):
        say(console, line)


def print_plan(result: dict[str, Any]) -> None:
    """Draws what `prefill_plan.plan` told: a row a ceiling, then what there is room for."""
    console = new_console()
    say(console, f"{result['model']}, {result['dtype']}: weights {_size(result['weight_bytes'])}")
    table = Table("graphs up to", "activations", "hidden states", "with weights", "room here")
    for row in result["ceilings"]:
        names = ("activation_bytes", "output_bytes", "total_bytes")
        room = {True: "yes", False: "NO", None: "-"}[row["fits"]]
        table.add_row(f"{row['tokens']:,} tokens", *(_size(row[name]) for name in names), room)
    console.print(table)
    say(console, _room(result))


def _room(result: dict[str, Any]) -> str:
    if result["free_bytes"] is None:
        return (
            f"no graphs on {result['device']}: --dtype plans another precision, what there is room "
            "for is told on a GPU"
        )
    free = f"{_size(result['free_bytes'])} free on {result['device']}"
    aside = f"{_size(result['library_bytes'])} of it set aside for libraries"
    largest, wanted = result["largest_that_fits"], result["max_tokens"]
    if largest is None:
        return f"{free}, {aside}: no room for any graph"
    if largest < wanted:
        return f"{free}, {aside}: take --max-tokens {largest}, there is no room for {wanted:,}"
    return f"{free}, {aside}: room for all of them"


def _size(count: int) -> str:
    return gib(count) if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _shortened(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _next(answer: dict[str, Any]) -> Iterator[str]:
    for token in answer["next"]:
        yield f"{token['log_probability']:8.3f}  {token['token']!r}"


def _scores(answer: dict[str, Any]) -> Iterator[str]:
    for token in answer["scores"]:
        value = token["log_probability"]
        yield f"{'-' if value is None else f'{value:.3f}':>8}  {token['token']!r}"
    counted = _count(len(answer["scores"]) - 1, "token")
    if answer["mean"] is None:
        yield "sum 0: the first token has no probability, and there is no other"
    else:
        yield (
            f"sum {answer['sum']:.3f}, mean {answer['mean']:.3f} over {counted}, "
            f"perplexity {answer['perplexity']:.2f}"
        )


def _times(result: dict[str, Any]) -> Table:
    table = Table("", "median", "tokens a second", "rounds")
    table.add_row(_way(result["report"]), *_clock(result["prefill"]))
    if result["own"] is not None:
        table.add_row("the model's own forward", *_clock(result["own"]))
    return table


def _way(report: dict[str, Any]) -> str:
    if report["declined"] is not None:
        return "prefill, not packed"
    mode, asked = report["mode"], report["asked"]
    how = mode if mode == asked else f"{mode} instead of {asked}"
    return f"prefill, {how}, attention {report['attention']}"


def _clock(side: dict[str, Any]) -> tuple[str, str, str]:
    seconds = f"{side['median_s'] * 1e3:.2f} ms"
    return seconds, f"{side['tokens_per_s']:,.0f}", str(len(side["seconds"]))


def _remarks(result: dict[str, Any]) -> Iterator[str]:
    texts = _count(len(result["prompts"]), "prompt")
    tokens, groups = _count(result["tokens"], "token"), _count(result["batches"], "batch", "es")
    yield (f"{texts}, {tokens}, {groups}; {result['model']}, {result['dtype']}, {result['device']}")
    yield from _graphs(result["report"])
    # Who asked for mode eager has not asked for speed, unless both ways are timed.
    if result["inactive"] is not None and (result["own"] or result["report"]["asked"] != "eager"):
        yield f"not accelerated here: {result['inactive']}"
    if result["own"] is not None:
        yield from _outcome(result)
        gap = result["difference"]
        same = gap.get("same_next_token")
        most = "" if same is None else f"; same most likely token: {same} of {texts}"
        yield (
            f"largest difference of a log-probability: {gap['largest_log_probability']:.2g}{most}"
        )


def _outcome(result: dict[str, Any]) -> Iterator[str]:
    if result["inactive"] is None:
        yield f"own / prefill: {result['ratio']:.2f}"
    elif result["report"]["declined"] is None:
        yield PADDING


def _graphs(report: dict[str, Any]) -> Iterator[str]:
    if report["buckets"]:
        seconds = sum(bucket["seconds"] for bucket in report["buckets"])
        yield (
            f"captured {_count(len(report['buckets']), 'graph')} in {seconds:.2f} s; pool "
            f"{_size(report['pool_bytes'])}, hidden states {_size(report['output_bytes'])}, "
            f"buffers {_size(report['buffer_bytes'])}"
        )
    # In mode eager every pass is, and that is no news.
    for reason, times in report["reasons"].items() if report["mode"] != "eager" else ():
        yield f"eager x{times}: {reason}"
    yield from report["notes"]


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else ending}"
