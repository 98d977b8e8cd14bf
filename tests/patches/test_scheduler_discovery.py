"""Which schedulers of a pipeline are found, and whose they are."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import diffusers
from torch import nn

from accel.patches.schedulers import SyncFreeSchedulers, find_schedulers, is_sync_free


class Pipe:
    """What of a pipeline matters here."""

    def __init__(self, **components: object) -> None:
        self.components = components

    def __getattr__(self, name: str) -> object:
        if name in vars(self)["components"]:
            return vars(self)["components"][name]
        raise AttributeError(name)


def test_schedulers_are_found_by_their_class() -> None:
    first, second = diffusers.DDIMScheduler(), diffusers.DDPMScheduler()
    pipe = Pipe(unet=nn.Linear(1, 1), scheduler=first, movq_scheduler=second, tokenizer=None)
    assert find_schedulers(pipe) == {"scheduler": first, "movq_scheduler": second}
    assert find_schedulers(SimpleNamespace(scheduler=first)) == {"scheduler": first}
    assert find_schedulers(nn.Linear(1, 1)) == {}


def test_one_assigned_later_is_found_and_the_old_one_restored() -> None:
    old, new = diffusers.DDIMScheduler(), diffusers.EulerDiscreteScheduler()
    pipe = Pipe(scheduler=old)
    schedulers = SyncFreeSchedulers(pipe)
    pipe.components["scheduler"] = new
    schedulers.refresh()
    assert is_sync_free(new) and type(old) is diffusers.DDIMScheduler
    schedulers.take_off()
    assert type(new) is diffusers.EulerDiscreteScheduler


def test_a_scheduler_of_two_pipelines_stays_until_both_are_done() -> None:
    shared = diffusers.DDIMScheduler()
    pipes = Pipe(scheduler=shared), Pipe(scheduler=shared)
    one, other = (SyncFreeSchedulers(pipe) for pipe in pipes)
    one.take_off()
    assert is_sync_free(shared)
    other.take_off()
    assert type(shared) is diffusers.DDIMScheduler


def test_neither_pipeline_nor_scheduler_is_kept_alive() -> None:
    pipe = Pipe(scheduler=diffusers.DDIMScheduler())
    gone = weakref.ref(pipe), weakref.ref(pipe.scheduler)
    schedulers = SyncFreeSchedulers(pipe)
    del pipe
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    schedulers.refresh()
    schedulers.take_off()
