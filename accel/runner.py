"""GraphRunner: signature -> graph; when to record, replay or run eagerly; eviction.

Knows calls: how often one was seen, what it cost, which recording fits it. It does not know how a
recording is made (recorded.py, graph.py, record.py) nor what a pipeline is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from accel.graph import GuardMiss
from accel.guard import Ambient, WeightGuard
from accel.memory import Pool
from accel.recorded import Recorded
from accel.reporting import PartReport
from accel.signature import Signature, Uncapturable, argument_name, signature
from accel.snapshot import Snapshot

HOST_SLACK = 0.25
"""Share of the device's time still to come when the host returns, from which graphs do not help."""
LEAST_GAIN = 1.05
"""Eager time over replay time below which a recording is dropped again."""
JUDGED_REPLAYS = 2
"""Replays over which the gain is confirmed."""
VARIANTS = 4
"""Recordings a signature, and plain values an argument, may have."""
BARRED_CALLS = 64
"""Calls that a signature over the memory limit waits before it may be recorded again."""
PROBED_FIRST = 16
"""Replays before which the state is checked, not after, once it was seen to change."""
FIRST_OF_SIGNATURE = "first call of this signature"

_thread = threading.local()


@dataclass
class Entry:
    """What is known of one signature."""

    seen: int = 0
    declined: str | None = None
    variants: list[Recorded] = field(default_factory=list)
    eager_seconds: float | None = None
    judged: list[float] = field(default_factory=list)
    misses: int = 0
    missed_in_a_row: int = 0
    stale_turns: int = 0
    unused: int = 0
    retried: bool = False
    last_use: int = 0
    bytes: int = 0
    barred: int = 0
    barred_for: str = ""


class GraphRunner:
    """Calls `function`; where it pays, replays a recording of it instead: same result, bit for bit.

    `pool` is shared by the runners of a pipeline. `module` is whose weights are watched. `probe`
    returns a value that a recording depends on beyond arguments and weights: a recording is used
    only where it is equal. `veto` says in words why nothing may be recorded just now, or None; it
    is asked before eager calls and recordings, not before replays. `capture` is "auto" (record what
    gains) or "always". Counters and reasons are in `report`. Any thread may call. Raises what
    `function` raises, nothing else.

    >>> runner = GraphRunner(lambda x: x * 2 + 1, pool=Pool(device), capture="always")
    >>> x = torch.ones(3, device=device)
    >>> [runner(x + i).tolist()[0] for i in range(4)]
    [3.0, 5.0, 7.0, 9.0]
    >>> runner.report.eager_calls, runner.report.captures, runner.report.replays
    (1, 1, 2)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        pool: Pool,
        name: str = "function",
        module: nn.Module | None = None,
        capture: Literal["auto", "always"] = "auto",
        probe: Callable[[], Any] | None = None,
        veto: Callable[[], str | None] | None = None,
    ) -> None:
        self.function, self.pool, self.capture = function, pool, capture
        self.report = PartReport(name, type(function if module is None else module).__name__)
        self.entries: dict[Any, Entry] = {}
        self._backend, self._probe, self._veto = pool.backend, probe, veto
        self._guard = None if module is None else WeightGuard(module, pool.backend)
        self._values: dict[Any, list[set[Any]]] = {}
        self._calls = 0
        self._probe_first = 0
        pool.tenants.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._transparent():
            return self.function(*args, **kwargs)
        call = (args, kwargs)
        try:
            key = signature(call, self._backend)
            self._check(key)
            entry = self._entry(key, call)
        except Uncapturable as uncapturable:
            return self._eager(str(uncapturable), call)
        with self.pool.lock:
            entry.last_use = self.pool.tick()
            reason = self._reason_for_eager(entry)
            if reason is None:
                return self._replay_or_record(entry, key, call)
        return self._first_call(entry, reason, call)

    def forget_graphs(self) -> None:
        """Drops every recording; what was learned about signatures stays."""
        for entry in self.entries.values():
            for variant in entry.variants[:]:
                self._drop(entry, variant)

    def _transparent(self) -> bool:
        """Whether someone else watches or records this call: then it is the plain forward."""
        return bool(
            getattr(_thread, "inside", False)
            or torch._C._len_torch_dispatch_stack()
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or self._backend.is_capturing()
        )

    def _check(self, key: Signature) -> None:
        for x in key.tensors:
            if not x.is_cpu and x.device != self.pool.device:
                raise Uncapturable(f"an argument is on {x.device}, not on {self.pool.device}")
        if torch.is_grad_enabled() and (
            any(x.requires_grad for x in key.tensors)
            or (self._guard is not None and self._guard.requires_grad())
        ):
            raise Uncapturable("gradients are enabled: call under torch.no_grad()")

    def _entry(self, key: Signature, call: Any) -> Entry:
        full = (key.shapes, key.values)
        known = self.entries.get(full)
        if known is not None:
            return known
        with self.pool.lock:
            seen = self._values.setdefault(key.shapes, [set() for _ in key.values])
            for position, value in enumerate(key.values):
                if value not in seen[position] and len(seen[position]) == VARIANTS:
                    name = argument_name(key.places[position])
                    raise Uncapturable(f"{name} has had more than {VARIANTS} values: pass a tensor")
            for values, value in zip(seen, key.values, strict=True):
                values.add(value)
            return self.entries.setdefault(full, Entry())

    def _reason_for_eager(self, entry: Entry) -> str | None:
        """Why this call runs eagerly; None if it may be replayed or recorded."""
        self._calls += 1
        if entry.declined is not None or entry.variants:
            return entry.declined
        if self._veto is not None and (vetoed := self._veto()) is not None:
            return vetoed
        if entry.barred:
            entry.barred -= 1
            return entry.barred_for
        if self._calls == 1:
            entry.seen += self.capture == "always"
            return "first call of the module"
        entry.seen += 1
        return FIRST_OF_SIGNATURE if entry.seen == 1 else None

    def _first_call(self, entry: Entry, reason: str, call: Any) -> Any:
        if self.capture == "auto" and reason == FIRST_OF_SIGNATURE:
            self.report.eager(reason)
            return self._timed(entry, call)
        result = self._eager(reason, call)
        self.pool.set_default_limit()
        return result

    def _eager(self, reason: str, call: Any) -> Any:
        self.report.eager(reason)
        return self.function(*call[0], **call[1])

    def _timed(self, entry: Entry, call: Any) -> Any:
        """An eager call that finds out whether the host is the bottleneck."""
        backend, stream = self._backend, self._backend.current_stream(self.pool.device)
        backend.synchronize(stream)
        begin, first = backend.now(), backend.record_event(stream, timing=True)
        result = self.function(*call[0], **call[1])
        last, host = backend.record_event(stream, timing=True), backend.now() - begin
        last.synchronize()
        entry.eager_seconds = backend.now() - begin
        device, lag = first.elapsed_time(last) / 1e3, entry.eager_seconds - host
        if lag >= HOST_SLACK * device:
            self._decline(
                entry,
                f"the device is the bottleneck: when the host was done, {lag * 1e3:.1f} of "
                f"{device * 1e3:.1f} ms of its work were still to come",
            )
        return result

    def _replay_or_record(self, entry: Entry, key: Signature, call: Any) -> Any:
        self._drop_stale(entry)
        if entry.declined is not None:
            return self._eager(entry.declined, call)
        miss = None
        for variant in entry.variants[:]:
            try:
                result = self._replay(entry, variant, key, call)
            except GuardMiss as missed:
                self.report.guard_misses += 1
                miss = str(missed)
                continue
            entry.missed_in_a_row = entry.unused = 0
            if variant in entry.variants:  # the likeliest to fit comes first
                entry.variants.remove(variant)
                entry.variants.insert(0, variant)
            return result
        if miss is None or self._drop_stale(entry):  # weights that moved, their old memory in use
            return self._record(entry, key, call)
        entry.misses += 1
        entry.missed_in_a_row += 1
        if entry.missed_in_a_row > 2 * VARIANTS:
            for variant in entry.variants[:]:
                self._drop(entry, variant)
            entry.barred, entry.barred_for = BARRED_CALLS, f"no two calls agree: {miss}"
            self.report.declined = entry.barred_for
        if entry.misses % 2 or entry.barred:  # a lazy cache may have been filled: once more eagerly
            return self._eager(miss, call)
        return self._record(entry, key, call)

    def _drop_stale(self, entry: Entry) -> bool:
        """Drops recordings whose weights moved or whose outside tensors the model has replaced."""
        version, before = self._weights_version(), len(entry.variants)
        for variant in entry.variants[:]:
            replaced = variant.held.stale()
            if variant.conditions[0] == version and replaced is None:
                continue
            self._drop(entry, variant)
            self.report.recaptures += 1
            if replaced is not None:
                entry.stale_turns += 1
                if entry.stale_turns > 2:
                    self._decline(entry, replaced)
            else:
                entry.unused += 1
                if entry.unused > VARIANTS:
                    entry.unused, entry.barred = 0, BARRED_CALLS
                    self.report.declined = entry.barred_for = "the weights move at every call"
        return len(entry.variants) < before

    def _weights_version(self) -> int:
        return 0 if self._guard is None else self._guard.check_alive()

    def _state(self) -> Any:
        """Everything beyond arguments that a recording depends on."""
        weights = 0 if self._guard is None else self._guard.check()
        probed = None if self._probe is None else self._probe()
        return Ambient(self._backend.device_type).key, weights, probed

    def _replay(self, entry: Entry, variant: Recorded, key: Signature, call: Any) -> Any:
        """Replays and, while the device works, makes sure that the recording still holds. What
        cannot be taken back is checked before; so are runners whose state was seen to change."""
        before = variant.commits or self._probe_first > 0
        self._probe_first -= self._probe_first > 0
        if before:
            self._check_state(variant)
        judged = entry.eager_seconds is not None and len(entry.judged) < JUDGED_REPLAYS
        with self._judged(entry) if judged else contextlib.nullcontext(), _inside():
            result = variant.replay(key.tensors)
        if not before:
            self._check_state(variant)
        variant.edits.apply(call)
        self.report.replays += 1
        return result

    def _check_state(self, variant: Recorded) -> None:
        if self._state() != variant.conditions[1]:
            self._probe_first = PROBED_FIRST
            raise GuardMiss("the module's state differs from the recording's")

    @contextlib.contextmanager
    def _judged(self, entry: Entry) -> Iterator[None]:
        """Times the first replays and drops the recording if they gain too little."""
        assert entry.eager_seconds is not None
        backend, stream = self._backend, self._backend.current_stream(self.pool.device)
        backend.synchronize(stream)
        begin = backend.now()
        yield
        backend.synchronize(stream)
        entry.judged.append(backend.now() - begin)
        gain = entry.eager_seconds / max(min(entry.judged), 1e-9)
        if len(entry.judged) == JUDGED_REPLAYS and gain < LEAST_GAIN:
            self._decline(entry, f"a replay is only {gain:.2f} times as fast as an eager call")
            for variant in entry.variants[:]:
                self._drop(entry, variant)

    def _record(self, entry: Entry, key: Signature, call: Any) -> Any:
        if entry.barred:
            return self._eager(entry.barred_for, call)
        self.pool.make_room()
        if entry.variants and self._veto is not None and (vetoed := self._veto()) is not None:
            return self._eager(vetoed, call)
        state = self._state()
        weights_version = self._weights_version()
        weights = () if self._guard is None else self._guard.storages
        failure: Exception | None = None
        before = Snapshot(self.pool, None if self._guard is None else self._guard.module)

        def objection() -> str | None:
            changed = self._state() != state
            return "the forward changes its own state" if changed else before.objection()

        try:
            with _inside():
                recorded = Recorded(self.function, call, key, self.pool, weights, objection)
        except Exception as error:
            before.restore()
            failure = error.with_traceback(None)  # whose frames hold tensors
        if failure is not None:
            return self._eager_after_failure(entry, failure, call)
        recorded.conditions = weights_version, state
        result, recorded.first_result = recorded.first_result, None
        for least_used in entry.variants[VARIANTS - 1 :]:
            self._drop(entry, least_used)
        entry.variants.insert(0, recorded)
        entry.bytes = max(entry.bytes, recorded.report.pool_bytes)
        self.report.captures += 1
        self.report.graphs.append(recorded.report)
        _keep_within_limit(self.pool, entry)
        return result

    def _eager_after_failure(self, entry: Entry, error: Exception, call: Any) -> Any:
        """The user's call does not fail because a recording did. If the eager call fails too, the
        fault is not the recording's, and a later call may be recorded."""
        reason = _failure(error)
        if isinstance(error, torch.OutOfMemoryError):
            self.pool.retire()
        if "captur" in reason:  # it cost the pool its graphs: not again at once if eager fails too
            entry.barred, entry.barred_for = BARRED_CALLS, reason
        result = self._eager(reason, call)
        # An op that could not be recorded is a break from now on: once more, then.
        again = entry.barred > 0 and bool(self.pool.unrecordable) and not entry.retried
        entry.retried = True
        if again:
            entry.barred = 0
        else:
            self._decline(entry, reason)
        return result

    def _decline(self, entry: Entry, reason: str) -> None:
        entry.declined = self.report.declined = reason

    def _drop(self, entry: Entry, variant: Recorded) -> None:
        entry.variants.remove(variant)
        self.report.graphs.remove(variant.report)
        variant.discard()

    def bar(self, entry: Entry) -> None:
        """Keeps a signature from being recorded again soon: there was no room for it."""
        entry.barred, entry.barred_for = BARRED_CALLS, _over_limit(self.pool)
        self.report.evictions += 1


def _failure(error: Exception) -> str:
    if isinstance(error, Uncapturable):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"recording failed: {type(error).__name__}: {first_line}"


def _over_limit(pool: Pool) -> str:
    return f"no room under the memory limit of {pool.limit} bytes: raise memory_limit"


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """Runners called within a recording or a replay are the plain forward."""
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False


def _keep_within_limit(pool: Pool, newest: Entry) -> None:
    """Freed bytes return only with a whole pool: an overrun retires it, and the signatures used
    least recently are not recorded again first."""
    if pool.limit is None or pool.bytes() <= pool.limit:
        return
    pool.retire()
    owners = [(e, runner) for runner in pool.tenants for e in runner.entries.values() if e.bytes]
    room = pool.limit - newest.bytes
    for entry, runner in sorted(owners, key=lambda owner: -owner[0].last_use):
        if entry is not newest:
            room -= entry.bytes
        if room < 0:
            runner.bar(entry)
