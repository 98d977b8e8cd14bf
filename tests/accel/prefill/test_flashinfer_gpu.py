"""The real FlashInfer against attention written out, in breaks and in graphs.

Compiles the kernels that are missing, once, before the first test: minutes on a new machine.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from accel.prefill.attention import Attention, AttentionGroup, AttentionLayer, Room
from accel.prefill.batch import Batch, Buffers, Request, pack
from accel.prefill.flashinfer_attention import FlashInferBackend
from accel.prefill.flashinfer_kernels import Kernel, compile_kernels, kernel_for
from accel.prefill.kv_cache import KVCache
from tests.accel.prefill import attending
from tests.accel.prefill.attending import RAGGED, WITH_PREFIX, Trial
from tests.accel.prefill.flashinfer_double import half_model
from tests.accel.prefill.tiny import prompts_of

MISSING = importlib.util.find_spec("flashinfer") is None or not torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(MISSING, reason="needs a GPU and flashinfer"),
    pytest.mark.timeout(1200),
]
BF16, FP16 = torch.bfloat16, torch.float16
OF_128 = AttentionGroup(
    heads=8, kv_heads=2, head_dim=128, value_dim=128, scale=128**-0.5, dtype=BF16
)
GROUPS: dict[str, AttentionGroup] = {
    "plain": OF_128,
    "sinks": replace(OF_128, sinks=True),
    "half": replace(OF_128, dtype=FP16),
    "window": replace(OF_128, window=7),
    "window of one": replace(OF_128, window=1),
    "of 64": replace(OF_128, head_dim=64, value_dim=64, sinks=True, window=40),
    "of 256": replace(OF_128, head_dim=256, value_dim=256, softcap=5.0, window=33),
    "latent": replace(OF_128, kv_heads=8, head_dim=192),
}
LONG = [[(700, 0), (1, 0), (323, 0)], [(1024, 0)], [(1, 0)] * 60]
LONG_WITH_PREFIX = [[(500, 1000), (1, 333), (129, 0)], [(1, 1700), (1, 1)]]
ROWS, SLOTS, KEYS = 1024, 64, 4096
MODES = ("eager", "breakable", "full")


def backend_of(generation: str) -> FlashInferBackend:
    backend = FlashInferBackend(torch.device("cuda:0"))
    backend.generation = generation if generation == "fa2" else backend.generation
    return backend


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    backend = backend_of("newest")
    of_64 = replace(OF_128, head_dim=64, value_dim=64)  # what the tiny model runs
    kernels: list[Kernel] = [kernel_for(group, "fa2") for group in (OF_128, GROUPS["window"])]
    for group in (*GROUPS.values(), of_64, replace(of_64, window=5)):
        kernels.append(kernel_for(group, backend.generation))
    compile_kernels(list(dict.fromkeys(kernels)), at_once=2)


@pytest.fixture(autouse=True)
def _room_for_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "KV_BOUND", KEYS)


def tolerance(dtype: torch.dtype) -> float:
    return 3e-2 if dtype == BF16 else 5e-3


def cases(paged: bool) -> list[tuple[str, list[tuple[int, int]]]]:
    """Names of groups, each with small and long batches."""
    batches: Sequence[Any] = [*RAGGED, *LONG]
    if paged:
        batches = [*WITH_PREFIX, *LONG_WITH_PREFIX]
    return [(name, list(b)) for name in GROUPS if not paged or name != "latent" for b in batches]


@pytest.mark.parametrize("name, requests", [*cases(paged=False), *cases(paged=True)])
def test_as_written_out(name: str, requests: list[tuple[int, int]]) -> None:
    group = GROUPS[name]
    trial = Trial(backend_of("newest"), group, torch.device("cuda:0"), bucket=ROWS)
    assert trial.run(requests) < tolerance(group.dtype)


@pytest.mark.parametrize("name", ["plain", "sinks", "window"])
@pytest.mark.parametrize("requests", [*RAGGED, *LONG, *WITH_PREFIX, *LONG_WITH_PREFIX])
def test_older_kernels_as_written_out(name: str, requests: list[tuple[int, int]]) -> None:
    trial = Trial(backend_of("fa2"), GROUPS[name], torch.device("cuda:0"), bucket=ROWS)
    assert trial.run(requests) < tolerance(BF16)


class Graph:
    """One captured attention call, and the same call in breaks."""

    def __init__(self, generation: str, group: AttentionGroup, paged: bool) -> None:
        self.device, self.paged, self.group = torch.device("cuda:0"), paged, group
        shape = group.kv_heads, group.head_dim, group.value_dim
        self.cache = KVCache([shape], KEYS, BF16, self.device)
        for stored in (self.cache.keys(0), self.cache.values(0)):
            stored.normal_()
        backend = backend_of(generation)
        self.in_breaks = backend.attention(self._room(static=False))
        self.in_graph = backend.attention(self._room(static=True))
        shapes = (group.heads, group.head_dim), (group.kv_heads, group.head_dim)
        q, k = (torch.randn(ROWS, *shape, dtype=BF16, device="cuda") for shape in shapes)
        v = torch.randn(ROWS, group.kv_heads, group.value_dim, dtype=BF16, device="cuda")
        self.q, self.k, self.v = q, k, v
        self.layer = AttentionLayer(0, group, None)
        if group.sinks:
            sinks = torch.randn(group.heads, device="cuda")
            self.layer = replace(self.layer, sinks=sinks)
        pages = KEYS // self.cache.page_size + SLOTS
        self.buffers = Buffers.new(ROWS, self.device, SLOTS, pages, KEYS if paged else 0)
        self.out = torch.empty(ROWS, group.heads, group.value_dim, dtype=BF16, device="cuda")
        self._capture()

    def _room(self, static: bool) -> Room:
        return Room(
            self.device, (self.group,), ROWS, SLOTS, KEYS, static, static and self.paged, self.cache
        )

    def _capture(self) -> None:
        self._run(self.in_breaks, self._batch([(ROWS, 0)], static=False), self.out)
        prefix = KEYS - ROWS if self.paged else 0
        self.in_graph.plan(self._batch([(ROWS, prefix)], static=True))
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.in_graph.run(self.layer, self.q, self.k, self.v, self.out)

    def _batch(self, requests: Sequence[tuple[int, int]], static: bool) -> Batch:
        made, first = [], 0
        for n, prefix in requests:
            pages = -(-(n + prefix) // self.cache.page_size)
            made.append(Request((1,) * n, prefix, tuple(range(first, first + pages))))
            first += pages
        return pack(
            made,
            ROWS,
            self.device,
            slots=SLOTS if static else None,
            cache=self.cache,
            paged=self.paged,
            kv_bound=KEYS,
            into=self.buffers if static else None,
        )

    def _run(self, attention: Attention, batch: Batch, out: torch.Tensor) -> torch.Tensor:
        attention.plan(batch)
        attention.run(self.layer, self.q, self.k, self.v, out)
        return out[: batch.tokens].clone()

    def broken(self, requests: Sequence[tuple[int, int]]) -> torch.Tensor:
        """What a break computes, without waiting for it."""
        out = torch.full_like(self.out, math.nan)
        return self._run(self.in_breaks, self._batch(requests, static=False), out)

    def replayed(self, requests: Sequence[tuple[int, int]]) -> torch.Tensor:
        """What the graph computes, without waiting for it."""
        self.out.fill_(math.nan)
        batch = self._batch(requests, static=True)
        self.in_graph.plan(batch)
        self.graph.replay()
        return self.out[: batch.tokens].clone()


def batches_for(paged: bool) -> list[list[tuple[int, int]]]:
    prefixes = [*WITH_PREFIX, *LONG_WITH_PREFIX] if paged else []
    batches = [*RAGGED, *LONG, *prefixes, *RAGGED, *LONG]
    return [list(batch) for batch in batches]


@pytest.mark.parametrize("generation", ["newest", "fa2"])
@pytest.mark.parametrize("name", ["plain", "sinks", "window"])
@pytest.mark.parametrize("paged", [False, True])
def test_a_graph_follows_later_plans(generation: str, name: str, paged: bool) -> None:
    graph = Graph(generation, GROUPS[name], paged)
    exact = backend_of(generation).generation == "fa3"
    for requests in batches_for(paged):
        replayed, broken = graph.replayed(requests), graph.broken(requests)
        assert replayed.isfinite().all()
        if exact:
            assert torch.equal(replayed, broken)
        assert (replayed.float() - broken.float()).abs().max() < tolerance(BF16)


@pytest.mark.parametrize("paged", [False, True])
def test_plans_in_quick_succession_do_not_mix(paged: bool) -> None:
    graph = Graph("newest", GROUPS["plain"], paged)
    batches = batches_for(paged)
    expected = [graph.broken(requests).cpu() for requests in batches]
    for run in (graph.broken, graph.replayed):
        results = [run(requests) for _ in range(8) for requests in batches]
        torch.cuda.synchronize()
        for got, wanted in zip(results, expected * 8, strict=True):
            assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("cached", [0, 2048])
def test_modes_agree_bit_for_bit(
    cached: int, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    model = half_model(monkeypatch, torch.device("cuda:0"), BF16)
    if backend_of("newest").generation != "fa3":
        pytest.skip("fa2 splits keys otherwise in graphs")
    runners = [
        make(model, mode=mode, attention="flashinfer", cache_tokens=cached) for mode in MODES
    ]
    reference = make(model, mode="eager", attention="reference", cache_tokens=cached)
    for runner in runners:
        assert (runner.report.declined, runner.report.attention) == (None, "flashinfer")
    lengths = [(1,), (65, 3), (100, 27, 64, 65), (5, 1), (256,), (1, 1, 1, 1)]
    for batch in [*lengths, *([(300, 17), (500,)] if cached else [])]:
        prompts = prompts_of(*batch)
        expected = reference(prompts).logits
        results = [runner(prompts).logits for runner in runners]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert (results[0] - expected).abs().max() < 0.1 * expected.abs().max()
    assert all(runner.report.replays and not runner.report.reasons for runner in runners[1:])


def test_it_is_taken_by_itself(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    model = half_model(monkeypatch, torch.device("cuda:0"), BF16)
    assert make(model, attention="auto").report.attention == "flashinfer"
