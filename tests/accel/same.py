"""Equality as this project means it: the same bytes, laid out alike, in the same containers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def assert_same(result: Any, expected: Any, place: str = "result") -> None:
    """Fails, naming the place, unless both are the same down to strides and the last bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(result, torch.Tensor), f"{place} is a {type(result).__name__}"
        for fact in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(result, fact) == getattr(expected, fact), f"{place}: {fact}"
        assert result.stride() == expected.stride(), f"{place}: strides"
        assert equal_bytes(result, expected), f"{place}: {result} is not {expected}"
        return
    assert type(result) is type(expected), f"{place} is a {type(result).__name__}"
    if isinstance(expected, torch.Generator):
        assert torch.equal(result.get_state(), expected.get_state()), place
        return
    if isinstance(expected, (list, tuple)):
        assert len(result) == len(expected), f"{place}: length"
        for i, pair in enumerate(zip(result, expected, strict=True)):
            assert_same(*pair, f"{place}[{i}]")
    elif isinstance(expected, dict):
        assert list(result) == list(expected), f"{place}: keys"
        for key in expected:
            assert_same(result[key], expected[key], f"{place}[{key!r}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            name = field.name
            assert_same(getattr(result, name), getattr(expected, name), f"{place}.{name}")
    elif type(expected).__eq__ is object.__eq__ and hasattr(expected, "__dict__"):
        assert vars(result) == vars(expected), place
    else:
        assert result == expected, f"{place}: {result!r} is not {expected!r}"


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes: NaN equals itself, -0 is
    not 0."""
    if one.layout is not torch.strided:
        return torch.equal(one.to_dense(), other.to_dense())
    laid = [x.detach().cpu().clone(memory_format=torch.contiguous_format) for x in (one, other)]
    return torch.equal(*(x.view(-1).view(torch.uint8) for x in laid))
