"""Modules that several objects share, copies, and what is left when an object goes."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline
from torch import nn

import accel
from accel.backend import Backend
from accel.pipelines import tiny
from tests.patches.pair import draw

SMALL = {"height": 16, "width": 16, "num_inference_steps": 2}
MIB = 1 << 20


@pytest.fixture
def plain() -> Any:
    """What the others are compared with: on the CPU, whose bits the simulated device's are."""
    return tiny.pipeline("sd15")


@pytest.fixture
def expected(plain: Any, device: torch.device) -> Callable[[int], np.ndarray]:
    plain.to("cpu" if device.type == "sim" else device)
    return lambda seed: text_picture(plain, seed)


@pytest.fixture
def pipe(device: torch.device) -> Iterator[Any]:
    """A patched tiny pipeline."""
    made = accel.patch(new(device), capture="always")
    yield made
    accel.unpatch(made)


def new(device: torch.device, seed: int = 0) -> Any:
    made = tiny.pipeline("sd15", seed).to(device)
    made.set_progress_bar_config(disable=True)
    return made


def text_picture(pipe: Any, seed: int) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    return draw(pipe, "sd15", seed, **SMALL)


def image_picture(pipe: Any, seed: int) -> np.ndarray:
    """What an image-to-image pipeline makes of a picture of noise."""
    pipe.set_progress_bar_config(disable=True)
    return np.asarray(
        pipe(
            "a cat",
            image=torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
            generator=torch.Generator().manual_seed(seed),
            num_inference_steps=4,
            output_type="np",
        )[0]
    )


def unets_part(obj: Any) -> Any:
    return accel.report(obj)["unet"]


class TestFromPipe:
    @pytest.fixture
    def other(self, pipe: Any) -> Any:
        return AutoPipelineForImage2Image.from_pipe(pipe)

    @pytest.fixture
    def draws_right(
        self, plain: Any, expected: Callable[[int], np.ndarray], pipe: Any, other: Any
    ) -> Callable[..., None]:
        """Draws with both, one after the other, and compares."""
        plain_other = AutoPipelineForImage2Image.from_pipe(plain)

        def both(count: int = 2, first: Any = pipe, second: Any = other) -> None:
            for seed in range(count):
                assert np.array_equal(text_picture(first, seed), expected(seed))
                drawn = image_picture(second, seed)
                assert np.array_equal(drawn, image_picture(plain_other, seed))

        return both

    def test_with_one_that_is_not_patched(self, pipe: Any, draws_right: Any) -> None:
        draws_right(3)
        replays = unets_part(pipe).replays
        assert replays > 6
        accel.unpatch(pipe)
        draws_right(1)

    @pytest.mark.parametrize("options", [{}, {"memory_limit": "1GiB"}])
    def test_with_one_that_is_patched_too(
        self, options: dict[str, Any], pipe: Any, other: Any, draws_right: Any
    ) -> None:
        draws_right(1)
        accel.patch(other, capture="always", **options)
        draws_right(3)
        for patched in (pipe, other):
            assert unets_part(patched).replays > 3
            assert accel.report(patched).pool_bytes > 0
        if options:
            assert accel.report(other).memory_limit == accel.report(pipe).memory_limit == 1 << 30

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_taken_off_in_any_order(
        self, order: tuple[int, int], pipe: Any, other: Any, draws_right: Any
    ) -> None:
        accel.patch(other, capture="always", memory_limit="1GiB")
        draws_right()
        two = (pipe, other)
        accel.unpatch(two[order[0]])
        draws_right(3)
        assert unets_part(two[order[1]]).replays > 0
        accel.unpatch(two[order[1]])
        assert "forward" not in vars(pipe.unet)
        assert "decode" not in vars(pipe.vae)
        draws_right(1)

    def test_the_first_goes_the_second_stays_patched(
        self, device: torch.device, plain: Any
    ) -> None:
        first = accel.patch(new(device), capture="always")
        second = accel.patch(AutoPipelineForImage2Image.from_pipe(first), capture="always")
        image_picture(second, 0)
        del first
        plain_second = AutoPipelineForImage2Image.from_pipe(plain.to(_eager_on(device)))
        for seed in range(3):
            assert np.array_equal(image_picture(second, seed), image_picture(plain_second, seed))
        assert unets_part(second).replays > 0

    def test_what_outlives_the_patched_one_is_plain(self, device: torch.device) -> None:
        first = accel.patch(new(device), capture="always")
        second = AutoPipelineForImage2Image.from_pipe(first)
        del first
        assert "forward" not in vars(second.unet)
        image_picture(second, 0)

    def test_a_component_assigned_to_the_second_is_found(
        self, device: torch.device, pipe: Any, other: Any
    ) -> None:
        accel.patch(other, capture="always")
        image_picture(other, 0)
        other.unet = new(device, seed=3).unet
        for seed in range(3):
            image_picture(other, seed)
        assert unets_part(other).replays > 0
        assert "forward" in vars(pipe.unet)


def _eager_on(device: torch.device) -> Any:
    return "cpu" if device.type == "sim" else device


class TestCopies:
    def test_a_deep_copy_is_plain_and_the_original_stays_patched(
        self, pipe: Any, expected: Callable[[int], np.ndarray]
    ) -> None:
        for seed in range(2):
            text_picture(pipe, seed)
        copied = copy.deepcopy(pipe)
        with pytest.raises(ValueError, match="is not patched"):
            accel.report(copied)
        before = unets_part(pipe).replays, unets_part(pipe).eager_calls
        for seed in range(2):
            assert np.array_equal(text_picture(copied, seed), expected(seed))
        assert (unets_part(pipe).replays, unets_part(pipe).eager_calls) == before
        assert copied.unet.forward.__self__ is copied.unet
        assert type(copied.scheduler) is copied.scheduler.__class__
        assert np.array_equal(text_picture(pipe, 3), expected(3))
        assert unets_part(pipe).replays > before[0]

    def test_a_deep_copy_can_be_patched(
        self, pipe: Any, expected: Callable[[int], np.ndarray]
    ) -> None:
        text_picture(pipe, 0)
        copied = accel.patch(copy.deepcopy(pipe), capture="always")
        for seed in range(3):
            assert np.array_equal(text_picture(copied, seed), expected(seed))
            assert np.array_equal(text_picture(pipe, seed), expected(seed))
        assert unets_part(copied).replays > 0
        accel.unpatch(copied)
        assert "forward" not in vars(copied.unet)
        assert "forward" in vars(pipe.unet)

    def test_with_other_weights_the_copy_draws_other_pictures(self, pipe: Any) -> None:
        first = [text_picture(pipe, seed) for seed in (0, 0)][-1]
        copied = copy.deepcopy(pipe)
        with torch.no_grad():
            copied.unet.conv_out.weight.mul_(2)
        assert not np.array_equal(text_picture(copied, 0), first)
        assert np.array_equal(text_picture(pipe, 0), first)

    def test_a_pickled_module_is_plain(
        self, pipe: Any, expected: Callable[[int], np.ndarray]
    ) -> None:
        text_picture(pipe, 0)
        loaded = pickle.loads(pickle.dumps(pipe.unet))
        assert loaded.forward.__self__ is loaded
        file = io.BytesIO()
        torch.save(pipe.vae, file)
        file.seek(0)
        pipe.unet, pipe.vae = loaded, torch.load(file, weights_only=False)
        for seed in range(3):
            assert np.array_equal(text_picture(pipe, seed), expected(seed))
        assert unets_part(pipe).replays > 0

    def test_a_saved_pipeline_is_plain(
        self, pipe: Any, expected: Callable[[int], np.ndarray], tmp_path: Path, device: torch.device
    ) -> None:
        text_picture(pipe, 0)
        pipe.save_pretrained(tmp_path)
        loaded = DiffusionPipeline.from_pretrained(tmp_path).to(device)
        assert "forward" not in vars(loaded.unet)
        assert type(loaded.scheduler) is type(tiny.pipeline("sd15").scheduler)
        for seed in range(2):
            assert np.array_equal(text_picture(loaded, seed), expected(seed))
            assert np.array_equal(text_picture(pipe, seed), expected(seed))


class TestGone:
    """What is left of memory when a pipeline, or a part of it, is let go."""

    @pytest.fixture(autouse=True)
    def _no_collector(self) -> Iterator[None]:
        """A cycle would keep gigabytes until the collector happens to come by."""
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @staticmethod
    def reserved(backend: Backend, device: torch.device) -> int:
        backend.empty_cache()
        return backend.reserved_bytes(device)

    def test_a_deleted_pipeline_leaves_nothing(
        self, device: torch.device, backend: Backend
    ) -> None:
        first = accel.patch(new(device), capture="always")
        for seed in range(2):  # math libraries make scratch memory, once and for all pools to come
            text_picture(first, seed)
        del first
        before = self.reserved(backend, device)
        pipe = accel.patch(new(device), capture="always")
        for seed in range(3):
            text_picture(pipe, seed)
        assert accel.report(pipe).pool_bytes > 0
        parts = [c for c in pipe.components.values() if isinstance(c, nn.Module)]
        alive = [weakref.ref(x) for x in (pipe, pipe.scheduler, *parts)]
        assert self.reserved(backend, device) > before
        del pipe, parts
        assert [ref() for ref in alive] == [None] * len(alive)
        assert self.reserved(backend, device) - before < MIB

    def test_a_replaced_component_is_let_go_at_the_next_call(
        self, device: torch.device, pipe: Any, expected: Callable[[int], np.ndarray]
    ) -> None:
        for seed in range(3):
            text_picture(pipe, seed)
        old = weakref.ref(pipe.unet)
        pipe.unet = new(device).unet
        for seed in range(3):
            assert np.array_equal(text_picture(pipe, seed), expected(seed))
        assert old() is None
        assert unets_part(pipe).replays > 0

    def test_a_component_taken_out_is_plain_at_the_next_call(
        self, device: torch.device, pipe: Any, expected: Callable[[int], np.ndarray]
    ) -> None:
        old = pipe.unet
        for turn in range(2):
            pipe.unet = new(device).unet
            text_picture(pipe, 0)
            assert "forward" not in vars(old)
            pipe.unet = old
            for seed in range(3):
                assert np.array_equal(text_picture(pipe, seed), expected(seed)), turn
            assert unets_part(pipe).replays > 0

    def test_unpatched_pools_are_empty(
        self, device: torch.device, backend: Backend, pipe: Any
    ) -> None:
        text_picture(pipe, 0)
        before = self.reserved(backend, device)
        for _ in range(3):
            accel.unpatch(pipe)
            accel.patch(pipe, capture="always")
            for seed in range(3):
                text_picture(pipe, seed)
        accel.unpatch(pipe)
        assert self.reserved(backend, device) - before < MIB


class TestComponents:
    """A component patched by itself, and with its pipeline."""

    @pytest.mark.parametrize("name", ["unet", "text_encoder", "vae"])
    @pytest.mark.parametrize("order", list(itertools.permutations((0, 1))))
    def test_patched_and_taken_off_in_any_order(
        self,
        name: str,
        order: tuple[int, int],
        device: torch.device,
        expected: Callable[[int], np.ndarray],
    ) -> None:
        pipe = new(device)
        component = getattr(pipe, name)
        objects = (component, pipe)
        for first in (0, 1):
            accel.patch(objects[first], capture="always")
            accel.patch(objects[1 - first], capture="always")
            for seed in range(3):
                assert np.array_equal(text_picture(pipe, seed), expected(seed))
            assert accel.report(pipe)[name].replays > 0
            assert [part.name for part in accel.report(component).parts] == ["module"]
            for which in order:
                accel.unpatch(objects[which])
                for seed in range(2):
                    assert np.array_equal(text_picture(pipe, seed), expected(seed))
            assert not {"forward", "decode"} & set(vars(component))

    def test_a_text_encoder_alone_returns_its_cache_again(self, device: torch.device) -> None:
        """In a pipeline nobody reads it, and the patch asks for none."""
        pipe = tiny.pipeline("zimage").to(device)
        encoder, ids = pipe.text_encoder, torch.tensor([[1, 2, 3]], device=device)
        with torch.no_grad():
            kinds = type(encoder(ids).past_key_values)
            assert kinds is not type(None)
            accel.patch(encoder, capture="always")
            accel.patch(pipe, capture="always")
            accel.unpatch(pipe)
            for _ in range(3):
                assert type(encoder(ids).past_key_values) is kinds

    def test_the_last_patch_decides_the_options(
        self, pipe: Any, expected: Callable[[int], np.ndarray]
    ) -> None:
        text_picture(pipe, 0)
        accel.patch(pipe.unet, capture="always", memory_limit="1GiB")
        for seed in range(3):
            assert np.array_equal(text_picture(pipe, seed), expected(seed))
        assert accel.report(pipe.unet).memory_limit == 1 << 30
        assert unets_part(pipe).replays > 0
        accel.unpatch(pipe.unet)
        for seed in range(3):
            assert np.array_equal(text_picture(pipe, seed), expected(seed))
        assert unets_part(pipe).replays > 0

    def test_patched_again_with_other_options(
        self, pipe: Any, expected: Callable[[int], np.ndarray]
    ) -> None:
        for options in ({"vae": False}, {"text_encoder": False}, {"memory_limit": 10**9}, {}):
            accel.patch(pipe, capture="always", **options)
            for seed in range(3):
                assert np.array_equal(text_picture(pipe, seed), expected(seed))
            names = {part.name for part in accel.report(pipe).parts}
            assert names == {"unet", "vae", "text_encoder"} - set(options)
            assert unets_part(pipe).replays > 0
