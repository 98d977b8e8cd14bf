"""How tensors lie in memory: repetitions, alignment, buffers laid out like others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel.backend import Backend
from accel.layout import bytes_of, distinct, laid_out, like_in_memory, misalignment, overlaps, span


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


def test_a_span_counts_gaps_but_neither_repetitions_nor_empty_tensors() -> None:
    x = torch.arange(24.0).view(4, 6)
    assert span(x) == 24
    assert span(x[1:3, 2:4]) == 8
    assert span(x.t()[::5]) == 24
    assert span(x[0, :3].expand(7, 3)) == 3
    assert span(x[0, 0]) == 1
    assert [span(x[:0]), span(x[:, :0]), span(torch.empty(0))] == [0, 0, 0]


def test_what_is_laid_out_is_read_and_written_where_it_lies(x: Tensor) -> None:
    storage = x.untyped_storage()
    column = laid_out(x[:2, 0], storage, 5)
    assert column.tolist() == [5.0, 9.0]
    column += 100
    assert (x[1, 1].item(), x[2, 1].item()) == (105.0, 109.0)
    assert laid_out(x[0, 3:].expand(3), storage, 2).tolist() == [2.0, 2.0, 2.0]
    assert column._base is None


def test_nothing_lies_before_the_memory_begins_and_an_empty_tensor_needs_none(
    device: torch.device,
) -> None:
    storage = torch.arange(4.0).to(device).untyped_storage()
    size = storage.nbytes()
    like = torch.empty(2, device=device)
    with pytest.raises(RuntimeError, match="offset -1"):
        laid_out(like, storage, -1)
    assert laid_out(like, storage, 2).tolist() == [2.0, 3.0]
    assert laid_out(like.new_empty(3, 0), storage, 4).shape == (3, 0)
    assert storage.nbytes() == size


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
