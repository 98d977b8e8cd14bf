"""The self-test: may this model's prompts be packed?

Knows two questions. Does each layer make of packed prompts what the model itself makes of the same
hidden states, prompt by prompt? Attention that lives in a mask only (chunks), or is another here,
answers no. And does a prompt's result stay what it was when others are its neighbours? Layers that
leak from one prompt into the next answer no.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from accel.prefill.batch import Batch, Request
from accel.prefill.buckets import Ladder
from accel.prefill.model import PrefillModel
from accel.prefill.packed_body import PackedBody
from accel.prefill.slots import HOST
from accel.prefill.stages import Heard, fed, heard

Prompt = Sequence[int]

FIRST, LAST = (17,), (1,) * 12 + (5,)
"""Lengths of the prompts around the long one: odd ones, so that none begins on an even row only."""
LONG = 97
TAIL = 64
"""Tokens beyond the model's horizon."""
STRETCH = 32
"""Tokens in a row that are judged together, at least; as many as there are of a shorter prompt."""
WORST, MIDDLE = 0.9, 0.5
"""Which of them, by size of the error, must be no more than rounding. With experts the middle one:
rounding alone sends single tokens elsewhere."""
NEIGHBOURS = 16
"""Prompts of one token whose neighbours change, and as many whose neighbours stay."""
NOISE = 4
"""How much more than those that stay may the others change."""


def unit(model: PrefillModel) -> float:
    """The relative size of one rounding error. In float32 sums of other order count, too: eight of
    its own units."""
    if model.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return 2.0**-10
    return max(torch.finfo(model.dtype).eps, 2.0**-20)


def batches_for(model: PrefillModel, max_tokens: int) -> list[list[list[int]]]:
    """Random prompts: short ones around one that goes beyond the model's horizon. If that does not
    fit, as long a one as there will ever be, alone, is a second batch."""
    limit = min(max_tokens, model.position_limit or max_tokens)
    wanted = max(LONG, model.horizon + TAIL)
    long = max(1, min(limit - sum(FIRST + LAST), wanted))
    lengths = [*FIRST, long, *LAST]
    if limit <= sum(FIRST + LAST):
        lengths = [max(1, limit - 1), 1][:limit]
    batches = [lengths] if long == wanted else [lengths, [limit]]
    return [_random(model.vocab_size, some, seed=17) for some in batches]


def _random(vocabulary: int, lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    draw = torch.Generator(HOST).manual_seed(seed)
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=draw, device=HOST)
    return [part.tolist() for part in ids.split(list(lengths))]


class SelfTest:
    """Tries a packed body on random prompts."""

    def __init__(self, body: PackedBody, ladder: Ladder) -> None:
        self._body, self._model, self._ladder = body, body.model, ladder

    def objection(self) -> str | None:
        """Why the model's prompts must not be packed, or None. Raises what the model raises."""
        batches = batches_for(self._model, self._ladder.largest)
        for prompts in batches:
            if why := self._difference(prompts, self._packed(prompts), "packed"):
                return why
        if self._body.cache is not None:
            prompt = self._chunked_prompt(batches[0])
            if why := self._difference([prompt], self._in_chunks(prompt), "in chunks"):
                return why
        return self._leak()

    def _difference(
        self, prompts: Sequence[Prompt], batches: Iterable[Batch], what: str
    ) -> str | None:
        """Runs `batches`, which hold the prompts' tokens in order, every layer fed with the model's
        own hidden states. Says where the result differs by more than rounding does, or None."""
        own = self._own(prompts)
        stretches = _stretches([len(prompt) for prompt in prompts], self._model.horizon)
        excess: list[list[torch.Tensor]] = [[] for _ in own]
        start = 0
        for batch in batches:
            rows = slice(start, start := start + batch.tokens)
            part = [Heard(stage, hidden[..., rows, :]) for stage, hidden in own]

            def see(number: int, came: torch.Tensor, part: list[Heard] = part) -> None:
                excess[number].append(self._excess(number, came, part))

            with fed(part[:-1], see):
                hidden = self._body.eager(batch)
            see(len(part) - 1, hidden[: batch.tokens])
        for number, parts in enumerate(excess):
            errors, share = torch.cat(parts), MIDDLE if self._model.routes else WORST
            found = [errors[some].quantile(share, interpolation="lower") for some in stretches]
            worst = torch.stack(found).max().item()
            if not worst <= 1:  # NaN is a mismatch, too
                where = "the result" if number == len(own) - 1 else f"what layer {number} reads"
                return (
                    f"self-test: {what}, {where} differs from the model's own attention by "
                    f"{worst:.1f} times what rounding explains"
                )
        return None

    def _own(self, prompts: Sequence[Prompt]) -> list[Heard]:
        """What the model itself feeds its stages with, prompts side by side, and its result: that
        alone if prompts do not go through the same stages, token by token."""
        calls, results = [], []
        for prompt in prompts:
            with heard(self._model.stages) as stages:
                hidden = self._model.own(torch.tensor(prompt, device=self._model.device))
            results.append(hidden.to(HOST))
            calls.append([x for x in stages if x.hidden.shape[-2:-1] == hidden.shape[:1]])
        result = Heard(self._model.module, torch.cat(results))
        ways = {tuple(id(call.stage) for call in of_prompt) for of_prompt in calls}
        if len(ways) > 1:
            return [result]
        together = (
            Heard(same[0].stage, torch.cat([call.hidden for call in same], -2))
            for same in zip(*calls, strict=True)
        )
        return [*together, result]

    def _excess(self, number: int, came: torch.Tensor, part: Sequence[Heard]) -> torch.Tensor:
        """By how many times each token's hidden state differs more than rounding does: one layer's
        roundings of what it adds, beside one rounding of the sum in each channel (a few channels
        can be thousands of times as large as the others). Without stages, all layers' together."""
        own, one = _by_token(part[number].hidden).to(came.device), unit(self._model)
        error, size = (_by_token(came) - own).abs(), own.norm(dim=-1)
        if len(part) == 1:
            # Never as much as other tokens do.
            allowed = size * min(4 * one * math.sqrt(self._model.depth), 0.15)
        elif number == len(part) - 1:
            allowed = size * 2 * one
        elif number == 0:
            allowed = size * one / 2
        else:
            before, rounded = _by_token(part[number - 1].hidden).to(came.device), own.abs() * one
            error = (error - rounded).clamp(min=0)
            same = own.shape == before.shape
            added = ((own - before).abs() - rounded).clamp(min=0) if same else own
            allowed = added.norm(dim=-1) * 4 * one
        # Of padding tokens alone all can be zeros.
        excess: torch.Tensor = error.norm(dim=-1) / allowed.clamp(min=1e-30)
        return excess.to(HOST)

    def _packed(self, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        rows = self._ladder.rows(sum(map(len, prompts)))
        yield self._body.pack([Request(tuple(prompt)) for prompt in prompts], rows)

    def _chunked_prompt(self, prompts: Sequence[Prompt]) -> Prompt:
        """One that goes beyond the horizon if the cache has room for it."""
        cache, model = self._body.cache, self._model
        assert cache is not None
        limit = min(cache.rows, model.position_limit or cache.rows)
        long = min(limit, max(LONG, model.horizon + TAIL))
        return ([*prompts[1]] * long)[:long] if len(prompts) > 1 else prompts[0]

    def _in_chunks(self, prompt: Prompt) -> Iterator[Batch]:
        """One prompt, its keys and values cached chunk by chunk."""
        cache = self._body.cache
        assert cache is not None
        pages = cache.take(cache.pages_for(len(prompt)))
        chunk = max(1, min(self._ladder.largest, len(prompt) // 2))
        try:
            for start in range(0, len(prompt), chunk):
                ids = tuple(prompt[start : start + chunk])
                mine = pages[: cache.pages_for(start + len(ids))]
                rows = self._ladder.rows(len(ids))
                yield self._body.pack([Request(ids, start, mine)], rows)
        finally:
            cache.release(pages)

    def _leak(self) -> str | None:
        """Whether prompts change with the tokens of those before them. Others, further ahead, stay
        what they are; where the device sums in another order for other tokens, they change too."""
        limit = self._ladder.largest
        if limit < 2:
            return None
        count = min(NEIGHBOURS, (limit - 2) // 6)
        pairs = [x for i in range(count) for x in (3 + i % 3, 1)]  # at several distances
        prompts = _random(self._model.vocab_size, [1] * count + (pairs or [1, 1]), seed=19)
        before = self._last_states(prompts)
        for changed in prompts[count::2]:
            changed[:] = [(token + 1) % self._model.vocab_size for token in changed]
        after = self._last_states(prompts)
        changes = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)
        far, near = changes[:count], changes[count + 1 :: 2].median().item()
        noise = far.mean().item() if len(far) else 0.0
        few = 0.0 if count == NEIGHBOURS else unit(self._model)  # they may all stay by chance
        allowed = max(NOISE * noise, few)
        if not near <= allowed:
            return f"self-test: a prompt's result follows its neighbours' tokens, by {near:.1e}"
        return None

    def _last_states(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        (batch,) = self._packed(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=HOST)
        hidden: torch.Tensor = self._body.eager(batch).float().to(HOST)
        return hidden[lengths.cumsum(0) - 1]


def _by_token(hidden: torch.Tensor) -> torch.Tensor:
    """`[..., tokens, hidden]` as `[tokens, all of it]` in float32."""
    return hidden.movedim(-2, 0).flatten(1).float()


def _stretches(lengths: Sequence[int], horizon: int) -> list[torch.Tensor]:
    """Which tokens are judged together: those of prompts that are shorter than all `FIRST`, of each
    other prompt as many stretches as it has, and what lies beyond the horizon if it is less.

    >>> [len(tokens) for tokens in _stretches([17, 97, 1, 5], horizon=90)]
    [17, 33, 32, 32, 6, 7]
    """
    tokens = torch.arange(sum(lengths), device=HOST).split(list(lengths))
    long = [mine for mine in tokens if len(mine) >= min(FIRST)]
    short = [mine for mine in tokens if len(mine) < min(FIRST)]
    found = [part for mine in long for part in mine.tensor_split(max(1, len(mine) // STRETCH))]
    found += [torch.cat(short)] if short else []
    beyond = [mine[horizon:] for mine in tokens if horizon]
    return found + [few for few in beyond if 0 < len(few) < STRETCH]
