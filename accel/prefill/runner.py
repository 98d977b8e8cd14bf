"""PrefillRunner: prompts in, logits and hidden states out, by graphs where there are some.

Knows the order of a call: check the prompts, cut them into passes, find pages, run, apply the head.
What a pass is made of is in packed_body.py, which graphs there are in graphs.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, SupportsIndex

import torch
from torch import nn

from accel.backend import backend_for
from accel.memory import Pool
from accel.prefill.batch import Request
from accel.prefill.buckets import Ladder
from accel.prefill.captured import Captured
from accel.prefill.construction import MODES, Setup, set_up
from accel.prefill.graphs import Graphs, Progress
from accel.prefill.kv_cache import KVCache
from accel.prefill.memory_plan import MemoryPlan, plan_for
from accel.prefill.model import PrefillModel
from accel.prefill.passes import cut, fitting
from accel.prefill.prompts import Guests, Prompt, Prompts, open_prompts
from accel.prefill.report import PrefillReport
from accel.prefill.result import Handle, Result
from accel.prefill.slots import HOST
from accel.prefill.workplace import Workplace

HEAD_ROWS = 1024
"""Rows of hidden states that `score` gives the head at a time."""


class PrefillRunner:
    """Runs prompts of one model. See `accel.prefill` for what callers may ask of it.

    `max_tokens` is the largest batch, and the chunk size of longer prompts; `max_requests` are the
    slots of full graphs; `cache_tokens` is how many tokens' keys and values can be kept; `mode` is
    "breakable", "full" or "eager"; `attention` "auto" or a backend's name; `buckets` the sizes that
    batches are padded to. Any thread may call.
    """

    def __init__(
        self,
        model: PrefillModel,
        *,
        max_tokens: int = 8192,
        max_requests: int = 16,
        cache_tokens: int = 0,
        mode: str = "breakable",
        attention: str = "auto",
        buckets: Sequence[int] | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: one of {', '.join(MODES)}")
        _check_sizes(max_tokens=max_tokens, max_requests=max_requests, cache_tokens=cache_tokens)
        self._model, self._max_requests = model, max_requests
        self._ladder = Ladder(max_tokens, buckets)
        self._lock = threading.RLock()
        self._pool = Pool(model.device, dtype=model.dtype) if backend_for(model.device) else None
        self._place = Workplace(self._pool, model.ranks)
        self._graphs: Graphs | None = None
        self._guests = Guests()
        self.report = PrefillReport(model.name, mode, attention)
        self._eager_because = "mode='eager'"
        if self._pool is None and mode != "eager":
            self.report.mode = mode = "eager"
            self._eager_because = f"nothing can be captured on {model.device}"
            self.report.notes.append(self._eager_because)
        with self._alone():
            setup = Setup(model, self._ladder, max_requests, cache_tokens, mode, attention)
            self._body = set_up(setup, self.report)
            if self._body is not None and self.report.mode != "eager" and self._pool is not None:
                full = self.report.mode == "full"
                self._graphs = Graphs(self._body, self._pool, self._ladder, full, self.report)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        prefix: Handle | Sequence[Handle | None] | None = None,
    ) -> Result:
        """Runs `prompts`, lists of token ids, behind `prefix`, if any: a handle, or one or None per
        prompt. Raises ValueError for prompts that cannot be run, in one line."""
        with self._alone():
            opened = self._opened(prompts, prefix)
            prefixes = [prompt.prefix for prompt in opened.prompts if prompt.prefix is not None]
            made_of = self._made_of() if prefixes else None
            if any(handle.made_of != made_of for handle in prefixes):
                raise ValueError("a prefix was cached before the model changed: run it again")
            hidden = self._hidden(opened)
            if opened.handles and made_of is None:
                made_of = self._made_of()  # while the device works
            for handle in opened.handles:
                handle.made_of = made_of
            last = torch.stack([states[-1] for states in hidden])
            logits = self._place.taken_out(self._model.head(last))
            layers = len(self._body.groups) if self._body else 0
            self.report.calls += 1
            hand_over = self._model.generate_kwargs
            return Result(logits, hidden, opened.handles, hand_over, layers)

    def _made_of(self) -> object:
        """What keys and values follow from: weights, told by where they lie and how often they were
        written, and the model's state."""
        weights = _weights_of(self._model.module)
        seen = [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in weights]
        return seen, self._model.state()

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises ValueError, in one line, for the first prompt that cannot be run, and runs none:
        where they go in several calls, its number is the one among all of them."""
        with self._alone(hands_out=False):
            self._opened(prompts)

    def score(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The log-probability of every token but the first, given those before it: float32 on the
        host, `[tokens - 1]` per prompt. The head is applied to a few rows at a time, so the logits
        of all tokens never exist together."""
        with self._alone(hands_out=False):
            opened = self._opened(prompts)
            lengths = [len(prompt.ids) for prompt in opened.prompts]
            scores: list[torch.Tensor] = []
            most = self._max_requests if self.report.mode == "full" else len(lengths)
            for group in fitting(lengths, self._ladder.largest, most):
                some = Prompts([opened.prompts[i] for i in group])
                states = self._hidden(some, keep=False)
                for prompt, hidden in zip(some.prompts, states, strict=True):
                    scores.append(self._score(prompt.ids, hidden))
                some.release()
            self.report.calls += 1
            return scores

    def capture(self, progress: bool | Progress = False) -> PrefillRunner:
        """Captures every bucket now, the largest first. `progress` shows a bar, or why nothing is
        captured, or is a function called with (done, total, bucket). Returns the runner.

        Raises ValueError if memory for it is missing: `plan()` says how much it takes.
        """
        with self._alone():
            if self._graphs is not None:
                pieces = self._planned_pieces()
                if progress is True:
                    from accel.prefill.progress import bar

                    with bar() as shown:
                        self._graphs.capture(shown, pieces)
                else:
                    self._graphs.capture(progress or None, pieces)
            elif progress is True:
                from accel.prefill.progress import say

                say(f"nothing is captured: {self.report.declined or self._eager_because}")
        return self

    @property
    def free_cache_tokens(self) -> int:
        """Tokens that the cache still has room for; 0 without a cache."""
        return self._cache.free_tokens if self._cache else 0

    def plan(self) -> MemoryPlan:
        """What capturing every bucket will take, in bytes. Runs two small eager passes. Raises
        ValueError where nothing is captured, saying why."""
        with self._alone():
            if self._graphs is None or self._body is None or self._pool is None:
                why = self.report.declined or self._eager_because
                raise ValueError(f"nothing is captured, so there is no plan: {why}")
            report, graphs = self.report, len(list(self._graphs.kinds()))
            held = report.cache_bytes + report.workspace_bytes
            return plan_for(
                self._body,
                self._ladder,
                self._pool,
                results=report.output_bytes,
                held=held,
                graphs=graphs,
            )

    def close(self) -> None:
        """Gives all memory back. Later calls raise ValueError; closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._end()

    def _end(self) -> None:
        with self._alone():
            self._closed = True
            if self._graphs is not None:
                self._graphs.forget_graphs()
            self._graphs = self._body = None
            if self._pool is not None:
                self._pool.retire()
                self._pool.close()

    def __enter__(self) -> PrefillRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    _closed = False

    @property
    def _cache(self) -> KVCache | None:
        return self._body.cache if self._body else None

    @contextlib.contextmanager
    def _alone(self, hands_out: bool = True) -> Iterator[None]:
        """One call at a time, after the device work of the one before it, without gradients or
        autocast, outside of inference mode, whose tensors could not be written later."""
        with self._lock, torch.inference_mode(False), torch.no_grad(), self._plainly():
            if self._closed:
                raise ValueError("this prefill runner is closed: make another")
            with self._place.entered(self.report.mode != "eager", hands_out):
                yield

    def _plainly(self) -> AbstractContextManager[Any]:
        """Without autocast; nothing to do where there is none, which is quicker."""
        kind = self._model.device.type
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
        return contextlib.nullcontext()

    def _hidden(self, opened: Prompts, keep: bool = True) -> list[torch.Tensor]:
        """Hidden states of every prompt's own tokens, `[tokens, hidden]` each. What nobody is going
        to `keep` is cached only if it takes several passes."""
        if self._body is None:
            return [self._own(prompt) for prompt in opened.prompts]
        cache, largest = self._cache, self._ladder.largest
        lengths = [len(prompt.ids) for prompt in opened.prompts]
        if cache is not None and (keep or sum(lengths) > largest):
            opened.take_pages(cache, self._guests, self._place.catch_up)
        passes = cut(lengths, largest, cache is not None)
        parts: list[list[torch.Tensor]] = [[] for _ in opened.prompts]
        for pieces in passes:
            requests = [opened.prompts[piece.prompt].request(piece, cache) for piece in pieces]
            packed = self._pass(requests).split([request.length for request in requests])
            for piece, states in zip(pieces, packed, strict=True):
                parts[piece.prompt].append(states)
        return [self._place.joined(states) for states in parts]

    def _pass(self, requests: Sequence[Request]) -> torch.Tensor:
        """One forward pass: hidden states `[tokens, hidden]`, a copy."""
        body, report = self._body, self.report
        assert body is not None
        tokens = sum(request.length for request in requests)
        rows = self._ladder.rows(tokens)
        report.tokens += tokens
        report.padding += rows - tokens
        why = self._why_eager(requests, tokens)
        if why is None:
            hidden = self._replayed(requests, rows, tokens)
            if not isinstance(hidden, str):
                return hidden
            why = hidden
        report.eager(why)
        return self._place.taken_out(body.eager(body.pack(requests, rows))[:tokens])

    def _replayed(self, requests: Sequence[Request], rows: int, tokens: int) -> torch.Tensor | str:
        """The same by a graph, or why by none."""
        graphs, paged = self._graphs, any(request.prefix for request in requests)
        assert graphs is not None
        for _ in range(2):
            found = graphs.get(rows, paged)
            if isinstance(found, str):
                return found
            hidden = self._launched(found, requests, tokens)
            if hidden is None:
                graphs.pool.retire()
                graphs.pool.warm()
                return "memory was lacking for a graph"
            if graphs.hold():
                graphs.count(found, paged)
                return hidden
        return "the model changes while it runs"

    def _launched(
        self, found: Captured, requests: Sequence[Request], tokens: int
    ) -> torch.Tensor | None:
        """Hidden states by a graph, a copy; None if memory is lacking: that of the graphs may be
        what is. Not over several ranks, of which others may have been through: there it raises."""
        try:
            found.replay(requests)
            return self._place.taken_out(found.output[:tokens])
        except torch.OutOfMemoryError:
            if self._model.ranks > 1:
                raise
            return None

    def _why_eager(self, requests: Sequence[Request], tokens: int) -> str | None:
        """Why no graph fits, in words that do not differ from call to call."""
        if self._graphs is None:
            return self._eager_because
        if tokens > self._ladder.largest:
            return f"more tokens than max_tokens={self._ladder.largest}"
        if self.report.mode == "full":
            assert self._body is not None
            if len(requests) > self._max_requests:
                return f"more requests than max_requests={self._max_requests}"
            keys = sum(request.length + request.prefix for request in requests)
            if keys > self._body.kv_bound and self._body.cache is not None:
                return f"more keys than max_tokens + cache_tokens={self._body.kv_bound}"
        return None

    def _opened(
        self,
        prompts: Sequence[Sequence[int]],
        prefix: Handle | Sequence[Handle | None] | None = None,
    ) -> Prompts:
        opened = open_prompts(self._model, prompts, prefix, self._cache)
        if self._body is not None:
            self._check_lengths(opened)
        return opened

    def _check_lengths(self, opened: Prompts) -> None:
        cached, limit = self._cache is not None, self._model.position_limit
        for i, prompt in enumerate(opened.prompts):
            new, whole = len(prompt.ids), len(prompt.ids) + prompt.cached
            if not cached and new > self._ladder.largest:
                raise ValueError(
                    f"prompt {i} has {new} tokens, max_tokens={self._ladder.largest}: raise it, or "
                    "set cache_tokens= to run long prompts in chunks"
                )
            if limit is not None and whole > limit:
                raise ValueError(f"prompt {i} has {whole} tokens, the model takes {limit}")

    def _own(self, prompt: Prompt) -> torch.Tensor:
        self.report.own_passes += 1
        self.report.tokens += len(prompt.ids)
        return self._model.own(torch.tensor(prompt.ids, device=self._model.device))

    def _score(self, ids: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        following = torch.tensor(ids[1:], device=hidden.device)
        parts = [
            self._model.head(rows).float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            for rows, tokens in zip(
                hidden[:-1].split(HEAD_ROWS), following.split(HEAD_ROWS), strict=True
            )
            if len(tokens)
        ]
        return torch.cat(parts).cpu() if parts else torch.empty(0, device=HOST)

    def _planned_pieces(self) -> tuple[int, ...]:
        """By the plan, in bytes; none if something is captured already, and over several ranks:
        each has its own memory. Raises ValueError if the plan needs more than there is."""
        if self.report.captures or self._model.ranks > 1:
            return ()
        plan = self.plan()
        if not plan.fits:
            raise ValueError(
                f"capturing to max_tokens={plan.max_tokens} takes about {plan.needed:,} bytes, "
                f"{plan.free:,} are free: lower max_tokens="
            )
        return plan.pieces


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, SupportsIndex):
            raise ValueError(f"{name}={size!r}: a whole number")
    if sizes["max_requests"] < 1:
        raise ValueError(f"max_requests={sizes['max_requests']}: there is at least one slot")
    if sizes["cache_tokens"] < 0:
        cached = f"cache_tokens={sizes['cache_tokens']}"
        raise ValueError(f"{cached}: a number of tokens, 0 for no cache")


def _weights_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, tied ones as often as they are there. In a third of the time that
    torch's own walks take: with a prefix it lies before the launch."""
    modules: dict[nn.Module, None] = {module: None}
    level = [module]
    while level:
        below = [m for parent in level for m in parent._modules.values() if m is not None]
        level = [m for m in dict.fromkeys(below) if m not in modules]
        modules.update(dict.fromkeys(level))
    boxes = (box for m in modules for box in (m._parameters, m._buffers) if box)
    return [x for box in boxes for x in box.values() if x is not None]
