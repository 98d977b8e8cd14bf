"""Prefill of a language model at its real size, random weights: transformers, and our runner
without graphs, breakable and full, in one process and in turns.

    python scripts/measure_prefill.py qwen3-4b --output docs/benchmarks/prefill-qwen3-4b.json
    python scripts/measure_prefill.py gpt-oss-120b:18 --tokens 128,512,2048,4096 --output …
    python scripts/measure_prefill.py qwen3-4b --no-times --check --memory --capture --output …

A row is one batch: a request of so many tokens, or several by `--batch 300,7,1024`. Times are wall
time from an idle device to an idle one, medians, new random tokens each time, the last token's
logits included. "times transformers" and "times no graphs" are how often faster. Every row is
printed and written as soon as it is there, so that a run that is cut off leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prefill_measures import breakdown, capturing, piecewise, sameness, timing
from prefill_measures.memory import Meter, memory
from prefill_measures.prompts import Prompts, one_token_aside, random_prompts
from prefill_measures.ways import MODES, NO_GRAPHS, WAYS, Options, Ways
from result_file import write

from accel.pipelines import zoo_language
from accel.pipelines.machine import synchronize
from accel.pipelines.random_weights import count
from accel.pipelines.versions import installed
from accel.prefill.buckets import Ladder

TOKENS = "16,64,128,192,256,384,512,768,1024,1536,2048,3072,4096,5120,6144,8192"
CHECKED = ((1,), (200,), (256,), (5, 40, 17, 300), (100,) * 16)
"""Batches of `--check` beside those that are asked for."""


def numbers(text: str) -> list[int]:
    """Token counts as they are written on the command line: `16,64`."""
    try:
        found = [int(word) for word in text.split(",") if word]
    except ValueError:
        found = [0]
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: token counts, above 0, with commas between")
    return found


def parser() -> argparse.ArgumentParser:
    """What the script takes."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("model", help=f"NAME or NAME:LAYERS of {', '.join(zoo_language.names())}")
    made.add_argument("--output", type=Path, help="the JSON file to write")
    made.add_argument("--tokens", type=numbers, default=numbers(TOKENS), help="one request each")
    made.add_argument("--batch", type=numbers, action="append", default=[], help="several requests")
    made.add_argument("--between", action="store_true", help="also each bucket's size plus one")
    made.add_argument("--ways", default=",".join(WAYS), help="of them: %(default)s")
    made.add_argument("--attention", default="auto", help="auto, flashinfer, torch or reference")
    made.add_argument("--unfused", action="store_true", help="kernels as the model has them")
    made.add_argument("--max-tokens", type=int, help="the chunk size; default: the largest batch")
    made.add_argument("--max-requests", type=int, default=16, help="slots of full graphs")
    made.add_argument("--repeats", type=int, default=7, help="timed rounds of a row")
    made.add_argument("--warm-up", type=int, default=2, help="rounds before them")
    made.add_argument("--no-times", action="store_true", help="only what is asked for below")
    made.add_argument("--breakdown", action="store_true", help="rows say what the device did")
    made.add_argument("--check", action="store_true", help="modes equal bit for bit")
    made.add_argument("--memory", action="store_true", help="peaks, by ceiling of the graphs")
    made.add_argument("--ceilings", type=numbers, help="default: 1/4, 1/2 and all of the chunk")
    made.add_argument("--capture", action="store_true", help="seconds for all buckets")
    made.add_argument("--compiler", choices=("dynamic", "static", "none"), default="dynamic")
    made.add_argument("--limit", type=float, default=120, help="seconds for the compiler")
    made.add_argument("--device", default="cuda", help="default: %(default)s")
    made.add_argument("--seed", type=int, default=0)
    return made


class Session:
    """One model, its measurements so far, and the file that they are in."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        name, _, layers = options.model.partition(":")
        wanted = int(layers) if layers else None
        begin = time.perf_counter()
        self.model = zoo_language.build(name, self.device, seed=options.seed, layers=wanted)
        synchronize(self.device)
        largest = max([*options.tokens, *map(sum, options.batch)])
        self.made_with = Options(
            options.max_tokens or largest,
            options.max_requests,
            options.attention,
            fused=not options.unfused,
        )
        self.facts: dict[str, Any] = {
            "model": zoo_language.setting(name, wanted),
            "weights": f"random, {str(self.model.dtype).removeprefix('torch.')}",
            "parameters": count(self.model),
            "seconds to build": time.perf_counter() - begin,
            "transformers' attention": self.model.config._attn_implementation,
            "transformers' experts": getattr(self.model.config, "_experts_implementation", None),
            "flashinfer": installed("flashinfer-python"),
            "triton": installed("triton"),
            "max_tokens": self.made_with.max_tokens,
            "max_requests": self.made_with.max_requests,
            "fused": self.made_with.fused,
            "repeats": options.repeats,
        }
        self.failed = False

    def prompts(self, lengths: Sequence[int], seed: int) -> Prompts:
        """Random prompts for this model's vocabulary."""
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        return random_prompts(lengths, vocabulary, self.options.seed * 1_000_003 + seed)

    def batches(self) -> Iterator[list[int]]:
        """Lengths of every batch that is asked for, the shortest first."""
        sizes = set(self.options.tokens)
        if self.options.between:
            sizes |= {size + 1 for size in Ladder(self.made_with.max_tokens).sizes[:-1]}
        yield from ([size] for size in sorted(sizes))
        yield from self.options.batch

    def tell(self, what: str, row: dict[str, Any]) -> None:
        """Prints a row and writes the file as far as it is."""
        self.facts.setdefault(what, []).append(row)
        self.failed |= "failed" in row
        print(f"{what}: {json.dumps(row)}", flush=True)
        write(self.options.output, self.device, self.facts)


def times(session: Session, ways: Ways) -> None:
    """A row for every batch."""
    options, ladder = session.options, Ladder(session.made_with.max_tokens)
    for lengths in session.batches():
        rounds = [session.prompts(lengths, n) for n in range(options.warm_up + options.repeats)]
        tokens = sum(lengths)
        row: dict[str, Any] = {"tokens": tokens, "requests": len(lengths)}
        row |= {"lengths": lengths} if len(lengths) > 1 else {}
        row |= {"bucket": ladder.bucket(tokens), "attention": ways.attention}
        warm_up, counted = rounds[: options.warm_up], rounds[options.warm_up :]
        row |= timing.row(
            ways, warm_up, counted, session.device, partial(one_token_aside, ladder=ladder)
        )
        if options.breakdown and "failed" not in row:
            row["breakdown"] = {
                name: breakdown.breakdown(run, counted[0], session.device)
                for name, run in ways.runs.items()
            }
        session.tell("rows", row)


def check(session: Session, ways: Ways) -> None:
    """Whether modes agree bit for bit, for every batch and some more."""
    if len(ways.runners) < 2:
        session.tell("check", {"failed": f"there are no two modes to compare: {ways.left_out}"})
        return
    more = [list(b) for b in CHECKED if sum(b) <= session.made_with.max_tokens]
    more = [b for b in more if len(b) <= session.made_with.max_requests]
    for lengths in [*session.batches(), *more]:
        row: dict[str, Any] = {"tokens": sum(lengths), "requests": len(lengths)}
        figures = sameness.sameness(ways, session.model, session.prompts(lengths, 99))
        if not sameness.all_the_same(figures):
            figures["failed"] = "modes differ"
        session.tell("check", row | {"attention": ways.attention} | figures)


def graphs_of(session: Session, ways: Sequence[str], left_out: dict[str, str]) -> list[str]:
    """The modes with graphs that this model has."""
    return [MODES[way] for way in ways if way in MODES and way not in (NO_GRAPHS, *left_out)]


def measure(session: Session) -> None:
    """Everything that was asked for; the compiler last, which may leave a mess."""
    options, made_with = session.options, session.made_with
    names = options.ways.split(",")
    ways = Ways(session.model, names, made_with)
    session.facts["left out"] = ways.left_out
    session.failed |= bool(ways.left_out) and not ways.runners
    if not options.no_times:
        times(session, ways)
    if options.check:
        check(session, ways)
    ways.close()
    modes = graphs_of(session, names, ways.left_out)
    del ways
    if options.memory:
        chunk = made_with.max_tokens
        ceilings = options.ceilings or [chunk // 4, chunk // 2, chunk]
        for row in memory(session.model, modes, made_with, ceilings, Meter(session.device)):
            session.tell("memory", row)
    if options.capture:
        capture(session, modes)


def capture(session: Session, modes: Sequence[str]) -> None:
    """Our captures of the whole ladder, the lines behind them, and the compiler's way."""
    options, made_with = session.options, session.made_with
    for mode in modes:
        session.tell("capture", capturing.captures(session.model, mode, made_with))
    session.tell("lines of code", capturing.code_behind_each())
    if options.compiler == "none":
        return
    lengths = Ladder(made_with.max_tokens).sizes
    dynamic = options.compiler == "dynamic"
    found = piecewise.compiling(session.model, lengths, options.limit, dynamic=dynamic)
    session.tell("compiler, piecewise", found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one model. 1 if something failed, which the file tells."""
    options = parser().parse_args(arguments)
    unknown = set(options.ways.split(",")) - set(WAYS)
    if unknown:
        parser().error(f"--ways: there is no {', '.join(unknown)}; ways are {', '.join(WAYS)}")
    if options.memory and torch.device(options.device).type != "cuda":
        parser().error(f"--memory: the peak of {options.device} cannot be read, that of CUDA can")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser().error(f"--device {options.device}: there is no CUDA GPU here")
    session = Session(options)
    measure(session)
    return int(session.failed)


if __name__ == "__main__":
    sys.exit(main())
