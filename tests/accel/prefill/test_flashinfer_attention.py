"""The FlashInfer backend hands its kernels what they need, and attends as written out.

The package is a stand-in here; test_flashinfer_gpu.py has the real one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.prefill import flashinfer_attention
from accel.prefill.attention import AttentionGroup, AttentionLayer, Room, Unsupported
from accel.prefill.batch import Batch, Request, pack
from accel.prefill.choice import choose
from accel.prefill.flashinfer_attention import FlashInferAttention, FlashInferBackend, Gpu
from accel.prefill.kv_cache import KVCache
from accel.prefill.runner import PrefillRunner
from tests.accel.prefill.attending import RAGGED, WITH_PREFIX, Trial
from tests.accel.prefill.flashinfer_double import Double, half_model, install
from tests.accel.prefill.tiny import prompts_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = AttentionGroup(
    heads=4, kv_heads=2, head_dim=64, value_dim=64, scale=0.125, dtype=torch.float16
)
GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "soft-cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 5, "softcap": 3.0, "sinks": True},
}
MODES = ("eager", "breakable", "full")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    """The stand-in, in place of the package."""
    double = Double()
    install(monkeypatch, double)
    return double


def attention_for(
    batch: Batch, cache: KVCache | None = None, **options: Any
) -> FlashInferAttention:
    """An attention for one group, planned."""
    room = Room(CPU, (HALF,), rows=64, slots=4, kv_bound=128, cache=cache, **options)
    attention = FlashInferBackend(CPU).attention(room)
    attention.plan(batch)
    return attention


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("requests", [*RAGGED, *WITH_PREFIX])
def test_ragged_batches_and_prefixes(
    group: str, requests: list[tuple[int, int]], double: Double
) -> None:
    trial = Trial(FlashInferBackend(CPU), replace(HALF, **GROUPS[group]), CPU)
    assert trial.run(requests) < 4e-3
    (used,) = [wrapper for wrapper in double.wrappers if wrapper.runs]
    assert used.paged == any(prefix for _, prefix in requests)


@pytest.mark.parametrize("requests", RAGGED)
@pytest.mark.parametrize("paged", [False, True])
def test_sentinels_and_pages_change_nothing(
    requests: list[tuple[int, int]], paged: bool, double: Double
) -> None:
    trial = Trial(FlashInferBackend(CPU), HALF, CPU, slots=6, static=True)
    assert trial.run(requests, paged=paged) < 4e-3
    (used,) = double.wrappers
    assert used.graph and used.paged == paged


def test_latent_attention_is_ragged_only(double: Double) -> None:
    latent = replace(HALF, kv_heads=4, head_dim=192, value_dim=128)
    backend = FlashInferBackend(CPU)
    assert Trial(backend, latent, CPU).run(RAGGED[1]) < 4e-3
    assert backend.objection(latent, static=True, paged=False) is None
    why = backend.objection(latent, static=False, paged=True)
    assert why == "no pages with values narrower than keys"


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"dtype": torch.float32}, "no float32, only half precision"),
        ({"head_dim": 96, "value_dim": 96}, "no head dimensions 96 and 96, only 64, 128, 256 or"),
        ({"head_dim": 128}, "no head dimensions 128 and 64"),
        ({"heads": 3}, "3 heads cannot share 2 key heads evenly"),
    ],
)
def test_what_it_cannot_do_is_said(changes: dict[str, Any], says: str, double: Double) -> None:
    backend, group = FlashInferBackend(CPU), replace(HALF, **changes)
    assert says in (backend.objection(group, static=False, paged=False) or "")
    with pytest.raises(Unsupported, match=says.partition(",")[0]):
        backend.attention(Room(CPU, (group,), rows=64, slots=4, kv_bound=64))


def test_a_plan_names_every_number(double: Double) -> None:
    group = replace(HALF, window=7, softcap=3.0, dtype=torch.bfloat16)
    room = Room(CPU, (group,), rows=64, slots=4, kv_bound=64)
    FlashInferBackend(CPU).attention(room).plan(pack([Request((1, 2))], 64, CPU))
    assert double.wrappers[0].options == {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "causal": True,
        "window_left": 6,
        "logits_soft_cap": 3.0,
        "sm_scale": 0.125,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
        "o_data_type": torch.bfloat16,
        "non_blocking": True,
    }
    assert double.wrappers[0].generation == "fa3"


def test_planning_again_waits_for_the_plan_before(double: Double) -> None:
    attention = attention_for(pack([Request((1, 2))], 64, CPU))
    assert double.waits == 0
    attention.plan(pack([Request((1,))], 64, CPU))
    assert double.waits == 1
    attention.plan(pack([Request((1, 2))], 64, CPU))
    assert double.waits == 2


def test_the_same_lengths_and_pages_are_planned_once(double: Double) -> None:
    cache = KVCache([(2, 64, 64)], 128, torch.float16, CPU)
    pages = cache.take(2), cache.take(2)
    first, others = Request((1, 2, 3), 20, pages[0]), Request((7, 8, 9), 20, pages[0])
    attention = attention_for(pack([first], 64, CPU, cache=cache), cache)
    [wrapper] = double.wrappers
    attention.plan(pack([others], 64, CPU, cache=cache))
    assert wrapper.plans == 1
    attention.plan(pack([replace(others, pages=pages[1])], 64, CPU, cache=cache))
    assert wrapper.plans == 2
    attention.plan(pack([replace(others, ids=(7, 8))], 64, CPU, cache=cache))
    attention.plan(pack([replace(others, prefix=19)], 64, CPU, cache=cache))
    attention.plan(pack([others, Request((4,), 20, pages[1])], 64, CPU, cache=cache))
    assert wrapper.plans == 5


def test_with_pages_is_another_plan_than_without(double: Double) -> None:
    cache = KVCache([(2, 64, 64)], 128, torch.float16, CPU)
    request = Request((1, 2, 3), 0, cache.take(1))
    attention = attention_for(pack([request], 64, CPU, cache=cache), cache)
    attention.plan(pack([request], 64, CPU, cache=cache, paged=True, kv_bound=64))
    ragged, paged = double.wrappers
    assert (ragged.plans, paged.plans) == (1, 1)


def test_a_failed_plan_is_waited_for_too(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([Request((1, 2))], 64, CPU)
    attention = attention_for(pack([Request((1,))], 64, CPU))
    wrapper = double.wrappers[0]
    plan = wrapper.plan  # type: ignore[attr-defined]

    def copies_and_fails(*tables: Any, **options: Any) -> None:
        plan(*tables, **options)
        raise RuntimeError("out of workspace")

    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "plan", copies_and_fails)
        with pytest.raises(RuntimeError):
            attention.plan(batch)
    assert wrapper in double.in_flight
    attention.plan(batch)  # it did not come about, so it is planned again
    assert (wrapper.plans, double.waits) == (3, 2)


def test_one_plan_per_group_and_batch(double: Double) -> None:
    groups = HALF, replace(HALF, window=4)
    room = Room(CPU, groups, rows=64, slots=4, kv_bound=64)
    attention = FlashInferBackend(CPU).attention(room)
    batch = pack([Request((1, 2, 3))], 64, CPU)
    attention.plan(batch)
    assert [wrapper.options["window_left"] for wrapper in double.wrappers] == [-1, 3]
    q, k = (torch.randn(64, heads, 64).half() for heads in (4, 2))
    for index in range(6):
        layer = AttentionLayer(index, groups[index % 2])
        attention.run(layer, q, k, k, torch.empty_like(q))
    assert [wrapper.runs for wrapper in double.wrappers] == [3, 3]


def test_pages_for_later_tokens_are_no_keys_yet(double: Double) -> None:
    cache = KVCache([(2, 64, 64)], 128, torch.float16, CPU)
    batch = pack([Request((1,) * 20, 4, cache.take(6))], 64, CPU, cache=cache)
    attention_for(batch, cache)
    wrapper = double.wrappers[-1]
    assert wrapper._key_lengths().tolist() == [24]
    assert wrapper.buffers["paged_kv_indices_buf"].tolist() == list(batch.requests[0].pages[:2])


def test_many_requests_and_long_batches_find_room(double: Double) -> None:
    attention = attention_for(pack([Request((1,) * 64)], 64, CPU))
    wrapper = double.wrappers[0]
    before = wrapper.plan_bytes
    attention.plan(pack([Request((1,))] * 300, 320, CPU))
    assert wrapper.plan_bytes > before
    assert attention.workspace_bytes >= wrapper.plan_bytes
    grown = wrapper.plan_bytes
    attention.plan(pack([Request((1,))], 64, CPU))
    assert wrapper.plan_bytes == grown


def test_workspaces_are_small_and_shared(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, double, generation="fa2")
    backend = FlashInferBackend(CPU)
    rooms = [
        Room(CPU, (HALF,), rows, slots=4, kv_bound=rows, static=True) for rows in (512, 128, 64)
    ]
    made = [backend.attention(room) for room in rooms]
    assert len({wrapper.float_bytes for wrapper in double.wrappers}) == 1
    assert sum(attention.workspace_bytes for attention in made) < made[0].workspace_bytes + 2**17
    assert all(wrapper.plan_bytes < 2**17 for wrapper in double.wrappers)


def test_rows_of_any_stride_are_read(double: Double) -> None:
    batch = pack([Request((1, 2, 3))], 64, CPU)
    attention = attention_for(batch)
    q, k = torch.randn(64, 4, 65).half(), torch.randn(64, 1, 64).half()
    out = torch.empty(64, 4, 64).half()
    queries, keys = q[..., 1:], k.expand(64, 2, 64)
    attention.run(AttentionLayer(0, HALF), queries, keys, keys, out)
    expected = torch.empty_like(out)
    attention.run(AttentionLayer(0, HALF), queries.clone(), keys.clone(), keys.clone(), expected)
    assert torch.equal(out[:3], expected[:3])


@pytest.mark.parametrize("cached", [0, 512])
def test_modes_agree_bit_for_bit(
    cached: int, double: Double, sim: torch.device, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    model = half_model(monkeypatch, sim, torch.float16)
    runners = [
        make(model, mode=mode, attention="flashinfer", cache_tokens=cached) for mode in MODES
    ]
    reference = make(model, mode="eager", attention="reference", cache_tokens=cached)
    for runner in runners:
        assert (runner.report.declined, runner.report.attention) == (None, "flashinfer")
    for lengths in ((1,), (65, 3), (100, 27, 64, 65), (5, 1)):
        prompts = prompts_of(*lengths)
        expected = reference(prompts).logits
        results = [runner(prompts).logits for runner in runners]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert torch.allclose(results[0], expected, atol=2e-2)
    assert all(runner.report.replays for runner in runners[1:])


def test_modes_agree_on_prefixes_and_chunks(
    double: Double, sim: torch.device, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    model = half_model(monkeypatch, sim, torch.float16)
    runners: list[PrefillRunner] = [
        make(model, mode=mode, attention=attention, cache_tokens=1024, max_tokens=128)
        for mode, attention in [*((mode, "flashinfer") for mode in MODES), ("eager", "reference")]
    ]
    logits = []
    for runner in runners:
        first = runner(prompts_of(300, 17))
        second = runner(prompts_of(40, 9, 1), prefix=[first.handle(0), first.handle(1), None])
        logits.append(torch.cat([first.logits, second.logits]))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert torch.allclose(logits[0], logits[3], atol=2e-2)
    assert any(wrapper.paged and wrapper.graph for wrapper in double.wrappers)


def test_auto_takes_it_where_nothing_needs_compiling(double: Double) -> None:
    backend, passed = choose("auto", CUDA, [HALF], static=True, paged=True)
    assert (backend.name, passed) == ("flashinfer", [])


@pytest.mark.parametrize("tool", [None, "nvcc"])
def test_auto_passes_over_kernels_that_need_compiling(
    tool: str | None, double: Double, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    double.prebuilt, double.folder = False, tmp_path
    monkeypatch.setattr(flashinfer_attention, "missing_tool", lambda: tool)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    backend, passed = choose("auto", CUDA, [HALF], static=True, paged=True)
    says = {
        None: "compiles a kernel first, a minute or more: `accel doctor --prepare` does it ahead",
        "nvcc": "its kernels must be compiled and nvcc is not installed",
    }
    assert (backend.name, passed) == ("torch", [f"flashinfer: {says[tool]}"])


def test_a_name_compiles_and_says_so_once(
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    double.prebuilt, double.folder = False, tmp_path
    monkeypatch.setattr(flashinfer_attention, "missing_tool", lambda: None)
    backend, _ = choose("flashinfer", CUDA, [HALF], static=False, paged=False)
    room = Room(CPU, (HALF, replace(HALF, window=3), replace(HALF, window=9)), 64, 4, 64)
    with caplog.at_level(logging.WARNING, logger="accel"):
        backend.attention(room)
        backend.attention(room)
    assert [record.getMessage() for record in caplog.records] == [
        "attention='flashinfer' compiles 2 kernels now, a minute or more each: "
        "fa3 float16, head dimension 64; fa3 float16, head dimension 64, window"
    ]


def test_a_name_without_a_compiler_is_refused_in_one_line(
    double: Double, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[..., Any]
) -> None:
    double.prebuilt, double.folder = False, tmp_path
    model = half_model(monkeypatch, CPU, torch.float16)
    says = "attention='flashinfer': its kernels must be compiled and ninja is not"
    with pytest.raises(ValueError, match=says) as caught:
        make(model, attention="flashinfer", mode="eager")
    assert "\n" not in str(caught.value)


def test_the_package_absent_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "at", lambda device: Gpu((9, 0), 132))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(Unsupported, match=r"pip install accel-graph\[flashinfer\]"):
        choose("flashinfer", CUDA, [HALF], static=False, paged=False)


def test_devices_that_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"^FlashInfer needs CUDA, the model is on cpu"):
        choose("flashinfer", CPU, [HALF], static=False, paged=False)
    monkeypatch.setattr(Gpu, "at", lambda device: Gpu((7, 5), 40))
    with pytest.raises(Unsupported, match=r"needs compute capability 8\.0"):
        choose("flashinfer", CUDA, [HALF], static=False, paged=False)
