"""A model split over ranks against the whole one: hidden states, tokens, and what is allowed.

The measure of all is transformers itself: how far its own split model is from its own whole one,
and both from the whole one in float32. Knows tensors, not where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BOUND = 1.25
"""What our errors may be to those of transformers."""


@dataclass(frozen=True)
class Answer:
    """What one way computed for a batch: `hidden` `[tokens, hidden]`, of all prompts one behind the
    other, and `logits` `[prompts, vocab]`, behind the last token of each."""

    hidden: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """What transformers itself computes for a batch. `exact` is the whole model in float32, None
    if that is what it is anyway."""

    whole: Answer
    split: Answer
    exact: Answer | None = None


class Tally:
    """Relative errors of hidden states, of single batches and of all together."""

    def __init__(self) -> None:
        self._error = self._size = 0.0
        self.each: list[float] = []

    def add(self, got: Answer, expected: Answer) -> None:
        """Counts one batch."""
        wanted = expected.hidden.double()
        error = float((got.hidden.double() - wanted).square().sum())
        size = float(wanted.square().sum())
        self._error, self._size = self._error + error, self._size + size
        self.each.append(_root(error, size))

    @property
    def relative(self) -> float:
        """Of all batches as if they were one."""
        return _root(self._error, self._size)


class Yardstick:
    """Transformers' own errors, over some batches by number."""

    def __init__(self, references: Mapping[int, Reference]) -> None:
        self.references = references
        self.split, self.logits, self.same, self.prompts = Tally(), 0.0, 0, 0
        self.exact = {"one GPU": Tally(), "split": Tally()}
        for reference in references.values():
            self._add(reference)

    def _add(self, reference: Reference) -> None:
        whole, split = reference.whole, reference.split
        self.split.add(split, whole)
        self.logits = max(self.logits, float(_errors(split, whole).max()))
        self.same += int((split.logits.argmax(-1) == whole.logits.argmax(-1)).sum())
        self.prompts += len(whole.logits)
        if reference.exact is not None:
            self.exact["one GPU"].add(whole, reference.exact)
            self.exact["split"].add(split, reference.exact)

    def _widest(self, most: int = 10) -> list[dict[str, Any]]:
        return sorted(self._others, key=lambda other: -float(other["gap to it"]))[:most]

    def figures(self) -> dict[str, Any]:
        """For the result file."""
        figures: dict[str, Any] = {
            "batches": list(self.references),
            "prompts": self.prompts,
            "split from one GPU, relative": self.split.relative,
            "split from one GPU, worst batch": max(self.split.each),
            "logits, largest error": self.logits,
            "same token, of 1": self.same / self.prompts,
        }
        exact = {name: tally.relative for name, tally in self.exact.items() if tally.each}
        return figures | ({"from float32, relative": exact} if exact else {})


class Judge:
    """Compares a mode on all ranks with the same mode on one GPU, batch by batch."""

    def __init__(self, yardstick: Yardstick) -> None:
        self._yardstick = yardstick
        self._all, self._measured = Tally(), Tally()
        self._exact = {"one GPU": Tally(), "split": Tally()}
        self._prompts = self._same = 0
        self._others: list[dict[str, Any]] = []
        self._finite = True

    def add(self, batch: int, split: Answer, whole: Answer) -> None:
        """Counts one batch."""
        self._all.add(split, whole)
        self._finite &= bool(split.logits.isfinite().all())
        self._compare_tokens(batch, split, whole)
        reference = self._yardstick.references.get(batch)
        if reference is None:
            return
        self._measured.add(split, whole)
        if reference.exact is not None:
            self._exact["one GPU"].add(whole, reference.exact)
            self._exact["split"].add(split, reference.exact)

    def _compare_tokens(self, batch: int, split: Answer, whole: Answer) -> None:
        ours, theirs = split.logits.argmax(-1), whole.logits.argmax(-1)
        self._prompts += len(ours)
        self._same += int((ours == theirs).sum())
        errors = _errors(split, whole)
        for prompt in (ours != theirs).nonzero()[:, 0].tolist():
            logits = whole.logits[prompt].float()
            first, second = logits.topk(2).values.tolist()
            other = {"gap to it": first - float(logits[ours[prompt]]), "top-2 gap": first - second}
            error = float(errors[prompt])
            self._others.append({"batch": batch, "prompt": prompt, **other, "error": error})

    def _widest(self, most: int = 10) -> list[dict[str, Any]]:
        return sorted(self._others, key=lambda other: -float(other["gap to it"]))[:most]

    def figures(self) -> dict[str, Any]:
        """For the result file. `failed` lists what is beyond the bound."""
        measure = self._yardstick
        theirs = measure.split.relative
        figures: dict[str, Any] = {
            "prompts": self._prompts,
            "same token, of 1": self._same / max(1, self._prompts),
            "other tokens": len(self._others),
            "widest gaps of other tokens": self._widest(),
            "gap allowed": self._gap,
            "split from one GPU, relative": self._all.relative,
            "split from one GPU, worst batch": max(self._all.each),
            "worst batch": self._all.each.index(max(self._all.each)),
            "of transformers' batches": self._measured.relative,
            "times transformers'": self._measured.relative / max(theirs, 1e-30),
            "bound": BOUND * theirs,
        }
        exact = {name: tally.relative for name, tally in self._exact.items() if tally.each}
        figures |= {"from float32, relative": exact} if exact else {}
        return figures | {"failed": self._complaints(exact)}

    @property
    def _gap(self) -> float:
        """How far apart two logits may be that change places: both may be wrong, each by what
        transformers' own largest error allows."""
        return 2 * BOUND * self._yardstick.logits

    def _complaints(self, exact: Mapping[str, float]) -> list[str]:
        measure, found = self._yardstick, []
        if not self._finite:
            found.append("logits are not finite")
        # Written so that NaN is beyond every bound.
        if not self._measured.relative <= BOUND * measure.split.relative:
            found.append("hidden states are farther from one GPU's than the bound")
        allowed = {name: BOUND * tally.relative for name, tally in measure.exact.items()}
        if not all(error <= allowed[name] for name, error in exact.items()):
            found.append("hidden states are farther from float32 than the bound")
        if not all(other["gap to it"] <= self._gap for other in self._others):
            found.append("tokens differ where the gap is larger than rounding explains")
        return found


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> int:
    """How many batches came out equal to the last bit."""
    return sum(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _errors(got: Answer, expected: Answer) -> torch.Tensor:
    """The largest error of each prompt's logits, `[prompts]`."""
    return (got.logits.float() - expected.logits.float()).abs().amax(-1)


def _root(error: float, size: float) -> float:
    return float((error / max(size, 1e-30)) ** 0.5)
