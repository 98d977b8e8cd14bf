"""What one rank is given, whom it talks to, and the models that it loads. Knows torch.distributed
and transformers' `tp_plan`; nothing is measured here."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prefill_measures.parallel_sameness import Answer
from prefill_measures.prompts import Prompts


@dataclasses.dataclass(frozen=True)
class Job:
    """What ranks are to do. `folder` holds the model, `room` the ranks' notes, `facts` what the
    result file begins with, `command` what it says it was made by."""

    folder: str
    room: str
    output: str
    device: str
    modes: list[str]
    batches: int
    every: int
    max_tokens: int
    max_requests: int
    attention: str
    tokens: list[int]
    repeats: int
    warm_up: int
    float32: bool
    seed: int
    command: list[str]
    facts: dict[str, Any]

    def save(self, path: Path) -> None:
        """For the ranks to `read`."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """What was saved."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class Ranks:
    """All ranks, seen by one of them. `meet` and `gather` need no device."""

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ["RANK"])
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device(device, local) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        self._group = dist.new_group(backend="gloo")
        self.size = dist.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this rank compares and writes."""
        return self.rank == 0

    def meet(self) -> None:
        """Waits until all are here."""
        dist.barrier(self._group)

    def gather(self, mine: Any) -> list[Any]:
        """Everybody's, on every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, self._group)
        return found


def load(folder: str, **options: Any) -> Any:
    """The saved model in the dtype that it was saved in."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


@contextlib.contextmanager
def in_float32(model: Any, wanted: bool) -> Iterator[Any]:
    """A copy of the model in float32, for as long as this is open; None if it is not wanted, or if
    that is what the model is."""
    if not wanted or model.dtype == torch.float32:
        yield None
        return
    exact = copy.deepcopy(model).float()
    try:
        yield exact
    finally:
        exact.to("meta")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@torch.no_grad()
def own_answer(model: Any, prompts: Prompts) -> Answer:
    """Transformers' own forward, prompt by prompt, so that nothing is padded."""
    kept: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        kept.append(output.last_hidden_state[0])

    logits = []
    hook = model.get_decoder().register_forward_hook(keep)
    try:
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            last = torch.tensor([len(prompt) - 1], device=model.device)
            output = model(input_ids=ids, use_cache=False, logits_to_keep=last)
            logits.append(output.logits[0, -1])
    finally:
        hook.remove()
    return Answer(torch.cat(kept), torch.stack(logits))
