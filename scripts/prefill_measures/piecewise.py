"""The compiler's way to the same: pieces between attention calls, compiled and captured.

`torch.compile` of the decoder in mode reduce-overhead, with attention kept out of the compiler, so
that every layer's attention is a graph break. Shapes are dynamic unless asked otherwise: compiled
once, captured once a length, which is the compiler's quickest way up a ladder.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from accel.patches.attention import implementation
from accel.pipelines.machine import synchronize
from prefill_measures.prompts import random_prompts
from prefill_measures.timing import timed

NAME = "accel_piecewise"
CALLS = 2
"""Calls until a length has its graphs: the first compiles or warms up, the second records."""
AFTER, AGAIN = 5, 5.0
MANY = 100_000
"""Pieces are compiled again, and recorded again, for as many lengths as there are."""


class TimeUp(BaseException):
    """The limit was reached. No Exception: the compiler catches those and goes on."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """While open, `TimeUp` is raised in this thread once that much time has passed."""

    def ring(*_: object) -> None:
        raise TimeUp

    handler = signal.signal(signal.SIGALRM, ring)
    # Again and again: what is raised in a destructor is printed and forgotten.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, mask, **more)


@contextlib.contextmanager
def compiled(model: Any, dynamic: bool, backend: str | Callable[..., Any]) -> Iterator[Any]:
    """The decoder of `model`, to be compiled at its first call: token ids in, hidden states out."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(_attend))
    decoder = model.get_decoder()
    # Dynamic shapes make inputs of floats, too, and those lie on the host: no graph takes them.
    tracing: dict[str, Any] = {"recompile_limit": MANY, "accumulated_recompile_limit": MANY}
    tracing["specialize_float"] = True
    mode = "reduce-overhead" if backend == "inductor" else None
    quick = torch.compile(decoder, mode=mode, dynamic=dynamic, backend=backend)

    def run(ids: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # what graphs returned before is not needed
        hidden: torch.Tensor = quick(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-untyped-call]
        return hidden

    torch._dynamo.reset()
    counters.clear()
    with (
        torch.no_grad(),
        implementation(decoder, NAME),
        torch._dynamo.config.patch(tracing),
        torch._inductor.config.patch({"triton.cudagraph_unexpected_rerecord_limit": MANY}),
    ):
        yield run


def compiling(
    model: Any,
    lengths: Sequence[int],
    limit: float,
    *,
    dynamic: bool = True,
    backend: str | Callable[..., Any] = "inductor",
) -> dict[str, Any]:
    """Compiles and captures for `lengths`, the longest first, in at most `limit` seconds; then
    times what came of it. To be run last in a process: a capture that is cut off is left behind."""
    device, done = model.device, []
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = {n: torch.tensor(random_prompts([n], vocabulary, n), device=device) for n in lengths}
    after: dict[int, float] = {}
    begin = time.perf_counter()
    figures: dict[str, Any] = {"shapes": "dynamic" if dynamic else "static", "limit, s": limit}
    try:
        with at_most(limit), compiled(model, dynamic, backend) as run:
            for n in sorted(lengths, reverse=True):
                for _ in range(CALLS):
                    run(ids[n])
                synchronize(device)
                done.append({"tokens": n, "after, s": time.perf_counter() - begin})
            figures["seconds"] = time.perf_counter() - begin
            after = {n: _median(partial(run, ids[n]), device) for n in lengths}
    except TimeUp:
        figures.setdefault("seconds", f"more than {limit:g}")
    except Exception as why:
        figures["failed"] = f"{type(why).__name__}: {why}".partition("\n")[0]
    figures["pieces compiled"] = counters["stats"]["unique_graphs"]
    figures["pieces without a graph"] = counters["inductor"]["cudagraph_skips"]
    return figures | {"lengths done": done, "a forward after it, ms": after}


def _median(run: Callable[[], object], device: torch.device) -> float:
    return statistics.median(timed(run, device)[1] for _ in range(AFTER))
