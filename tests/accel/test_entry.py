"""By which numbers recordings of a signature are judged, and for how long none is made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from accel.entry import (
    BARRED_CALLS,
    HOST_SLACK,
    JUDGED_REPLAYS,
    LEAST_GAIN,
    VARIANTS,
    WEIGHTS_MOVED,
    Entry,
)
from accel.reporting import GraphReport, PartReport

REPLACED = "tensors that the model has replaced"


class Variant:
    """What an entry sees of a recording; it also stands for the tensors that it holds."""

    def __init__(self, version: int = 0, replaced: str | None = None, pool_bytes: int = 0) -> None:
        self.state, self.replaced, self.held = (version,), replaced, self
        self.report = GraphReport("4", 1, 1, 0.01, pool_bytes)
        self.discarded = 0

    def stale(self) -> str | None:
        return self.replaced

    def discard(self) -> None:
        self.discarded += 1


@pytest.fixture
def entry() -> Entry:
    return Entry(PartReport("unet", "UNet2DConditionModel"))


def added(entry: Entry, **options: Any) -> Any:
    """A new variant of an entry."""
    variant: Any = Variant(**options)
    entry.add(variant)
    return variant


def test_a_host_that_is_done_long_before_the_device_has_nothing_to_gain(entry: Entry) -> None:
    variant = added(entry)
    entry.judge_eager(0.012, HOST_SLACK * 0.010, 0.010)
    assert entry.barred == math.inf
    assert "bottleneck" in entry.barred_for and "1.5 of 10.0 ms" in entry.barred_for
    assert entry.report.declined == entry.barred_for
    assert (entry.variants, entry.report.graphs, variant.discarded) == ([], [], 1)


def test_a_host_that_is_done_just_in_time_is_recorded(entry: Entry) -> None:
    entry.judge_eager(0.012, HOST_SLACK * 0.010 - 1e-9, 0.010)
    assert (entry.barred, entry.report.declined) == (0, None)
    assert (entry.eager_seconds, entry.on_trial) == (0.012, True)


def test_an_eager_call_that_took_no_time_starts_no_trial(entry: Entry) -> None:
    entry.judge_eager(0.0, 0.0, 0.010)
    assert not entry.on_trial


@pytest.mark.parametrize(("gain", "kept"), [(LEAST_GAIN + 0.001, True), (1.04, False)])
def test_the_better_of_two_replays_decides(entry: Entry, gain: float, kept: bool) -> None:
    variant = added(entry)
    entry.judge_eager(1.0, 0.0, 1.0)
    entry.judge_replay(2.0)  # the first may be slow
    assert entry.on_trial and entry.variants == [variant]
    entry.judge_replay(1.0 / gain)
    assert not entry.on_trial
    assert (entry.variants == [variant], variant.discarded == 0) == (kept, kept)
    assert entry.report.declined == (
        None if kept else f"a replay is only {gain:.2f} times as fast as an eager call"
    )


def test_what_was_judged_is_not_put_on_trial_again(entry: Entry) -> None:
    entry.judge_eager(1.0, 0.0, 1.0)
    for _ in range(JUDGED_REPLAYS):
        entry.judge_replay(0.1)
    entry.judge_eager(1.0, 0.0, 1.0)
    assert not entry.on_trial


def test_recordings_of_other_weights_go_and_those_of_today_stay(entry: Entry) -> None:
    old, now = added(entry, version=1), added(entry, version=2)
    assert entry.drop_stale(2)
    assert (entry.variants, old.discarded, now.discarded) == ([now], 1, 0)
    assert entry.report.changes == {WEIGHTS_MOVED: 1}
    assert (entry.report.recaptures, entry.stale_turns, entry.fruitless) == (1, 0, 2)
    assert not entry.drop_stale(2)
    assert entry.report.recaptures == 1


def test_weights_that_move_at_every_call_are_not_recorded_for_a_while(entry: Entry) -> None:
    for version in range(VARIANTS):
        added(entry, version=version)
        entry.drop_stale(version + 1)
    assert not entry.barred
    added(entry, version=VARIANTS)
    entry.drop_stale(VARIANTS + 1)
    assert (entry.barred, entry.barred_for) == (BARRED_CALLS, "the weights move at every call")


def test_a_model_that_replaces_its_tensors_a_third_time_is_declined(entry: Entry) -> None:
    for turn in (1, 2):
        added(entry, replaced=REPLACED)
        added(entry, version=5, replaced=REPLACED)
        assert entry.drop_stale(0)
        assert (entry.stale_turns, entry.barred) == (turn, 0)
    kept = added(entry)
    added(entry, replaced=REPLACED)
    entry.drop_stale(0)
    assert (entry.barred, entry.report.declined) == (math.inf, REPLACED)
    assert entry.report.changes == {REPLACED: 5}
    assert entry.report.recaptures == 5
    assert (entry.variants, kept.discarded, entry.fruitless) == ([], 1, 0)


def test_the_least_used_recording_goes_for_one_too_many(entry: Entry) -> None:
    made = [added(entry, pool_bytes=size) for size in (1, 9, 3, 4)]
    assert len(made) == VARIANTS and not any(variant.discarded for variant in made)
    newest = added(entry, pool_bytes=5)
    assert entry.variants == [newest, *made[:0:-1]]
    assert [variant.discarded for variant in made] == [1, 0, 0, 0]
    assert entry.report.graphs == [variant.report for variant in [*made[1:], newest]]
    assert (entry.report.captures, entry.bytes) == (VARIANTS + 1, 9)


def test_a_recording_lifts_what_was_declined_for_the_time_being_only(entry: Entry) -> None:
    entry.decline("no two calls agree", BARRED_CALLS)
    added(entry)
    assert entry.report.declined is None
    entry.report.declined = "of another signature"
    added(entry)
    assert entry.report.declined == "of another signature"


def test_a_bar_leaves_recordings_and_report_alone(entry: Entry) -> None:
    variant = added(entry)
    entry.bar("no room")
    assert (entry.barred, entry.barred_for) == (BARRED_CALLS, "no room")
    assert (entry.variants, entry.report.declined) == ([variant], None)


def test_misses_in_vain_add_up_until_recordings_are_given_up(entry: Entry) -> None:
    variant = added(entry)
    for _ in range(2 * VARIANTS):
        entry.decline_if_fruitless(1, "no two calls agree")
    assert entry.variants == [variant] and not entry.barred
    entry.decline_if_fruitless(1, "no two calls agree")
    assert (entry.variants, variant.discarded) == ([], 1)
    assert (entry.barred, entry.report.declined) == (BARRED_CALLS, "no two calls agree")
