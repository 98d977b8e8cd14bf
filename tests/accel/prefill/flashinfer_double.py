"""A stand-in for the package `flashinfer`: its two wrappers, its events, its compiled modules.

Strict where the real one fails or, worse, does not: tensors on the wrong side, dtypes, rows that do
not fit the plan, a pinned buffer written while it is still being copied. Attends in plain torch,
from the buffers that a plan filled, so that a captured call follows later plans.
"""

from __future__ import annotations

import math
import shutil
import sys
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.prefill import flashinfer_attention
from accel.prefill.flashinfer_attention import Gpu
from tests.accel.prefill import tiny

PROCESSORS = 4


@dataclass
class Double:
    """The stand-in, and what was done with it."""

    wrappers: list[Wrapper] = field(default_factory=list)
    in_flight: set[Wrapper] = field(default_factory=set)
    """Wrappers whose plan may still be on its way from the pinned buffer."""
    waits: int = 0
    prebuilt: bool = True
    built: list[str] = field(default_factory=list)
    folder: Path = Path()

    def event_now(self, device: torch.device) -> Event:
        """What stands for an event at the end of a stream."""
        return Event(self, frozenset(self.in_flight))


@dataclass(frozen=True)
class Event:
    """Knows which copies came before it."""

    double: Double
    before: frozenset[Wrapper]

    def synchronize(self) -> None:
        """Those copies are done."""
        self.double.waits += 1
        self.double.in_flight -= self.before


class Wrapper:
    """What both of FlashInfer's wrappers have in common."""

    double: Double
    paged: bool
    buffer_names: tuple[str, ...]

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
        **buffers: torch.Tensor,
    ) -> None:
        assert backend in ("fa2", "fa3") and kv_layout == "NHD"
        assert sorted(buffers) == (sorted(self.buffer_names) if use_cuda_graph else [])
        self.device, self.graph, self.generation = (
            float_workspace_buffer.device,
            use_cuda_graph,
            backend,
        )
        self.float_bytes, self.plan_bytes = float_workspace_buffer.numel(), 8 << 20
        self.buffers = buffers
        assert all(x.dtype == torch.int32 and x.device == self.device for x in buffers.values())
        self.most_rows: int | None = None
        self.options: dict[str, Any] = {}
        self.runs = self.plans = 0
        self.double.wrappers.append(self)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert float_workspace_buffer.device == int_workspace_buffer.device == self.device
        assert self not in self.double.in_flight, "a pinned buffer is dropped while it is copied"
        self.float_bytes, self.plan_bytes = (
            float_workspace_buffer.numel(),
            int_workspace_buffer.numel(),
        )

    def _plan(self, tables: dict[str, torch.Tensor], **options: Any) -> None:
        assert self not in self.double.in_flight, "a pinned buffer is written while it is copied"
        for name, table in tables.items():
            assert table.dtype == torch.int32, name
            on_device = name == "paged_kv_indices_buf"
            assert table.device == (self.device if on_device else torch.device("cpu")), name
        slots, rows = len(tables["qo_indptr_buf"]) - 1, int(tables["qo_indptr_buf"][-1])
        if self.graph:
            self.most_rows = self.most_rows or rows
            assert rows <= self.most_rows
            assert slots == len(self.buffers["qo_indptr_buf"]) - 1
            for name, table in tables.items():
                self.buffers[name][: len(table)].copy_(table, non_blocking=True)
        else:
            self.buffers = {name: table.to(self.device) for name, table in tables.items()}
        assert options["q_data_type"] == options["kv_data_type"] == options["o_data_type"]
        self.rows, self.options, self.plans = rows, options, self.plans + 1
        self.double.in_flight.add(self)

    def _run(
        self,
        q: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        return_lse: bool,
    ) -> Any:
        assert q.size(0) == out.size(0) == self.rows, "rows that were not planned"
        assert q.dtype == out.dtype == self.options["q_data_type"]
        for x in (q, *keys[:2]):
            assert x.stride(-1) == 1 and x.stride(0) % 8 == x.stride(1) % 8 == 0
            assert x.shape[1] in (self.options["num_qo_heads"], self.options["num_kv_heads"])
        result, log_sum = self._attend(q, *keys)
        last = self.buffers["qo_indptr_buf"][-1]
        written = (torch.arange(len(q), device=q.device) < last)[:, None]
        out.copy_(torch.where(written[..., None], result, math.nan))
        log_sum = torch.where(written, log_sum, math.nan)
        self.runs += 1
        return (out, log_sum) if return_lse else out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        holder: torch.Tensor,
        place: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`holder` and `place`: whose key it is, and where in that request; holder -1: nobody's."""
        options = self.options
        starts = self.buffers["qo_indptr_buf"].long()
        row = torch.arange(len(q), device=q.device)
        owner = torch.bucketize(row, starts[1:], right=True).clamp(max=len(starts) - 2)
        lengths = self._key_lengths()
        ends = lengths[owner] - (starts[owner + 1] - starts[owner])
        behind = (ends + row - starts[owner])[:, None] - place[None, :]
        seen = (owner[:, None] == holder[None, :]) & (behind >= 0)
        if options["window_left"] >= 0:
            seen &= behind <= options["window_left"]
        shared = options["num_qo_heads"] // options["num_kv_heads"]
        keys, values = (x.float().repeat_interleave(shared, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * options["sm_scale"]
        if (cap := options["logits_soft_cap"] or 0.0) > 0:
            scores = torch.tanh(scores / cap) * cap
        scores = scores.masked_fill(~seen, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        log_sum = scores.logsumexp(-1).t() / math.log(2)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype), log_sum

    def _key_lengths(self) -> torch.Tensor:
        raise NotImplementedError


class Ragged(Wrapper):
    """Keys lie packed as the queries do."""

    paged = False
    buffer_names = ("qo_indptr_buf", "kv_indptr_buf")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        **options: Any,
    ) -> None:
        self._plan(
            {"qo_indptr_buf": qo_indptr, "kv_indptr_buf": kv_indptr},
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            **options,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor,
        return_lse: bool = False,
    ) -> Any:
        ends = self.buffers["kv_indptr_buf"].long()
        key = torch.arange(len(k), device=k.device)
        holder = torch.bucketize(key, ends[1:], right=True)
        place = key - ends[holder.clamp(max=len(ends) - 2)]
        return self._run(q, (k, v, holder, place), out, return_lse)

    def _key_lengths(self) -> torch.Tensor:
        return self.buffers["kv_indptr_buf"].long().diff()


class Paged(Wrapper):
    """Keys lie in pages; the number of keys follows from the pages and the last one's length."""

    paged = True
    buffer_names = (
        "qo_indptr_buf",
        "paged_kv_indptr_buf",
        "paged_kv_indices_buf",
        "paged_kv_last_page_len_buf",
    )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        self._plan(
            dict(zip(self.buffer_names, tables, strict=True)),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            page_size=page_size,
            **options,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        return_lse: bool = False,
    ) -> Any:
        pages, size = self.buffers["paged_kv_indices_buf"].long(), self.options["page_size"]
        assert paged_kv_cache[0].shape[1] == size and paged_kv_cache[0].is_contiguous()
        k, v = (x[pages].flatten(0, 1) for x in paged_kv_cache)
        starts = self.buffers["paged_kv_indptr_buf"].long()
        key = torch.arange(len(k), device=k.device)
        holder = torch.bucketize(key // size, starts[1:], right=True)
        known = holder.clamp(max=len(starts) - 2)
        place = key - starts[known] * size
        holder = torch.where(place < self._key_lengths()[known], holder, -1)
        return self._run(q, (k, v, holder, place), out, return_lse)

    def _key_lengths(self) -> torch.Tensor:
        pages = self.buffers["paged_kv_indptr_buf"].long().diff()
        full = (pages - 1).clamp(min=0) * self.options["page_size"]
        lengths: torch.Tensor = full + self.buffers["paged_kv_last_page_len_buf"].long()
        return lengths


@dataclass
class Spec:
    """What FlashInfer knows of a compiled module."""

    double: Double
    name: str

    @property
    def is_aot(self) -> bool:
        return self.double.prebuilt

    @property
    def build_dir(self) -> Path:
        return self.double.folder / self.name

    @property
    def jit_library_path(self) -> Path:
        return self.build_dir / f"{self.name}.so"

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    def write_ninja(self) -> None:
        self.build_dir.mkdir(parents=True, exist_ok=True)
        self.ninja_path.touch()

    def build(self, verbose: bool) -> None:
        assert not self.double.prebuilt
        if "head_64" in self.name:
            raise RuntimeError(
                "Ninja build failed. Ninja output:\n[1/2] nvcc\nld: cannot find -lcuda\nerror: 1"
            )
        self.write_ninja()
        self.jit_library_path.touch()
        self.double.built.append(self.name)


def install(monkeypatch: pytest.MonkeyPatch, double: Double, generation: str = "fa3") -> None:
    """Puts the stand-in in place of the package, and a GPU of that generation in place of none."""
    ragged, paged = (type(kind.__name__, (kind,), {"double": double}) for kind in (Ragged, Paged))

    def gen_batch_prefill_module(
        backend: str, q: Any, kv: Any, o: Any, index: Any, head: int, value: int, *flags: Any
    ) -> Spec:
        assert q == kv == o and index == torch.int32
        names = [str(q).removeprefix("torch."), f"head_{head}", f"value_{value}", *map(str, flags)]
        return Spec(double, "_".join([backend, *names]))

    modules: dict[str, dict[str, Any]] = {
        "flashinfer": {
            "BatchPrefillWithRaggedKVCacheWrapper": ragged,
            "BatchPrefillWithPagedKVCacheWrapper": paged,
        },
        "flashinfer.jit": {"gen_batch_prefill_module": gen_batch_prefill_module},
        "flashinfer.jit.cpp_ext": {"get_cuda_path": lambda: str(double.folder / "cuda")},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    capability = (9, 0) if generation == "fa3" else (8, 0)
    monkeypatch.setattr(Gpu, "at", lambda device: Gpu(capability, PROCESSORS))
    monkeypatch.setattr(flashinfer_attention, "event_now", double.event_now)
    monkeypatch.setattr(shutil, "which", lambda name: None)


def half_model(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, **options: Any
) -> tiny.TinyModel:
    """The tiny model with heads and numbers as FlashInfer's kernels have them."""
    monkeypatch.setattr(tiny, "DIM", 64)
    model = tiny.TinyModel(device, **options)
    model.module.to(dtype)
    model.dtype = dtype
    for layer in model.module.layers:
        assert isinstance(layer, tiny.Layer)
        layer.group = replace(layer.group, dtype=dtype)
    return model
