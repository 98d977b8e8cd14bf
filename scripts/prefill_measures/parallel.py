"""One rank of a split model's measurement: references, modes one after the other, times.

All ranks run the same calls of the split model in the same order. The first one also has the whole
model, runs it by itself, compares, and writes the file as far as it is after every phase.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result_file import as_text

from accel.pipelines.machine import synchronize
from accel.prefill.result import Result
from accel.prefill.runner import PrefillRunner
from prefill_measures import parallel_times
from prefill_measures.parallel_ranks import Job, Ranks, in_float32, load, own_answer
from prefill_measures.parallel_sameness import Answer, Judge, Reference, Yardstick, same_bits
from prefill_measures.parallel_shapes import fits, shapes
from prefill_measures.parallel_watch import Note
from prefill_measures.prompts import Prompts, random_prompts
from prefill_measures.ways import MODES, NO_GRAPHS, TRANSFORMERS, Options, Run, own_logits

NAMES = {mode: way for way, mode in MODES.items()}
"""What a mode is called where times are told: `no graphs` for eager."""


class Measurement:
    """The split model on this rank; on the first rank also the whole one, and all findings."""

    def __init__(self, job: Job, ranks: Ranks, note: Note) -> None:
        self.job, self.ranks, self.note = job, ranks, note
        self.facts = dict(job.facts)
        self.options = Options(job.max_tokens, job.max_requests, job.attention)
        note.begin("loading the split model")
        begin = time.perf_counter()
        self.split = load(job.folder, tp_plan="auto")
        self.device: torch.device = self.split.device
        note.begin("loading the whole model")
        self.whole = load(job.folder).to(self.device) if ranks.first else None
        ranks.meet()
        self.facts["seconds to load"] = time.perf_counter() - begin
        self.shapes = shapes(job.batches, job.max_requests, job.max_tokens, job.seed)
        self.runners: dict[str, PrefillRunner] = {}
        self.one_gpu: dict[str, PrefillRunner] = {}
        self._last_rows: dict[str, list[torch.Tensor]] = {}
        self._yardstick = Yardstick({})

    def run(self) -> None:
        """Everything, what is worth most first."""
        self._check_that_shapes_are_alike()
        self._references()
        for mode in self.job.modes:
            self._mode(mode)
        for tokens in self.job.tokens:
            self._times(tokens)
        self.note.begin("closing")
        for runner in (*self.runners.values(), *self.one_gpu.values()):
            runner.close()

    def tell(self, what: str, row: dict[str, Any]) -> None:
        """Prints a row and writes the file as far as it is."""
        if not self.ranks.first:
            return
        self.facts.setdefault(what, []).append(row)
        print(f"{what}: {json.dumps(row)}", flush=True)
        write(Path(self.job.output), self.device, self.facts)

    def prompts(self, lengths: list[int], number: int) -> Prompts:
        """Random prompts, the same on all ranks."""
        vocabulary = self.split.config.get_text_config().vocab_size
        return random_prompts(lengths, vocabulary, self.job.seed * 1_000_003 + number)

    def _check_that_shapes_are_alike(self) -> None:
        """Ranks that run other shapes wait for each other for ever: not even begun."""
        drawn = [self.prompts(lengths, n) for n, lengths in enumerate(self.shapes)]
        digests = self.ranks.gather(hashlib.sha256(json.dumps(drawn).encode()).hexdigest())
        if len(set(digests)) > 1:
            raise RuntimeError(f"ranks drew different batches: {digests}")
        self.tell("shapes", _told(self.shapes, self.job))

    def _references(self) -> None:
        """Transformers itself on every so manieth batch: split on all ranks, whole on one."""
        self.note.begin("transformers itself")
        begin, found = time.perf_counter(), {}
        measured = range(0, len(self.shapes), self.job.every)
        drawn = {n: self.prompts(self.shapes[n], n) for n in measured}
        split = {n: own_answer(self.split, prompts) for n, prompts in drawn.items()}
        if self.whole is None:
            return
        with in_float32(self.whole, self.job.float32) as exact:
            for n, prompts in drawn.items():
                truth = own_answer(exact, prompts) if exact is not None else None
                found[n] = Reference(own_answer(self.whole, prompts), split[n], truth)
        self._yardstick = Yardstick(found)
        seconds = {"seconds": time.perf_counter() - begin}
        self.tell(TRANSFORMERS, self._yardstick.figures() | seconds)

    def _mode(self, mode: str) -> None:
        """All batches in one mode, after all its graphs were captured."""
        self.note.begin(f"{mode}: captures", mode=mode, batch=0)
        begin = time.perf_counter()
        self.runners[mode] = self.options.runner(self.split, mode)
        row: dict[str, Any] = {"mode": mode, "capture, s": self._capture(self.runners[mode])}
        if self.whole is not None:
            self.note(phase=f"{mode}: captures on one GPU")
            self.one_gpu[mode] = self.options.runner(self.whole, mode)
            row["capture on one GPU, s"] = self._capture(self.one_gpu[mode])
        self.ranks.meet()
        self.note(phase=f"{mode}: batches")
        row |= self._batches(mode)
        row["seconds"] = time.perf_counter() - begin
        self.tell("modes", row)

    def _capture(self, runner: PrefillRunner) -> float:
        synchronize(self.device)
        begin = time.perf_counter()
        runner.capture()
        synchronize(self.device)
        return time.perf_counter() - begin

    def _batches(self, mode: str) -> dict[str, Any]:
        split, judge = self.runners[mode], Judge(self._yardstick)
        tokens, last = [], []
        for n, lengths in enumerate(self.shapes):
            prompts = self.prompts(lengths, n)
            ours = answer(split(prompts))
            tokens.append(ours.logits.argmax(-1).tolist())
            ends = torch.tensor(lengths).cumsum(0) - 1
            last.append(ours.hidden[ends.to(self.device)].cpu())
            if self.whole is not None:
                judge.add(n, ours, answer(self.one_gpu[mode](prompts)))
            self.note(batch=n + 1)
        everybody = self.ranks.gather(tokens)
        if not self.ranks.first:
            return {}
        row = {"batches": len(tokens), **self._counts(mode), **judge.figures()}
        row["same token on all ranks"] = all(theirs == tokens for theirs in everybody)
        row["failed"] += [] if row["same token on all ranks"] else ["ranks got other tokens"]
        row["failed"] += self._missing(mode)
        for other, kept in self._last_rows.items():
            row[f"batches with the bits of {other}"] = same_bits(last, kept)
        self._last_rows[mode] = last
        if not row["failed"]:
            del row["failed"]
        return row

    def _counts(self, mode: str) -> dict[str, Any]:
        report = self.runners[mode].report
        return {
            "ran as": report.mode,
            "attention": report.attention,
            "declined": report.declined,
            "notes": list(report.notes),
            "captures": report.captures,
            "recaptures": report.recaptures,
            "replays": report.replays,
            "replays expected": self._expected(mode),
            "eager passes": report.eager_passes,
            "eager because": dict(report.reasons),
            "tokens": report.tokens,
        }

    def _expected(self, mode: str) -> int:
        """Batches that graphs have room for; on the host there are none."""
        if self.device.type == "cpu":
            return 0
        slots, largest = self.job.max_requests, self.job.max_tokens
        return sum(fits(lengths, mode, slots, largest) for lengths in self.shapes)

    def _missing(self, mode: str) -> list[str]:
        report = self.runners[mode].report
        found = []
        if report.declined:
            found.append(f"declined: {report.declined}")
        if report.replays != self._expected(mode):
            found.append(f"{report.replays} replays, not {self._expected(mode)}")
        if report.replays + report.eager_passes != len(self.shapes):
            found.append("a batch was neither replayed nor run eagerly")
        return found

    def _times(self, tokens: int) -> None:
        """A row of times: one request of so many tokens."""
        self.note.begin(f"times at {tokens} tokens")
        job = self.job
        numbers = range(len(self.shapes), len(self.shapes) + job.warm_up + job.repeats)
        drawn = [self.prompts([tokens], n) for n in numbers]
        runs: dict[str, Run] = {TRANSFORMERS: lambda prompts: own_logits(self.split, prompts)}
        runs |= {NAMES[mode]: _logits_of(self.runners[mode]) for mode in job.modes}
        if "full" in job.modes:
            one = self.one_gpu.get("full")
            runs[parallel_times.ONE_GPU] = (
                parallel_times.nothing if one is None else _logits_of(one)
            )
        graphs = {NAMES[m]: self.runners[m] for m in job.modes if NAMES[m] != NO_GRAPHS}
        row = parallel_times.row(
            runs,
            graphs if self.device.type != "cpu" else {},
            drawn[: job.warm_up],
            drawn[job.warm_up :],
            self.device,
            self.ranks.meet,
        )
        self.tell("times", {"tokens": tokens} | row)


def answer(result: Result) -> Answer:
    """A runner's result, to be compared."""
    hidden = [result.hidden(i) for i in range(len(result))]
    return Answer(torch.cat(hidden), result.logits)


def write(path: Path, device: torch.device, facts: dict[str, Any]) -> None:
    """Writes the result file, at once: who is ended meanwhile leaves the one before."""
    partial = path.with_suffix(".part")
    partial.write_text(as_text(device, facts), encoding="utf-8")
    partial.replace(path)


def main(path: Path) -> int:
    """One rank, to its end. What goes wrong is noted and raised."""
    job = Job.read(path)
    sys.argv[:] = job.command
    note = Note(Path(job.room), int(os.environ["RANK"]))
    note.begin("joining the others")
    try:
        ranks = Ranks(job.device)
        Measurement(job, ranks, note).run()
        ranks.meet()
        dist.destroy_process_group()
    except BaseException as why:
        note(failed=f"{type(why).__name__}: {why}".partition("\n")[0])
        raise
    return 0


def _logits_of(runner: PrefillRunner) -> Run:
    return lambda prompts: runner(prompts).logits


def _told(drawn: list[list[int]], job: Job) -> dict[str, Any]:
    """Shapes in numbers."""
    sizes, requests = [sum(some) for some in drawn], [len(some) for some in drawn]
    return {
        "batches": len(drawn),
        "tokens": [min(sizes), max(sizes)],
        "requests": [min(requests), max(requests)],
        "too many tokens": sum(size > job.max_tokens for size in sizes),
        "too many requests": sum(many > job.max_requests for many in requests),
        "alike on all ranks": True,
    }
