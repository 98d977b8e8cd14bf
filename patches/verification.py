"""accel.verify(): the same call eagerly and replayed, compared at every call of every part.

Knows which runs are made and what their differences mean. How a run is watched is witness.py's, how
a submodule is found taps.py's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from accel.patches import pipeline
from accel.patches.findings import Difference, NotFinite, Verification
from accel.patches.frozen import ChangesSeen, left_behind
from accel.patches.part import Part
from accel.patches.patched import is_patchable
from accel.patches.rerun import Call, Traces, make_schedulers_plain, plain_schedulers, schedulers_of
from accel.patches.taps import Taps, first_not_finite, first_to_differ
from accel.patches.warming import devices_of, parts_of, refuse_unfit, settling
from accel.patches.witness import (
    GIVEN_OTHERS,
    OUTPUT,
    RETURNS_OTHERS,
    Run,
    Seen,
    Witness,
    always,
    distance,
    first_difference,
    in_its_place,
    plainly,
)

_log = logging.getLogger("accel")

_MOST_WORDS = 3
_SMALL_PARAMETER = 2**20
_READY_RUNS = 3
"""Runs after which a part that is called once a run replays: eager, recorded, replayed."""


def verify(pipe: Any, /, *args: Any, **call: Any) -> Verification:
    """Runs `pipe(*args, **call)` eagerly and with graphs and compares every call of every part.

    About a dozen runs, all from the same random state: eager twice (is the call the same as
    itself?); patched until everything is recorded and replayed; another seed, prompt and number of
    steps; weights changed in place and put back; the first call again, and once more with nobody
    watching. Found are the first call that differs, with step, submodule and size; numbers that are
    not finite; Python values that a forward changes and a replay does not.

    A part that differs loses its graphs and runs eagerly from then on (until `accel.unpatch`), and
    the rest is compared again without it. Otherwise the pipe is left as it was: patched if it was,
    random generators (those in the arguments too), attributes and schedulers as before. Do not use
    the pipe elsewhere meanwhile.

    Raises TypeError for an object that is neither pipeline nor module, and what the eager call
    raises.

    >>> layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    >>> with torch.no_grad():
    ...     found = verify(layer, torch.ones(2, 4, device=device))
    >>> found.equal, found.first_difference
    (True, None)
    """
    was_patched = pipe in pipeline._patches if is_patchable(pipe) else False
    if not was_patched:
        pipeline.patch(pipe)
    try:
        return _Verifier(pipe, Call(args, call)).result()
    finally:
        if not was_patched:
            pipeline.unpatch(pipe)


@dataclass
class _Scenario:
    """A call and what is different around it."""

    words: str
    call: Call
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass
class _Found(Exception):
    """What ends a comparison: a difference, and where it can be had again."""

    difference: Difference
    scenario: _Scenario
    in_eager: bool = False


class _Verifier:
    """One verification: makes the runs and draws the conclusions."""

    def __init__(self, obj: Any, call: Call) -> None:
        self._obj, self._parts = obj, parts_of(obj, "verify")
        self._traces = Traces(obj, devices_of(self._parts))
        self._same = _Scenario("the same call", call)
        self._dropped: set[str] = set()
        self._in_eager, self._in_replays = ChangesSeen(), ChangesSeen()
        self._done = Verification()

    def result(self) -> Verification:
        """Compares until nothing differs any more, or no part is left that could."""
        done = self._done
        if not self._parts:
            refuse_unfit(self._obj, self._same.call.args, self._same.call.kwargs)
            done.notes.append(f"nothing was accelerated: {pipeline.report(self._obj).inactive}")
            return done
        replays = self._replays()
        with self._traces.put_back_after():
            while (found := self._compared()) is not None:
                if not self._conclude(found):
                    break
        done.replays = self._replays() - replays
        if not done.replays and done.equal:
            done.notes.append("no replay, so little is proven: see a patched pipe's accel.report")
        return done

    def _replays(self) -> int:
        return sum(part.report.replays for part in self._parts)

    def _compared(self) -> _Found | None:
        try:
            self._compare()
        except _Found as found:
            return found
        return None

    def _compare(self) -> None:
        """Raises `_Found` at the first difference."""
        same, self._in_eager, self._in_replays = self._same, ChangesSeen(), ChangesSeen()
        expected = self._eager(same)
        again = self._eager(same, self._in_eager, expected=expected)
        self._raise_if_different(same, "a second eager run", expected, again, in_eager=True)
        for number in settling(self._parts):
            self._in_replays = ChangesSeen()
            words = f"patched, run {number + 1} of the same call"
            found = self._patched(same, words, expected, self._in_replays)
            self._raise_if_different(same, words, expected, found)
        self._raise_if_frozen()
        for scenario in self._others():
            self._compare_other(scenario, expected)
        words = "patched, the same call after others"
        self._raise_if_different(same, words, expected, self._patched(same, words, expected))
        words, output = "patched, with nobody watching", expected[-1:]
        self._raise_if_different(same, words, output, self._patched(same, words, output))

    def _others(self) -> Iterator[_Scenario]:
        another = self._same.call.another()
        yield _Scenario("another seed, prompt and number of steps", another)
        yield _Scenario("weights changed in place", self._same.call, self._other_weights)

    def _compare_other(self, scenario: _Scenario, usual: list[Seen]) -> None:
        with scenario.around():
            try:
                expected = self._eager(scenario)
            except Exception as error:
                self._note(f"not tried: {scenario.words}: {type(error).__name__}: {_line(error)}")
                return
            if [seen.outputs for seen in expected] == [seen.outputs for seen in usual]:
                self._note(
                    f"{scenario.words}: the eager results are the same, so this shows little"
                )
            for number in range(2):  # a size that is new is recorded by the second
                words = f"patched, {scenario.words}, run {number + 1}"
                found = self._patched(scenario, words, expected)
                self._raise_if_different(scenario, words, expected, found)

    def _eager(
        self, scenario: _Scenario, changed: ChangesSeen | None = None, **options: Any
    ) -> list[Seen]:
        """A run without the patch: every module as it is, the schedulers too."""

        def run(part: Part, usual: Run) -> Run:
            return plainly if changed is None else changed.noted(part, plainly)

        with plain_schedulers(self._obj):
            seen = self._run(scenario, run, **options)
        wrong = next((call for call in seen if not call.finite), None)
        if wrong is not None and self._done.non_finite is None:
            self._done.non_finite = NotFinite(wrong.component, wrong.call, wrong.step, "eager")
            with contextlib.suppress(Exception):
                self._done.non_finite.submodule = self._submodule_not_finite(scenario, wrong)
        return seen

    def _patched(
        self,
        scenario: _Scenario,
        words: str,
        expected: list[Seen],
        changed: ChangesSeen | None = None,
    ) -> list[Seen]:
        """A run with the patch; where only the pipeline's output is expected, nobody watches."""
        parts = self._parts if len(expected) > 1 else []

        def run(part: Part, usual: Run) -> Run:
            return usual if changed is None else changed.noted(part, usual)

        try:
            seen = self._run(scenario, run, parts, expected=expected)
        except Exception as error:
            what = f"raises {type(error).__name__}: {_line(error)}"
            raise _Found(Difference(OUTPUT, 0, None, words, what), scenario) from error
        self._done.calls += sum(call.component != OUTPUT for call in seen)
        wrong = next((call for call in seen if not call.finite), None)
        if wrong is not None and self._done.non_finite is None:
            self._done.non_finite = NotFinite(wrong.component, wrong.call, wrong.step, words)
        return seen

    def _run(
        self,
        scenario: _Scenario,
        run: Callable[[Part, Run], Run],
        parts: list[Part] | None = None,
        **options: Any,
    ) -> list[Seen]:
        """Runs the pipeline once and returns what was seen; its own output comes last."""
        self._traces.put_back()
        if scenario.call.seed is not None:
            torch.manual_seed(scenario.call.seed)
        args, kwargs = scenario.call.fresh()
        watched = self._parts if parts is None else parts
        witness = Witness(watched, schedulers_of(self._obj), **options)
        with witness.watching(run):
            result = self._obj(*args, **kwargs)
        witness.finish(result)
        self._done.runs += 1
        return witness.calls

    def _raise_if_different(
        self,
        scenario: _Scenario,
        words: str,
        expected: list[Seen],
        found: list[Seen],
        in_eager: bool = False,
    ) -> None:
        differ = first_difference(expected, found)
        if differ is None:
            return
        ours, theirs, what = differ
        difference = Difference(theirs.component, theirs.call, theirs.step, words, what)
        if ours.outputs != theirs.outputs:
            right = ours.kept or self._once_more(scenario, ours)
            if right is not None and theirs.kept is not None:
                difference.max_abs, difference.max_rel = distance(right, theirs.kept)
        raise _Found(difference, scenario, in_eager)

    def _once_more(self, scenario: _Scenario, seen: Seen) -> list[torch.Tensor] | None:
        """What an eager call returned that was too large to be kept."""
        calls = self._eager(scenario, only=(seen.component, seen.call))
        return next((call.kept for call in calls if call.outputs == seen.outputs), None)

    def _raise_if_frozen(self) -> None:
        for name, call in self._in_replays.of_replays:
            for words in self._frozen(name, call):
                raise _Found(Difference(name, call, None, "replayed", words), self._same)

    def _frozen(self, name: str, call: int) -> list[str]:
        """Python values that the eager call changed and the replay did not, in words."""
        changed = self._in_replays.of_replays.get((name, call))
        eager = self._in_eager.of_calls.get((name, call), {})
        found = [] if changed is None else left_behind(eager, changed)
        return [f"Python state froze: {words}" for words in found]

    def _conclude(self, found: _Found) -> bool:
        """Notes the difference and where it comes from, and takes the graphs off what differs.
        Whether a new comparison can tell more."""
        difference, done = found.difference, self._done
        part = next((p for p in self._parts if p.name == difference.component), None)
        if part is not None and difference.what == RETURNS_OTHERS:
            with contextlib.suppress(Exception):  # it is a help, not the answer
                difference.submodule = self._submodule(part, found)
        if done.first_difference is None:
            done.first_difference, done.equal = difference, False
            self._note_reasons(found)
        wrong = self._wrong(part, difference)
        if part is not None and not wrong:
            self._note(f"{part.name} differs although it runs eagerly: it depends on earlier runs")
        for other in wrong:
            _stand_aside(other, f"accel.verify() found: {difference}")
        self._dropped.update(other.name for other in wrong)
        if wrong:
            names = ", ".join(other.name for other in wrong)
            self._note(f"the graphs of {names} are dropped: eager until accel.unpatch()")
        return bool(wrong) and not found.in_eager

    def _wrong(self, part: Part | None, difference: Difference) -> list[Part]:
        """The parts that are to lose their graphs: one, if it is to blame; else all that have any,
        and the schedulers wait for the device again."""
        if part is not None and difference.what != GIVEN_OTHERS:
            return [] if part.name in self._dropped else [part]
        make_schedulers_plain(self._obj)
        return [part for part in self._parts if part.name not in self._dropped]

    def _note_reasons(self, found: _Found) -> None:
        name, call = found.difference.component, found.difference.call
        if not found.in_eager:
            for words in self._frozen(name, call)[:_MOST_WORDS]:
                self._note(words)
            return
        self._note("not because of accel: two eager runs of the same call already differ")
        changed = self._in_eager.of_calls.get((name, call), {})
        for value, (before, after) in list(changed.items())[:_MOST_WORDS]:
            self._note(f"{value} goes from {before} to {after} in that call")

    def _submodule(self, part: Part, found: _Found) -> str | None:
        """The innermost submodule that differs, found by having eager runs and a recording of the
        part show sums of what every submodule returns."""
        scenario, taps = found.scenario, Taps(part.module)
        with taps.open(), scenario.around(), plain_schedulers(self._obj):
            self._tapped(part, scenario, taps.eagerly)
            expected, taps.calls = taps.calls, []
            if found.in_eager:
                self._tapped(part, scenario, taps.eagerly)
                return first_to_differ(expected, taps.calls)
        with taps.open(), plain_schedulers(self._obj), taps.replaying(part) as replayed:
            for _ in range(_READY_RUNS):
                taps.calls = []
                self._tapped(part, self._same, replayed)
                if scenario is self._same and (name := first_to_differ(expected, taps.calls)):
                    return name
            with scenario.around():
                taps.calls = []
                self._tapped(part, scenario, replayed)
            return first_to_differ(expected, taps.calls)

    def _submodule_not_finite(self, scenario: _Scenario, wrong: Seen) -> str | None:
        part = next((p for p in self._parts if p.name == wrong.component), None)
        if part is None:
            return None
        taps = Taps(part.module)
        with taps.open():
            self._tapped(part, scenario, taps.eagerly)
        return first_not_finite(taps.calls)

    def _tapped(self, part: Part, scenario: _Scenario, run: Run) -> None:
        """A run in which `run` stands in the place of one part and the others are eager."""
        with contextlib.ExitStack() as stack:
            for other in self._parts:
                stack.enter_context(in_its_place(other, always(run if other is part else plainly)))
            self._run(scenario, lambda part, usual: usual, [])

    @contextlib.contextmanager
    def _other_weights(self) -> Iterator[None]:
        """While open, one parameter of every part has other values at the same address."""
        found = {id(p): p for part in self._parts if (p := _last_parameter(part)) is not None}
        kept = [(parameter, parameter.detach().clone()) for parameter in found.values()]
        try:
            with torch.no_grad():
                for parameter, before in kept:
                    parameter.copy_(before * 1.25 + 0.01)
            yield
        finally:
            with torch.no_grad():
                for parameter, before in kept:
                    parameter.copy_(before)

    def _note(self, words: str) -> None:
        if words not in self._done.notes:
            self._done.notes.append(words)


def _stand_aside(part: Part, reason: str) -> None:
    """Takes a part's graphs away for good: it runs eagerly, and the report says why."""
    if part._runner is not None:
        part._runner.forget_graphs()
        part._runner.pool.retire()

    def eager(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        part.report.eager(reason)
        return original(*args, **kwargs)

    part.report.declined = reason
    part._patched._instead = eager
    _log.warning("accel: %s runs eagerly from now on: %s", part.name, reason)


def _last_parameter(part: Part) -> torch.nn.Parameter | None:
    """The last small parameter that may be written: it is near the output, so that it shows."""
    plain = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    found = [
        p
        for p in part.module.parameters()
        if type(p) is torch.nn.Parameter and p.dtype in plain and not p.is_inference()
        if p.numel() <= _SMALL_PARAMETER and p.device.type != "meta"
    ]
    return found[-1] if found else None


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
