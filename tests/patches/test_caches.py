"""Caches among a call's arguments: those that are read are arguments, those that are filled are
the caller's own."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVCache,
    Flux2KVParallelSelfAttnProcessor,
)
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor, nn

import accel
from accel.backend import Backend
from accel.patches import caches
from accel.pipelines.tiny import FAMILIES
from accel.reporting import PartReport
from accel.signature import Uncapturable, map_tree, signature
from tests.accel.same import assert_same

FILLS = "the forward fills its QwenImage21KVCache"


def moved(tree: Any, device: torch.device | str) -> Any:
    return map_tree(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


class Twins:
    """A family twice, plain and patched, called alike; each has caches of its own."""

    def __init__(self, name: str, device: torch.device, make_cache: Callable[[], Any]) -> None:
        self.family, self.device, self.make_cache = FAMILIES[name], device, make_cache
        self.eager_on = "cpu" if device.type == "sim" else device
        self.plain = self.family.make(seed=0).to(self.eager_on)
        self.patched = accel.patch(self.family.make(seed=0).to(device), capture="always")
        self.new_caches()

    def new_caches(self) -> None:
        self.caches = self.make_cache(), self.make_cache()

    def call(self, seed: int, variant: int = 0, prompt: int = 0, **options: Any) -> None:
        """Latents of `seed` and everything else of `prompt`; fails unless both give the same."""
        inputs, own = self.family.inputs(prompt, variant), self.family.inputs(seed, variant)
        inputs.update(hidden_states=own["hidden_states"], timestep=own["timestep"])
        results = []
        places = (self.plain, self.eager_on), (self.patched, self.device)
        for (model, place), cache in zip(places, self.caches, strict=True):
            given = {k: cache if x is ... else x for k, x in options.items()}
            with torch.no_grad():
                results.append(moved(model(**{**moved(inputs, place), **given}), "cpu"))
        assert_same(results[1], results[0])

    @property
    def report(self) -> PartReport:
        return accel.report(self.patched)["module"]


@pytest.fixture
def qwen(device: torch.device) -> Twins:
    return Twins("qwenimage21", device, lambda: QwenImage21KVCache(2))


def picture(twins: Twins, prompt: int, variant: int = 0, steps: int = 3) -> None:
    """What the pipeline does: the first step fills the cache, the others read it."""
    twins.new_caches()
    twins.call(10 * prompt, variant, prompt, kv_cache=..., kv_cache_mode="extract")
    for step in range(1, steps):
        twins.call(10 * prompt + step, variant, prompt, kv_cache=..., kv_cache_mode="cached")


class TestACacheThatTheFirstStepFills:
    def test_is_read_by_replays_of_the_others(self, qwen: Twins) -> None:
        picture(qwen, prompt=1)
        replays = qwen.report.replays
        picture(qwen, prompt=2)  # another prompt, in another cache
        picture(qwen, prompt=3)
        assert qwen.report.captures == 1, qwen.report
        assert qwen.report.replays >= replays + 4, qwen.report

    def test_of_another_size_is_another_recording(self, qwen: Twins) -> None:
        for variant in (0, 1, 0):
            picture(qwen, prompt=1 + variant, variant=variant)
        assert qwen.report.captures == 2, qwen.report

    def test_is_filled_for_the_caller_as_ever(self, qwen: Twins) -> None:
        for prompt in (1, 2, 3):
            picture(qwen, prompt)
            plain, patched = (cache.layer_caches for cache in qwen.caches)
            for ours, theirs in zip(patched, plain, strict=True):
                assert_same(ours.k.cpu(), theirs.k.cpu())
                assert_same(ours.v.cpu(), theirs.v.cpu())
        assert qwen.report.reasons[FILLS] >= 1, qwen.report

    def test_may_change_in_place(self, qwen: Twins) -> None:
        picture(qwen, prompt=1)
        for cache in qwen.caches:
            cache.layer_caches[0].v.mul_(2)
        replays = qwen.report.replays
        qwen.call(7, prompt=1, kv_cache=..., kv_cache_mode="cached")
        assert qwen.report.replays == replays + 1

    def test_is_not_kept_by_recordings(self, qwen: Twins) -> None:
        picture(qwen, prompt=1)
        assert qwen.report.captures == 1
        held = [weakref.ref(cache) for cache in qwen.caches]
        tensors = [weakref.ref(cache.layer_caches[0].k) for cache in qwen.caches]
        qwen.new_caches()
        gc.collect()
        assert [ref() for ref in held + tensors] == [None] * 4


class TestACacheOfGlmImage:
    def test_that_stays_empty_is_as_good_as_none(self, device: torch.device) -> None:
        twins = Twins("glm_image", device, lambda: GlmImageKVCache(2))
        for seed in range(4):
            twins.call(seed, kv_caches=...)
        assert (twins.report.captures, twins.report.replays) == (1, 2)

    def test_of_pictures_to_edit_is_read_and_skipped(self, device: torch.device) -> None:
        twins = Twins("glm_image", device, lambda: GlmImageKVCache(2))
        for cache in twins.caches:
            cache.set_mode("write")
        twins.call(1, kv_caches=...)
        for step in range(4):
            for mode in ("read", "skip"):
                for cache in twins.caches:
                    cache.set_mode(mode)
                twins.call(step, kv_caches=...)
        assert (twins.report.captures, twins.report.replays) == (2, 4), twins.report


class TestACacheThatTheFirstStepReturns:
    """FLUX.2 klein with reference pictures."""

    def step(self, twins: Twins, seed: int, **options: Any) -> None:
        results = []
        for i, (model, place) in enumerate(
            ((twins.plain, twins.eager_on), (twins.patched, twins.device))
        ):
            given = {k: twins.caches[i] if x is ... else x for k, x in options.items()}
            inputs = moved(twins.family.inputs(seed, 0), place)
            with torch.no_grad():
                picture, *cache = model(**{**inputs, "return_dict": False}, **given)
            results.append(picture.cpu())
            if cache:
                twins.caches = (*twins.caches[:i], cache[0], *twins.caches[i + 1 :])
        assert_same(results[1], results[0])

    def test_is_read_by_replays_of_the_others(self, device: torch.device) -> None:
        twins = Twins("flux2", device, lambda: None)
        for model in (twins.plain, twins.patched):
            for block in model.transformer_blocks:
                block.attn.set_processor(Flux2KVAttnProcessor())
            for block in model.single_transformer_blocks:
                block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
        for picture in range(3):
            self.step(twins, 10 * picture, kv_cache_mode="extract", num_ref_tokens=2)
            for step in (1, 2, 3):
                self.step(twins, 10 * picture + step, kv_cache=..., kv_cache_mode="cached")
        assert twins.report.captures == 1, twins.report
        assert twins.report.replays == 7, twins.report


class TestContents:
    def test_a_copy_lacks_the_object(self) -> None:
        cache = Flux2KVCache(1, 1)
        contents = caches.Contents(cache)
        assert contents.original() is cache
        assert copy.copy(contents).original() is None
        assert copy.copy(contents) == contents

    def test_what_is_rebuilt_is_independent(self) -> None:
        cache = Flux2KVCache(1, 1)
        cache.double_block_caches[0].k_ref = k = torch.ones(1)
        like = caches.Contents(cache).rebuilt()
        assert type(like) is Flux2KVCache
        assert like.double_block_caches[0].k_ref is k
        like.single_block_caches.append(None)
        like.double_block_caches[0].clear()
        assert len(cache.single_block_caches) == 1
        assert cache.double_block_caches[0].k_ref is k

    def test_objects_of_others_stay_objects(self) -> None:
        class OwnCache:
            pass

        for thing in (OwnCache(), nn.Linear(1, 1), torch.ones(1), [1], None, GlmImageKVCache):
            assert caches.opened((thing,), {"x": thing}) == ((thing,), {"x": thing})

    def test_an_object_in_itself_is_left_whole(self, backend: Backend) -> None:
        cache = Flux2KVCache(0, 0)
        cache.double_block_caches.append(cache)
        _, kwargs = caches.opened((), {"kv_cache": cache})
        with pytest.raises(Uncapturable, match="is a Flux2KVCache, whose contents may change"):
            signature(((), kwargs), backend)
