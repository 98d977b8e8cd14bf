"""Text encoders as diffusers pipelines call them: recorded and equal to the plain one bit for bit.

Masks of ones, padded on either side, and none: transformers builds another mask for each, and asks
the device which it is. What a recording assumed of it must hold in every replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from tests.patches.encoders import (
    ENCODERS,
    IMAGE,
    VISION_END,
    VISION_START,
    BothEncoders,
    ids_of,
    tensors,
)

MakeBoth = Callable[..., BothEncoders]
Mask = Callable[[int, int, int], Tensor | None]


def padded(seed: int, batch: int, tokens: int) -> Tensor:
    """A mask with padding on the right, in each row as much as the seed says."""
    real = torch.tensor([[tokens - 1 - (seed + 2 * row) % (tokens // 2)] for row in range(batch)])
    return (torch.arange(tokens) < real).long()


def padded_left(seed: int, batch: int, tokens: int) -> Tensor:
    return padded(seed, batch, tokens).flip(1)


MASKS: dict[str, tuple[int, Mask]] = {
    "none": (0, lambda seed, batch, tokens: None),
    "ones": (1, lambda seed, batch, tokens: torch.ones(batch, tokens, dtype=torch.long)),
    "right": (2, padded),
    "left": (2, padded_left),
}
"""Kinds of masks: which of an encoder's `reads` is meant, and how one is made."""

CASES = [
    (name, mask)
    for name, encoder in ENCODERS.items()
    for mask, (place, _) in MASKS.items()
    if encoder.reads[place] is not None
]
MASKED = [name for name, encoder in ENCODERS.items() if encoder.reads[2] is not None]
WITH_CACHE = [name for name in ENCODERS if not name.startswith(("clip", "t5", "umt5"))]


@pytest.fixture(autouse=True)
def _models_see_recordings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers asks of CUDA, the simulated device answers."""
    if device.type == "sim":
        answer = torch.get_device_module(device).is_current_stream_capturing
        monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", answer)


@pytest.fixture
def encoders(device: torch.device) -> MakeBoth:
    """Makes an encoder twice, plain and in a patched pipeline: `encoders("clip")`."""
    return lambda name, **options: BothEncoders(ENCODERS[name], device, **options)


class HostReads(TorchDispatchMode):
    """Counts how often Python is told a number that a tensor holds."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "mask"), CASES)
def test_fresh_prompts_are_replayed(name: str, mask: str, encoders: MakeBoth) -> None:
    both, (place, make) = encoders(name), MASKS[mask]
    seen = [both(ids_of(seed), make(seed, 2, 11)) for seed in range(5)]
    assert both.counts() == (1, 3, 1)
    assert not any(torch.equal(x[0], y[0]) for x, y in itertools.pairwise(seen))
    (graph,) = both.report.graphs
    most = both.encoder.reads[place]
    assert most is not None and len(graph.breaks) <= most, graph.breaks
    args, kwargs = both.encoder.call(ids_of(4), make(4, 2, 11))
    if name in WITH_CACHE:  # without one, transformers also looks for packed prompts
        kwargs["use_cache"] = False
    with HostReads() as reads:  # type: ignore[no-untyped-call]
        both.output(both.plain, both.eager_on, args, kwargs)
    assert len(graph.breaks) == reads.count, "the recording built another mask than the plain one"
    assert all("masking_utils.py" in b.where and b.guarded for b in graph.breaks), graph.breaks


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_other_values_is_followed(name: str, encoders: MakeBoth) -> None:
    """One shape, one text: nothing but the mask's values tells the calls apart."""
    both, ids = encoders(name), ids_of(0)
    ones, right, left = (make(1, 2, 11) for _, make in list(MASKS.values())[1:])
    more = padded(4, 2, 11)
    masks = [ones, ones, ones, right, more, left, ones, right, more, left, ones, left]
    seen = {id(mask): both(ids, mask) for mask in masks}
    for one, other in itertools.combinations(seen.values(), 2):
        assert not all(map(torch.equal, one, other)), "a wrong mask would not show"
    captures, replays, eager = both.counts()
    assert captures <= 2 and eager <= 2 and replays >= len(masks) - 4, both.report
    reasons = set(both.report.reasons) - {"first call of the module"}
    assert all("_local_scalar_dense returned False" in reason for reason in reasons), reasons


@pytest.mark.parametrize("name", MASKED)
def test_ids_and_masks_changed_in_place_are_followed(name: str, encoders: MakeBoth) -> None:
    both, ids, mask = encoders(name), ids_of(0), padded(0, 2, 11)
    on = {}
    for device in {both.eager_on, both.device}:
        on[device] = both.encoder.call(ids.to(device), mask.to(device))
    seen = []
    for seed in range(6):
        results = {}
        fresh = both.encoder.call(ids_of(seed), padded_left(seed, 2, 11))
        for model, device in ((both.plain, both.eager_on), (both.patched, both.device)):
            for old, new in zip(tensors(on[device]), tensors(fresh), strict=True):
                if old._base is None:  # positions are a view that repeats itself
                    old.copy_(new)
            with torch.no_grad():
                output = model(*on[device][0], **on[device][1])
            results[device, model] = both.encoder.take(output)
        expected, result = (tensors(x) for x in results.values())
        assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(expected, result, strict=True))
        seen.append(expected[0].clone())
    assert not any(torch.equal(x, y) for x, y in itertools.pairwise(seen))
    assert both.report.replays >= 3


@pytest.mark.parametrize("name", ENCODERS)
def test_other_lengths_and_batches_are_recordings_of_their_own(
    name: str, encoders: MakeBoth
) -> None:
    both = encoders(name)
    shapes = [(2, 11), (1, 11), (2, 7), (1, 7)]
    for turn in range(3):
        for number, (batch, tokens) in enumerate(shapes):
            seed = 4 * turn + number
            both(ids_of(seed, batch, tokens), padded(seed, batch, tokens))
    assert both.counts() == (4, 4, 4)
    assert both.report.guard_misses == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ENCODERS)
def test_half_precision_is_equal_too(name: str, dtype: torch.dtype, encoders: MakeBoth) -> None:
    both = encoders(name, dtype=dtype)
    for seed in range(4):
        both(ids_of(seed), padded(seed, 2, 11))
    assert both.counts() == (1, 2, 1)


@pytest.mark.parametrize("name", ENCODERS)
def test_unpatched_it_is_what_it_was(name: str, encoders: MakeBoth) -> None:
    both = encoders(name)
    for seed in range(3):
        both(ids_of(seed), padded(seed, 2, 11))
    assert "forward" in vars(both.patched)
    accel.unpatch(both.pipe)
    assert "forward" not in vars(both.patched)
    call = both.encoder.call(ids_of(9), padded(9, 2, 11))
    both.called(*call)
    outputs = [both.output(both.plain, both.eager_on, *call)]
    outputs.append(both.output(both.patched, both.device, *call))
    assert list(outputs[0]) == list(outputs[1])
    assert [type(x) for x in outputs[0].values()] == [type(x) for x in outputs[1].values()]


@pytest.mark.parametrize("name", WITH_CACHE)
def test_a_cache_is_made_for_those_only_who_ask_for_it(name: str, encoders: MakeBoth) -> None:
    both = encoders(name)
    args, kwargs = both.encoder.call(ids_of(0), padded(0, 2, 11))
    left_unset = {key: x for key, x in kwargs.items() if key != "use_cache"}
    for _ in range(3):
        both.called(args, left_unset)
    assert both.counts() == (1, 1, 1)
    unread = both.output(both.patched, both.device, args, left_unset)
    asked = both.output(both.patched, both.device, args, {**kwargs, "use_cache": True})
    both.called(args, {**kwargs, "use_cache": True})
    assert unread.past_key_values is None
    assert type(asked.past_key_values).__name__ == "DynamicCache"
    why = both.report.reasons
    assert any("returns a DynamicCache" in reason for reason in why), why


@pytest.mark.parametrize("name", ["mistral3", "qwen25_vl", "gemma3"])
def test_a_prompt_made_longer_by_its_encoder_runs_eagerly(name: str, encoders: MakeBoth) -> None:
    """FLUX.2's upsampling of captions: the model writes, with a cache, then encodes."""
    both, mask = encoders(name), padded_left(0, 2, 7)
    written = []
    for model, device in ((both.plain, both.eager_on), (both.patched, both.device)):
        asked = {"input_ids": ids_of(0, 2, 7).to(device), "attention_mask": mask.to(device)}
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        written.append(model.generate(**asked, **options, use_cache=True).cpu())  # type: ignore[operator]
    assert torch.equal(*written)
    assert both.counts()[:2] == (0, 0)
    assert any("a DynamicCache, whose contents may change" in x for x in both.report.reasons)
    for seed in range(3):
        both(ids_of(seed), padded_left(seed, 2, 11))
    assert both.report.replays >= 1


def with_pictures(seed: int) -> dict[str, Tensor]:
    """Two prompts with a picture of 4x4 patches, that is four tokens, in each."""
    ids, draw = ids_of(seed, 2, 13), torch.Generator().manual_seed(seed)
    for row in range(2):
        ids[row, 1 + row : 7 + row] = torch.tensor([VISION_START, *[IMAGE] * 4, VISION_END])
    return {
        "input_ids": ids,
        "attention_mask": padded(0, 2, 13),
        "pixel_values": torch.randn(32, 3 * 2 * 14 * 14, generator=draw),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }


def test_a_picture_to_edit_is_followed(encoders: MakeBoth) -> None:
    """Qwen-Image's editing: what lies where is asked of the device a dozen times."""
    both = encoders("qwen25_vl")
    seen = [
        both.called((), {**with_pictures(seed), "output_hidden_states": True}) for seed in range(4)
    ]
    assert not any(torch.equal(x[0], y[0]) for x, y in itertools.pairwise(seen))
    assert both.counts() == (1, 2, 1)


def test_a_picture_whose_tokens_are_marked_runs_eagerly(encoders: MakeBoth) -> None:
    """The model then keeps where its pictures are, anew in every call."""
    both = encoders("qwen25_vl")
    for seed in range(4):
        call = with_pictures(seed)
        marks = (call["input_ids"] == IMAGE).int()
        both.called((), {**call, "mm_token_type_ids": marks, "output_hidden_states": True})
    assert both.counts() == (0, 0, 4)
    assert both.report.declined is not None
