"""`accel prefill`: from an order to next tokens or scores, with how long they took.

Everything that can be refused is refused before weights are loaded. This module puts together what
others know: which model a name means, texts and batches, the runner, clocks. Logarithms are
natural.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from accel.pipelines import (
    acceleration,
    answers,
    language_models,
    loading,
    machine,
    versions,
)
from accel.pipelines.console import captures_shown, note, status_shown, stdout_kept_clean
from accel.pipelines.errors import AccelError, BadInput, first_line, is_out_of_memory
from accel.pipelines.models import Trust, sought
from accel.pipelines.names import refuse_unknown
from accel.pipelines.reading import Way, read_in_turns
from accel.pipelines.texts import Text, batches, tokenized

if TYPE_CHECKING:
    from accel.pipelines.language_loading import Speaker
    from accel.prefill.report import PrefillReport

MODES = ("breakable", "full", "eager")
ATTENTION = ("auto", "reference", "torch", "flashinfer")


@dataclass(frozen=True)
class Order:
    """What a person asked for. `top` counts next tokens, `repeats` timed rounds."""

    prompts: Sequence[str] = ()
    model: str = language_models.DEMO
    mode: str = "breakable"
    attention: str = "auto"
    max_tokens: int = 8192
    max_requests: int = 16
    score: bool = False
    plan: bool = False
    compare: bool = False
    top: int = 5
    repeats: int = 5
    device: str = "auto"
    dtype: str | None = None
    trust: Trust = field(default_factory=Trust)
    quiet: bool = True
    stdout_is_json: bool = False


def fulfil(order: Order) -> dict[str, Any]:
    """Does what `order` says and returns the result as plain data. Raises `AccelError`."""
    _refuse_words(order)
    if order.plan:
        _refuse_beside_plan(order)
    model, where = _found(order)
    with stdout_kept_clean(order.stdout_is_json):
        from accel.pipelines import language_loading

        if order.quiet:
            language_loading.quiet()
        if order.plan:
            return _planned(order, model, where)
        if order.mode != "eager":
            acceleration.tell_missing(where.device)
        with status_shown() as tell:
            tell(f"loading {order.model}")
            speaker = language_loading.load(model, where, trust=order.trust)
        texts = tokenized(speaker, order.prompts, order.max_tokens)
        with _told_in_one_line(order, len(texts)):
            return {**_circumstances(order, where), **answered(order, speaker, texts)}


def _found(order: Order) -> tuple[language_models.LanguageModel, loading.Placement]:
    model_of = sought(order.model, partial(language_models.resolve, order.model, order.trust))
    where = loading.placement(order.device, order.dtype or "auto")
    _refuse_attention(order, where)
    return model_of(), where


def _refuse_words(order: Order) -> None:
    refuse_unknown("--mode", order.mode, MODES)
    refuse_unknown("--attention", order.attention, ATTENTION)


def _refuse_beside_plan(order: Order) -> None:
    """A plan reads nothing and times nothing: what asks for that would be ignored."""
    asked = {
        "prompts": order.prompts,
        "--score": order.score,
        "--compare": order.compare,
        "--top": order.top != Order.top,
        "--repeats": order.repeats != Order.repeats,
    }
    idle = [name for name, given in asked.items() if given]
    if idle:
        raise BadInput(f"--plan reads nothing: leave out {', '.join(idle)}, or --plan")
    if order.mode == "eager":
        raise BadInput("--plan is about graphs, and --mode eager has none: leave out one of them")


def _refuse_attention(order: Order, where: loading.Placement) -> None:
    """What is known to be absent is told before weights are loaded; what a backend cannot do for
    this model, only it knows."""
    if order.attention != "flashinfer":
        return
    if importlib.util.find_spec("flashinfer") is None:
        raise BadInput(
            "--attention flashinfer: it is not installed (pip install flashinfer-python); "
            "--attention auto takes what there is"
        )
    if where.device.type != "cuda":
        raise BadInput(f"--attention flashinfer needs CUDA, this runs on {where.device.type}")


def answered(order: Order, speaker: Speaker, texts: list[Text]) -> dict[str, Any]:
    """Reads `texts` with `speaker`, on whatever device that is, and says what was found and how
    long it took."""
    runner = _runner(order, speaker)
    try:
        _tell_declined(runner)
        runner.check([text.ids for text in texts])
        if runner.report.mode != "eager":
            with captures_shown() as on_capture:
                runner.capture(progress=on_capture)
        ours, own = _ways(order, speaker, runner)
        # In mode full a graph has slots; elsewhere only tokens count.
        slots = order.max_requests if order.mode == "full" else len(texts)
        groups = batches(texts, order.max_tokens, slots)
        with status_shown() as tell:
            ways = [way for way in (ours, own) if way is not None]
            read_in_turns(ways, groups, speaker.where.device, order.repeats, tell)
        inactive = acceleration.missing(speaker.where.device) or runner.report.declined
        return {
            **_answers(order, speaker, texts, ours, own),
            **_compared(order, ours, own, inactive),
            "batches": len(groups),
            "report": _report(runner.report),
        }
    finally:
        runner.close()


def _runner(order: Order, speaker: Speaker) -> Any:
    from accel.patches.llm import prefill_runner

    return prefill_runner(
        speaker.model,
        max_tokens=order.max_tokens,
        max_requests=order.max_requests,
        mode=order.mode,
        attention=order.attention,
    )


def _report(report: PrefillReport) -> dict[str, Any]:
    """As plain data. What dataclasses make of a Counter is a Counter of pairs."""
    told = {"reasons": dict(report.reasons), "notes": report.untold_notes()}
    return {**asdict(report), **told}


def _tell_declined(runner: Any) -> None:
    if runner.report.declined is not None:
        note(f"prompts run one by one through the model's own forward: {runner.report.declined}")


def _ways(order: Order, speaker: Speaker, runner: Any) -> tuple[Way, Way | None]:
    from accel.pipelines import own_forward

    model, device = speaker.model, speaker.where.device
    if order.score:
        ours, own = Way(runner.score), Way(lambda ids: own_forward.scores(model, ids, device))
    else:
        ours = Way(lambda ids: list(runner(ids).logits))
        own = Way(lambda ids: list(own_forward.last_logits(model, ids, device)))
    return ours, own if order.compare else None


def _answers(
    order: Order, speaker: Speaker, texts: list[Text], ours: Way, own: Way | None
) -> dict[str, Any]:
    pairs = zip(texts, ours.found, strict=True)
    if order.score:
        told = [answers.score(speaker, text, row) for text, row in pairs]
    else:
        told = [answers.next_tokens(speaker, text, row, order.top) for text, row in pairs]
    tokens = sum(len(text.ids) for text in texts)
    return {
        "prompts": told,
        "tokens": tokens,
        "prefill": ours.to_dict(tokens),
        "own": None if own is None else own.to_dict(tokens),
    }


def _compared(order: Order, ours: Way, own: Way | None, inactive: str | None) -> dict[str, Any]:
    """How much faster than `own` ours was, and how far apart they are. Where nothing was
    accelerated there is a reason, `inactive`, and no ratio."""
    if own is None:
        return {"inactive": inactive}
    ratio = median(own.seconds) / median(ours.seconds) if inactive is None else None
    difference = answers.difference(ours.found, own.found, scores=order.score)
    return {"inactive": inactive, "ratio": ratio, "difference": difference}


def _planned(
    order: Order, model: language_models.LanguageModel, where: loading.Placement
) -> dict[str, Any]:
    from accel.pipelines import prefill_plan

    found = prefill_plan.plan(model, where, order.max_tokens, order.trust)
    return {**_circumstances(order, where), "max_tokens": order.max_tokens, **found}


def _circumstances(order: Order, where: loading.Placement) -> dict[str, Any]:
    return {
        "command": shlex.join(["accel", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": versions.installed("python"), **versions.made_with()},
        "device": machine.device_name(where.device),
        "processor": machine.processor(),
        "model": order.model,
        "dtype": where.dtype_name,
    }


def as_options(text: str) -> str:
    """Arguments of `prefill_runner` as the command line calls them.

    >>> as_options("attention='torch': no soft-cap"), as_options("lower max_tokens=")
    ('--attention torch: no soft-cap', 'lower --max-tokens')
    """

    def option(match: re.Match[str]) -> str:
        name, _, value = match.groups()
        return f"--{name.replace('_', '-')} {value}".strip()

    return re.sub(r"\b(attention|mode|max_tokens|max_requests)=('?)(\w*)\2", option, text)


def numbered(said: str, count: int) -> str:
    """What the runner says of one of `count` prompts: it counts from zero, people from one.

    >>> numbered("prompt 1 has 3 tokens, the model takes 2", 4)
    'prompt 2 of 4 has 3 tokens, the model takes 2'
    """
    return re.sub(r"^prompt (\d+)", lambda found: f"prompt {int(found[1]) + 1} of {count}", said)


@contextlib.contextmanager
def _told_in_one_line(order: Order, count: int) -> Iterator[None]:
    """What the runner refuses, and memory that is not there, in words that name an option."""
    try:
        yield
    except ValueError as error:  # an argument that cannot be met: named, with its value, or not
        said = as_options(numbered(first_line(error), count))
        raise BadInput(said if said.startswith("--") else f"{order.model}: {said}") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise AccelError(
                f"out of memory ({first_line(error)}): lower --max-tokens (--plan says what has "
                "room), take a smaller --dtype, or --mode eager"
            ) from error
        raise
