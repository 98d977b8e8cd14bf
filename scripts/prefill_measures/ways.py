"""The ways to prefill that are compared: transformers, and our runner in each of its modes.

Every way takes lists of token ids on the host and leaves the logits behind each prompt's last token
on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import accel
from accel.prefill.runner import PrefillRunner
from prefill_measures.prompts import Prompts

TRANSFORMERS = "transformers"
NO_GRAPHS = "no graphs"
MODES = {NO_GRAPHS: "eager", "breakable": "breakable", "full": "full"}
WAYS = (TRANSFORMERS, *MODES)

Run = Callable[[Prompts], torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What all runners are made with."""

    max_tokens: int
    max_requests: int = 16
    attention: str = "auto"
    fused: bool = True

    def runner(self, model: Any, mode: str, max_tokens: int | None = None) -> PrefillRunner:
        """A runner of `model` in that mode, up to another ceiling if one is given."""
        return accel.prefill_runner(
            model,
            mode=mode,
            max_tokens=max_tokens or self.max_tokens,
            max_requests=self.max_requests,
            attention=self.attention,
            fused=self.fused,
        )


class Ways:
    """The ways by name, ready to run. `left_out` says which are not there, and why."""

    def __init__(self, model: Any, names: Sequence[str], options: Options) -> None:
        self.runners: dict[str, PrefillRunner] = {}
        self.left_out: dict[str, str] = {}
        self._model = model
        self._names = [name for name in names if name in WAYS]
        for name in self._names:
            if name != TRANSFORMERS:
                self._open(name, options)

    def _open(self, name: str, options: Options) -> None:
        runner = options.runner(self._model, MODES[name])
        report = runner.report
        why = report.declined
        if why is None and report.mode != MODES[name]:
            why = "; ".join(report.notes) or f"it runs in mode {report.mode!r}"
        if why is None:
            self.runners[name] = runner
        else:
            self.left_out[name] = why
            runner.close()

    @property
    def runs(self) -> dict[str, Run]:
        """Each way as a function of prompts."""
        found: dict[str, Run] = {}
        for name in self._names:
            if name == TRANSFORMERS:
                found[name] = lambda prompts: own_logits(self._model, prompts)
            elif name in self.runners:
                found[name] = _logits_of(self.runners[name])
        return found

    @property
    def attention(self) -> str:
        """The backend of our runners, which is one for all."""
        return next((r.report.attention for r in self.runners.values()), "none")

    def close(self) -> None:
        """Gives the runners' memory back."""
        for runner in self.runners.values():
            runner.close()


def _logits_of(runner: PrefillRunner) -> Run:
    return lambda prompts: runner(prompts).logits


@torch.no_grad()
def own_logits(model: Any, prompts: Prompts) -> torch.Tensor:
    """`[requests, vocab]` from transformers itself: no cache, the head on the last token only. Of
    several prompts the shorter ones are padded on the left, as `generate` has them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    more = {}
    if len(prompts) > 1:
        rows = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        mask = torch.tensor(rows, device=model.device)
        more = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    # Not 1: of a slice, bf16 products on some processors copy the head's weights, for seconds.
    last = torch.tensor([longest - 1], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=last, **more).logits
    return logits[:, -1]
