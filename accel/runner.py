"""GraphRunner: signature -> graph; when to record, replay or run eagerly; eviction.

Knows calls: how often one was seen, what it cost, which recording fits it. It does not know how a
recording is made (recorded.py, graph.py, record.py) nor what a pipeline is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from accel.breaks import GuardMiss
from accel.entry import BARRED_CALLS, VARIANTS, WEIGHTS_MOVED, Entry
from accel.graph import as_break
from accel.guard import Ambient, WeightGuard
from accel.memory import Pool, outlives_garbage
from accel.recorded import Recorded
from accel.reporting import PartReport
from accel.signature import Signature, Uncapturable, argument_name, signature

PROBED_FIRST = 16
"""Replays before which the state is checked, not after, once it was seen to change."""
FIRST_OF_SIGNATURE = "first call of this signature"


class _Inside(threading.local):
    """While open, runners that this thread calls are the plain forward: within a recording or a
    replay."""

    now = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *error: object) -> None:
        self.now = False


_inside = _Inside()
_uses = itertools.count()
"""Numbers that grow with every call, to tell who was used last."""


class GraphRunner:
    """Calls `function`; where it pays, replays a recording of it instead: same result, bit for bit.

    `pool` is shared by the runners of a pipeline. `module` is whose weights are watched. `probe`
    returns a value that a recording depends on beyond arguments and weights: a recording is used
    only where it is equal. `remember` is called before a recording, after `probe`, and what it
    returns if that fails: to put back what the call has changed of the module. `veto` says in words
    why nothing may be recorded just now, or None; it is asked before eager calls and recordings,
    not replays, and told what `probe` has just returned, if it was asked.
    `capture` is "auto" (record what gains) or "always". Counters and reasons are in `report`. Any
    thread may call. Raises what `function` raises, nothing else.

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
        probe: Callable[[], Any] = lambda: None,
        veto: Callable[..., str | None] = lambda *seen: None,
        remember: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        self.function, self.pool, self.capture = function, pool, capture
        self.report = PartReport(name, type(function if module is None else module).__name__)
        self.entries: dict[Any, Entry] = {}
        self._backend, self._guard = pool.backend, WeightGuard(module, pool.backend, pool.device)
        self._probe, self._veto, self._remember = probe, veto, remember
        self._missed_in: Counter[type[nn.Module] | None] = Counter()
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
            entry = self.entries.get(key[:2])
            self._check(key, entry is None)
            if entry is None:
                entry = self._new_entry(key, call)
        except Uncapturable as uncapturable:
            return self._eager(str(uncapturable), call)
        with self.pool.lock:
            if self.pool.short:  # asked here, too: a call less before a launch
                self.pool.relieve()
            entry.last_use = next(_uses)
            reason = None if entry.variants else self._reason_for_eager(entry)
            if reason is None:
                return self._replay_or_record(entry, key, call)
        if reason != FIRST_OF_SIGNATURE or self.capture == "always":
            return self._eager(reason, call)
        result, *times = self._timed(lambda: self._eager(FIRST_OF_SIGNATURE, call))
        entry.judge_eager(*times)
        return result

    @property
    def has_graphs(self) -> bool:
        """Whether there is a recording to replay."""
        return any(entry.variants for entry in self.entries.values())

    def forget_graphs(self) -> None:
        """Drops every recording; what was learned about signatures stays."""
        for entry in self.entries.values():
            entry.forget()

    def _transparent(self) -> bool:
        """Whether someone else watches or records this call: then it is the plain forward."""
        return bool(
            _inside.now
            or torch._C._len_torch_dispatch_stack()
            or (torch._C._len_torch_function_stack() and _foreign_function_mode())
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or forward_ad._current_level >= 0
            or self._backend.is_capturing()
        )

    def _check(self, key: Signature, is_new: bool) -> None:
        """Raises `Uncapturable` for what else a call may not be. Devices are part of the key: those
        of one that is not new were looked at before."""
        self._guard.check_alive()  # or a tensor in a dead weight's place would pass for that weight
        storage, weights = self._backend.storage, self._guard.storages
        for x in key.tensors:
            if is_new and not x.is_cpu and x.device != self.pool.device:
                raise Uncapturable(f"an argument is on {x.device}, not on {self.pool.device}")
            if storage(x).data_ptr() in weights:
                raise Uncapturable("an argument shares memory with a weight or buffer")
        if torch.is_grad_enabled() and (
            any(x.requires_grad for x in key.tensors) or self._guard.requires_grad()
        ):
            raise Uncapturable("gradients are enabled: call under torch.no_grad()")

    def _new_entry(self, key: Signature, call: Any) -> Entry:
        with self.pool.lock:
            seen = self._values.setdefault(key.shapes, [set() for _ in key.values])
            for values, value, place in zip(seen, key.values, key.places, strict=True):
                if value not in values and len(values) == VARIANTS:
                    name = argument_name(call, place)
                    raise Uncapturable(f"{name} has had more than {VARIANTS} values: pass a tensor")
            for values, value in zip(seen, key.values, strict=True):
                values.add(value)
            return self.entries.setdefault(key[:2], Entry(self.report))

    def _reason_for_eager(self, entry: Entry) -> str | None:
        """Why a call that has no recording runs eagerly; None if it may be recorded."""
        self._calls += 1
        if entry.barred:
            entry.barred -= 1
            return entry.barred_for
        if entry.seen:
            return None
        if (vetoed := self._veto()) is not None:
            return vetoed
        first = self._calls == 1
        entry.seen = not first or self.capture == "always"
        return "first call of the module" if first else FIRST_OF_SIGNATURE

    def _eager(self, reason: str, call: Any) -> Any:
        self.report.eager(reason)
        random = self._backend.rng_state(self.pool.device)
        try:
            result = self.function(*call[0], **call[1])
            self.pool.set_default_limit()
            return result
        except torch.OutOfMemoryError:
            if not self.pool.bytes():
                raise
        self.pool.retire()  # the graphs' memory may be what was lacking
        self._backend.set_rng_state(self.pool.device, random)
        return self.function(*call[0], **call[1])

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float, float, float]:
        """What `run` returns, the seconds until its work was done, those of them that came after
        the host was done, and those that the device took."""
        backend, stream = self._backend, self._backend.current_stream(self.pool.device)
        backend.synchronize(stream)
        begin, first = backend.now(), backend.record_event(stream, timing=True)
        result = run()
        last, host = backend.record_event(stream, timing=True), backend.now() - begin
        last.synchronize()
        seconds = backend.now() - begin
        return result, seconds, seconds - host, first.elapsed_time(last) / 1e3

    def _replay_or_record(self, entry: Entry, key: Signature, call: Any) -> Any:
        entry.drop_stale(self._guard.check_alive())
        missed: GuardMiss | None = None
        for variant in entry.variants[:]:
            try:
                return self._replay(entry, variant, key, call)
            except GuardMiss as miss:
                self.report.guard_misses += 1
                missed = miss
        if missed is None or self._is_explained(missed, entry):
            return self._record(entry, key, call)
        entry.misses += 1
        entry.decline_if_fruitless(1, f"no two calls agree: {missed}")
        if entry.misses % 2 or entry.barred:  # a lazy cache may have been filled: once more eagerly
            return self._eager(str(missed), call)
        return self._record(entry, key, call)

    def _is_explained(self, missed: GuardMiss, entry: Entry) -> bool:
        """Whether a miss had a reason that is dealt with now: weights that moved while their old
        memory was in use, or a module that becomes a break."""
        return entry.drop_stale(self._guard.check_alive()) or self._breaks_more_for(missed)

    def _breaks_more_for(self, missed: GuardMiss) -> bool:
        """Counts where guards miss; modules of a class in which they keep missing become breaks,
        and what was recorded without these is dropped."""
        before = self._breaking()
        self._missed_in[missed.owner] += 1
        more = len(self._breaking()) > len(before)
        if more:
            self.forget_graphs()
        return more

    def _breaking(self) -> list[nn.Module]:
        """The modules that run as breaks. Not those with buffers, which they might write: a guard
        that misses later could not take that back."""
        module = self._guard.module()
        kinds = {kind for kind, missed in self._missed_in.items() if missed >= VARIANTS}
        inside = [] if module is None or not kinds else [*module.modules()][1:]
        return [m for m in inside if type(m) in kinds and next(m.buffers(), None) is None]

    def _broken(self, *args: Any, **kwargs: Any) -> Any:
        """The function, with these modules as breaks."""
        with contextlib.ExitStack() as stack:
            for module in self._breaking():
                run = as_break(module.forward, pure=True, kind="module")
                stack.enter_context(mock.patch.object(module, "forward", run))
            return self.function(*args, **kwargs)

    def _state(self) -> Any:
        """Everything beyond arguments that a recording depends on."""
        return self._guard.check(), *self._around()

    def _around(self) -> tuple[Any, Any]:
        return Ambient(self._backend.device_type).key, self._probe()

    def _replay(self, entry: Entry, variant: Recorded, key: Signature, call: Any) -> Any:
        """Replays and, while the device works, makes sure that the recording still holds. What
        cannot be taken back is checked before; so are runners whose state was seen to change."""
        before = variant.commits or self._probe_first > 0
        self._probe_first -= self._probe_first > 0
        if before:
            self._check_state(variant)
        with _inside:
            if entry.on_trial:
                result, seconds, *_ = self._timed(lambda: variant.replay(key.tensors))
                entry.judge_replay(seconds)
                if not entry.variants:
                    self.pool.retire_if_unused()
            else:
                result = variant.replay(key.tensors)
        if not before:
            self._check_state(variant)
        variant.edits.apply(call)
        self.report.replays += 1
        entry.fruitless = 0
        entry.variants.sort(key=lambda other: other is not variant)  # the likeliest to fit first
        return result

    def _check_state(self, variant: Recorded) -> None:
        now = self._state()
        if now != variant.state:
            self._probe_first = PROBED_FIRST
            what = _difference(variant.state, now)
            self.report.changes[what] += 1
            raise GuardMiss(f"changed since the recording: {what}")

    def _record(self, entry: Entry, key: Signature, call: Any) -> Any:
        if entry.barred:
            return self._eager(entry.barred_for, call)
        pool, state = self.pool, self._state()
        if (vetoed := self._veto(state[2])) is not None:
            entry.seen = False
            return self._eager(vetoed, call)
        pool.make_room()
        live, learned = self._backend.live_blocks(pool.id), (len(pool.unrecordable), pool.may_cut)

        def objection() -> str | None:
            changes = self._around() != state[1:]
            return "the forward changes its own state" if changes else self._guard.opaque

        try:
            with _inside, contextlib.ExitStack() as undo:
                undo.callback(self._remember())
                recorded = Recorded(self._broken, call, key, pool, self._guard, objection)
                undo.pop_all()
        except Exception as error:
            failure = error.with_traceback(None)  # whose frames hold tensors
        except BaseException:  # Ctrl-C
            self._retire_if_kept(live)
            raise
        else:
            recorded.state = state
            entry.add(recorded)
            _keep_within_limit(pool)
            result, recorded.first_result = recorded.first_result, None
            return result
        again = learned != (len(pool.unrecordable), pool.may_cut)
        try:
            return self._eager_after_failure(entry, failure, call, again)
        finally:
            self._retire_if_kept(live)

    def _retire_if_kept(self, live: set[int]) -> None:
        """Gives the graphs up if someone keeps what a failed recording made, beside the blocks that
        were `live` before: older graphs would write it."""
        pool = self.pool
        if outlives_garbage(lambda: not self._backend.live_blocks(pool.id) <= live):
            pool.retire()

    def _eager_after_failure(self, entry: Entry, error: Exception, call: Any, again: bool) -> Any:
        """The user's call does not fail because a recording did. If the eager call fails too, the
        fault is not the recording's, and a later call may be recorded: not at once if the failure
        cost the pool its graphs. `again` means that the op that failed is a break from now on."""
        reason = _failure(error)
        if isinstance(error, torch.OutOfMemoryError):
            self.pool.retire()
        if "captur" in reason:
            entry.bar(reason)
        result = self._eager(reason, call)
        if again:
            entry.barred = 0
        else:
            entry.decline(reason, BARRED_CALLS if getattr(error, "passing", False) else math.inf)
        return result


def _difference(before: Any, now: Any) -> str:
    """What of a runner's state changed, in words; the probe's value may know more of its own."""
    if before[0] != now[0]:
        return WEIGHTS_MOVED
    if before[1] != now[1]:
        return "torch's switches (gradients, autocast, precision, attention kernels)"
    tell = getattr(now[2], "difference", None)
    return "the module's state" if tell is None else str(tell(before[2]))


def _foreign_function_mode() -> bool:
    """Whether a mode other than torch's own default device changes what functions do."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def _failure(error: Exception) -> str:
    if isinstance(error, Uncapturable):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"recording failed: {type(error).__name__}: {first_line}"


def _keep_within_limit(pool: Pool) -> None:
    """Freed bytes return only with a whole pool: an overrun retires it, and the signatures used
    least recently are not recorded again first."""
    if pool.limit is None or pool.bytes() <= pool.limit:
        return
    pool.retire()
    entries = [e for runner in pool.tenants for e in runner.entries.values() if e.bytes]
    room = pool.limit
    for entry in sorted(entries, key=lambda entry: -entry.last_use):
        room -= entry.bytes
        if room < 0:
            entry.bar(f"no room under the memory limit of {pool.limit} bytes: raise memory_limit")
            entry.report.evictions += 1
