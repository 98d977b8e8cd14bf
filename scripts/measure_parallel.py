"""Prefill of a language model split over several GPUs by transformers' tensor parallel plan: the
same tokens as on one GPU, no hang over hundreds of batches of random shapes, and times.

    python scripts/measure_parallel.py qwen3-4b --output docs/benchmarks/prefill-parallel.json
    python scripts/measure_parallel.py qwen3-4b --modes full --batches 40 --no-times --output …
    python scripts/measure_parallel.py --folder MODEL --output …

The zoo's model, of random finite weights, is built once and saved; every rank loads its part of it,
the first rank also the whole. All modes run the same batches. Each is compared with the same mode
of the whole model on one GPU; every so manieth batch runs through transformers itself, too, split
and whole, and, whole, in float32: that is the bound. The file is written after every phase. Ranks
that take longer than `--limit` are ended, and the file says where they were. Exits with 1 if they
hung or failed, or if anything is beyond the bound.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure_prefill import numbers
from prefill_measures import parallel
from prefill_measures.parallel_ranks import Job
from prefill_measures.parallel_watch import End, watch

from accel.pipelines import zoo_language
from accel.pipelines.random_weights import count
from accel.pipelines.versions import installed

RANK = "--as-rank"
"""What this script starts itself with, on every rank."""
MODES = ("breakable", "full", "eager")


def modes(text: str) -> list[str]:
    """Modes as they are written on the command line: `breakable,full`."""
    found = [word for word in text.split(",") if word]
    if not found or len({*found}) < len(found) or not {*found} <= {*MODES}:
        raise argparse.ArgumentTypeError(f"{text!r}: of {', '.join(MODES)}, each once")
    return found


def positive(text: str) -> int:
    """A whole number above 0."""
    found = numbers(text)
    if len(found) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: one number")
    return found[0]


def parser() -> argparse.ArgumentParser:
    """What the script takes."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = f"NAME or NAME:LAYERS of {', '.join(zoo_language.names())}"
    made.add_argument("model", nargs="?", help=named)
    made.add_argument("--folder", type=Path, help="a saved model instead")
    made.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    made.add_argument("--ranks", type=positive, default=2)
    made.add_argument("--limit", type=float, default=400, help="seconds for all ranks, %(default)s")
    made.add_argument("--modes", type=modes, default=[*MODES], help="in this order: all")
    made.add_argument("--batches", type=positive, default=200, help="of each mode, %(default)s")
    made.add_argument("--every", type=positive, default=20, help="batches for transformers")
    made.add_argument("--max-tokens", type=positive, default=2048, help="the largest bucket")
    made.add_argument("--max-requests", type=positive, default=16, help="slots of full graphs")
    made.add_argument("--attention", default="auto", help="auto, flashinfer, torch or reference")
    made.add_argument("--tokens", type=numbers, default=[128, 512, 2048], help="to be timed")
    made.add_argument("--no-times", action="store_true", help="only what is the same")
    made.add_argument("--no-float32", action="store_true", help="where memory is short for it")
    made.add_argument("--repeats", type=positive, default=7, help="timed rounds")
    made.add_argument("--warm-up", type=int, default=2, help="rounds before them")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--seed", type=int, default=0)
    return made


def check(options: argparse.Namespace) -> str | None:
    """What is wrong with options that do not go together, in one line."""
    if (options.model is None) == (options.folder is None):
        return "one of MODEL and --folder names what is measured"
    if options.model and options.model.partition(":")[0] not in zoo_language.names():
        return f"MODEL {options.model}: the zoo has {', '.join(zoo_language.names())}"
    if not options.output.parent.is_dir():
        return f"--output {options.output}: its folder does not exist"
    if options.max_tokens < 2 * options.max_requests:
        return (
            f"--max-tokens={options.max_tokens}: at least two for each of "
            f"--max-requests={options.max_requests}, as batches have up to twice as many prompts"
        )
    if not options.no_times and max(options.tokens) > options.max_tokens:
        return f"--tokens {max(options.tokens)} is more than --max-tokens={options.max_tokens}"
    found = torch.cuda.device_count()
    if options.device == "cuda" and found < options.ranks:
        return f"--ranks={options.ranks}: this machine has {found} GPUs that torch can use"
    return None


def saved(options: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Where the model lies, and facts about it. The zoo's is built on the first device, saved into
    `folder`, and gone from memory again."""
    if options.folder is not None:
        return options.folder, {"model": str(options.folder)}
    name, _, layers = options.model.partition(":")
    wanted = int(layers) if layers else None
    begin = time.perf_counter()
    first = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    model = zoo_language.build(name, first, seed=options.seed, layers=wanted)
    model.save_pretrained(folder)
    facts = {
        "model": zoo_language.setting(name, wanted),
        "weights": f"random, {str(model.dtype).removeprefix('torch.')}",
        "parameters": count(model),
        "seconds to build and save": time.perf_counter() - begin,
    }
    del model
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return folder, facts


def job(options: argparse.Namespace, folder: Path, room: Path, facts: dict[str, Any]) -> Job:
    """What the ranks are to do."""
    facts = facts | {
        "ranks": options.ranks,
        "flashinfer": installed("flashinfer-python"),
        "max_tokens": options.max_tokens,
        "max_requests": options.max_requests,
        "repeats": options.repeats,
        "ended": "not yet",
    }
    return Job(
        folder=str(folder),
        room=str(room),
        output=str(options.output),
        device=options.device,
        modes=options.modes,
        batches=options.batches,
        every=options.every,
        max_tokens=options.max_tokens,
        max_requests=options.max_requests,
        attention=options.attention,
        tokens=[] if options.no_times else options.tokens,
        repeats=options.repeats,
        warm_up=options.warm_up,
        float32=not options.no_float32,
        seed=options.seed,
        command=sys.argv,
        facts=facts,
    )


def launcher(ranks: int, path: Path) -> list[str]:
    """The command that runs this script on every rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={ranks}", __file__, RANK, str(path)]


def finish(output: Path, end: End, seconds: float) -> int:
    """Says in the file how it ended. 1 if the ranks hung or failed, or if a phase says so."""
    facts = json.loads(output.read_text(encoding="utf-8"))
    facts |= {"ended": end.words, "seconds of all ranks": seconds}
    if not end.well:
        facts["where ranks were"] = end.ranks
    output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    failed = [f"{row['mode']}: {why}" for row in facts.get("modes", []) for why in failures(row)]
    print("\n".join([*failed, end.words]), flush=True)
    return int(bool(failed) or not end.well)


def failures(row: dict[str, Any]) -> list[str]:
    """What a mode's row complains about."""
    found: list[str] = row.get("failed", [])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one model, or is one of the ranks that do."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    if given[:1] == [RANK]:
        return parallel.main(Path(given[1]))
    options = parser().parse_args(given)
    if why := check(options):
        parser().error(why)
    with tempfile.TemporaryDirectory() as place:
        room = Path(place)
        folder, facts = saved(options, room / "model")
        todo = job(options, folder, room, facts)
        todo.save(room / "job.json")
        device = torch.device(options.device)
        parallel.write(options.output, device, todo.facts)
        begin = time.perf_counter()
        end = watch(launcher(options.ranks, room / "job.json"), room, options.limit)
        return finish(options.output, end, time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(main())
