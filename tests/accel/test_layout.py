"""How tensors lie in memory: repetitions, alignment, buffers laid out like others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel.backend import Backend
from accel.layout import bytes_of, distinct, like_in_memory, misalignment, overlaps


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.arange(16.0).view(4, 4).to(device)


def test_overlaps() -> None:
    x = torch.arange(24.0)
    assert not overlaps(x.view(2, 3, 4).permute(2, 0, 1))
    assert not overlaps(x[::3])
    assert overlaps(x.as_strided((3, 3), (1, 1)))
    assert overlaps(x.as_strided((2, 4), (3, 1)))


def test_distinct_cuts_repetitions() -> None:
    x = torch.arange(3.0).expand(5, 3)
    assert distinct(x).shape == (1, 3)
    assert distinct(torch.ones(2, 3)).shape == (2, 3)


def test_misalignment(x: Tensor, backend: Backend) -> None:
    flat = x.flatten()
    assert [misalignment(flat[i : i + 4], backend) for i in (0, 1, 2, 4)] == [0, 4, 8, 0]
    assert misalignment(flat[1:2], backend) == 0


def test_a_buffer_like_another_is_laid_out_like_it(x: Tensor, backend: Backend) -> None:
    for like in (x.t(), x[:, 1:], x[0].expand(2, 4), x[:0], x.flatten()[1:], x[0, 0]):
        made = like_in_memory(like, backend)
        assert (made.shape, made.stride(), made.dtype) == (
            like.shape,
            like.stride(),
            like.dtype,
        )
        assert misalignment(made, backend) == misalignment(like, backend)
        assert made._base is None


def test_bytes_tell_zeros_and_nans_apart() -> None:
    one, other = bytes_of(torch.tensor([0.0])), bytes_of(torch.tensor([-0.0]))
    assert not torch.equal(one, other)
    nan = torch.tensor([float("nan")])
    assert torch.equal(bytes_of(nan), bytes_of(nan.clone()))
    assert torch.equal(bytes_of(torch.ones(2, 2).t()), bytes_of(torch.ones(2, 2)))
