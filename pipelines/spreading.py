"""One order, several processes: who makes which pictures, and what they hear of each other.

`accelerate launch` (or torchrun) starts the same command line several times. Here the processes
find each other, take their shares, and end together. This module knows no model and no picture;
without a launcher it imports neither torch nor accelerate.

The processes talk through gloo, on GPUs too. They say little, and NCCL would cost every GPU memory
and a watchdog thread that asks for events while a graph is recorded, which breaks the recording.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from accel.pipelines.console import note
from accel.pipelines.errors import AccelError, BadInput, explained, first_line

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

PATIENCE = timedelta(days=30)
"""How long a process waits for the others' shares. One that dies is noticed at once."""

GRACE = 10.0
"""Seconds in which a launcher ends the processes that are left when one of them has failed."""

_FAILED = "failed"


class ToldByMain(Exception):
    """Ends a process whose failure, or another's, the main process puts into words."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the main process says why (exit code {exit_code})")
        self.exit_code = exit_code


class Team:
    """The processes that share an order; this class is the one process of an ordinary run."""

    size = 1
    is_main = True

    def device(self, asked: str) -> str:
        """The device of this process, where `asked` is what the person wrote."""
        return asked

    def share(self, items: list[T]) -> list[T]:
        """This process's part of `items`: a stretch of them, perhaps empty, never for the main
        process. The parts of all processes, one after the other, are `items`."""
        return items

    def each(self, work: Callable[[], T]) -> T:
        """What `work` returns here, once it is done in every process. Where it fails in one, all
        raise: the main process the failure, the others `ToldByMain`."""
        return work()

    def decided(self, decide: Callable[[], T]) -> T:
        """What `decide` returns in the main process, the only one that calls it."""
        return decide()

    def collected(self, work: Generator[T, None, None], tell: Callable[[T], None]) -> list[T]:
        """What `work` yields in all processes, in order. `tell` hears each piece in the main
        process: alone as soon as it is made, else when all are.

        When `work` fails in one process, the others stop after the piece that they are at. `tell`
        hears what was made; then all raise as in `each`.
        """
        made = []
        for piece in work:
            tell(piece)
            made.append(piece)
        return made


class Launched(Team):
    """Processes that a launcher started together. `state` is accelerate's, `store` what all see."""

    def __init__(self, state: Any, store: Store) -> None:
        self._state = state
        self._store = store
        self.size: int = state.num_processes
        self.is_main: bool = state.is_main_process

    def device(self, asked: str) -> str:
        """`cuda:N` by the process's place on its machine; `BadInput` where one GPU was asked for,
        which all processes would share."""
        kind, _, index = asked.partition(":")
        if kind == "cuda" and index:
            raise BadInput(
                f"--device {asked}: {self.size} processes take a GPU each; write --device cuda"
            )
        if asked == "auto" or self._state.device.type == asked:
            return str(self._state.device)
        return asked  # the CPU, or what is refused later in the same words as ever

    def share(self, items: list[T]) -> list[T]:
        with self._state.split_between_processes(items) as mine:
            part: list[T] = mine
            return part

    def each(self, work: Callable[[], T]) -> T:
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        self._end_if_any_failed(failure)
        return result

    def decided(self, decide: Callable[[], T]) -> T:
        from accelerate.utils import broadcast_object_list

        # Together with `decide`: a failure has to reach those who would wait for its result.
        decision = self.each(lambda: decide() if self.is_main else None)
        with _lost_told():
            decisions: list[T] = broadcast_object_list([decision])
        return decisions[0]

    def collected(self, work: Generator[T, None, None], tell: Callable[[T], None]) -> list[T]:
        made: list[T] = []
        failure: Exception | None = None
        try:
            with contextlib.closing(work):
                for piece in work:
                    made.append(piece)
                    if self._store.check([_FAILED]):
                        break
        except Exception as error:
            failure = error
            self._store.set(_FAILED, "")
        everything = _gathered(made)
        if self.is_main:
            for piece in everything:
                tell(piece)
        self._end_if_any_failed(failure)
        return everything

    def _end_if_any_failed(self, mine: Exception | None) -> None:
        """Raises if `work` failed in any process; every process calls this at the same point."""
        known = None if mine is None else explained(mine)
        failures = [failure for failure in _gathered([known]) if failure is not None]
        if not failures:
            return
        if not self.is_main:
            raise ToldByMain(failures[0].exit_code) from mine
        raise failures[0] from mine


ALONE = Team()


@contextlib.contextmanager
def team(device: str) -> Iterator[Team]:
    """The processes started together with this one, once all of them have come. `device` is what
    the person wrote: on the CPU no process takes a GPU. Once in the life of a process."""
    if not _was_launched():
        yield ALONE
        return
    import torch
    from accelerate import PartialState
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    cpu = device.startswith("cpu") or not torch.cuda.is_available()
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore("accel", store)
    state = PartialState(
        cpu=cpu, backend="gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE
    )
    try:
        if cpu and state.is_main_process:
            _note_threads(torch.get_num_threads())
        yield Launched(state, store)
    finally:
        state.destroy_process_group()  # gloo's threads abort a process that ends with them


def let_main_speak_first() -> None:
    """Waits, in another process than the main one, for the launcher to end this process, as it does
    when the main process has failed. Ending first would have the launcher end the main process,
    perhaps before it could say why. Returns where nobody came.
    """
    if not is_main():
        time.sleep(GRACE)


def is_main() -> bool:
    """Whether this process may speak for all, as far as is known before they have met."""
    return not _was_launched() or os.environ["RANK"] == "0"


def _was_launched() -> bool:
    """Whether a launcher started this process and others. The variables are its message to them,
    not settings of ours; some of them alone come from elsewhere, say a cluster's scheduler."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1


def _gathered(mine: list[T]) -> list[T]:
    """The lists of all processes, one after the other."""
    from accelerate.utils import gather_object

    with _lost_told():
        everything: list[T] = gather_object(mine)
    return everything


@contextlib.contextmanager
def _lost_told() -> Iterator[None]:
    """A process that was killed says nothing more; the others' connections to it break."""
    try:
        yield
    except RuntimeError as error:
        raise AccelError(
            f"another process ended without a word ({first_line(error)}); the launcher says how"
        ) from error


def _note_threads(threads: int) -> None:
    """Says what may tell the pictures apart from those of one process: the launcher's choice."""
    from accel.pipelines import machine

    if threads == 1 < machine.cores():
        note("1 thread a process: on a CPU that can change pixels; OMP_NUM_THREADS sets it")
