"""What a run is seen to do: every bit counts, and only the pipeline's own scheduler steps."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import EulerDiscreteScheduler

from accel.patches.witness import (
    Seen,
    Witness,
    _fingerprint,
    distance,
    first_difference,
    host_tensors,
)


def seen(component: str, call: int = 0, inputs: bytes = b"i", outputs: bytes = b"o") -> Seen:
    return Seen(component, call, None, [inputs], [outputs], True, None)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([-0.0, 1.0]),
        torch.tensor([0.0, 1.0], dtype=torch.float64),
        torch.tensor([0.0, 1.0000001]),
    ],
)
def test_every_bit_shape_and_type_counts(other: torch.Tensor) -> None:
    x = torch.tensor([0.0, 1.0])
    assert _fingerprint(x) == _fingerprint(x.clone())
    assert _fingerprint(x) != _fingerprint(other)


def test_values_are_told_apart_by_type() -> None:
    assert _fingerprint(1) != _fingerprint(1.0)
    assert _fingerprint(torch.tensor(1.0).expand(1)) == _fingerprint(torch.tensor([1.0]))


def test_distance_where_there_is_none() -> None:
    one = torch.ones(2)
    assert distance([one], [one]) == (0.0, 0.0)
    assert distance([one], [torch.ones(3)]) == (None, None)
    assert distance([one], [one * torch.nan]) == (None, None)
    assert distance([one * torch.nan], [one * torch.nan]) == (0.0, 0.0)
    assert distance([one * 0], [one]) == (1.0, None)
    assert distance([torch.tensor([True])], [torch.tensor([False])]) == (1.0, 1.0)


def test_the_first_difference_says_how() -> None:
    usual = [seen("a"), seen("b"), seen("output")]
    assert first_difference(usual, list(usual)) is None
    worse = [seen("a"), seen("b", outputs=b"x"), seen("output")]
    found = first_difference(usual, worse)
    assert found is not None and (found[1].component, found[2]) == ("b", "what it returns differs")
    given = first_difference(usual, [seen("a"), seen("b", inputs=b"x"), seen("output")])
    assert given is not None and given[2] == "what it is given already differs"
    fewer = first_difference(usual, [seen("a"), seen("output")])
    assert fewer is not None and fewer[2] == "output is called in its place"


def test_pictures_and_arrays_are_seen_too() -> None:
    from PIL import Image

    picture = Image.new("RGB", (2, 1), (1, 2, 3))
    (found,) = host_tensors({"images": [picture], "flags": [False]})
    assert found.tolist() == [[[1, 2, 3], [1, 2, 3]]]


def test_steps_of_a_copy_of_the_scheduler_are_not_counted() -> None:
    scheduler = EulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    other = copy.deepcopy(scheduler)
    witness, x = Witness([], [scheduler]), torch.zeros(1)
    plain = vars(type(scheduler))["step"]
    with witness.watching(lambda part, usual: usual):
        for one in (scheduler, other, other):
            t = one.timesteps[0 if one.step_index is None else one.step_index]
            one.step(x, t, one.scale_model_input(x, t))
    assert witness._steps == 1
    assert vars(type(scheduler))["step"] is plain


def test_room_is_given_to_the_first_outputs() -> None:
    witness = Witness([], room=12)
    for size in (2, 2, 1):
        witness.finish(torch.ones(size))
    assert [call.kept is not None for call in witness.calls] == [True, False, True]
