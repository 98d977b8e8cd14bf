"""Sizes of memory in words."""

from __future__ import annotations

import pytest

from accel.patches.sizes import bytes_from


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (5, 5),
        ("5", 5),
        ("5 b", 5),
        ("2k", 2000),
        ("2 KiB", 2048),
        ("1.5MB", 1_500_000),
        ("1gib", 1 << 30),
        (" 3 GB ", 3_000_000_000),
    ],
)
def test_sizes(limit: int | str, expected: int) -> None:
    assert bytes_from(limit) == expected


@pytest.mark.parametrize("limit", ["", "lots", "-1", "2 TiB", "GiB", "1..5k", "b", "5i"])
def test_a_size_that_is_none_is_quoted(limit: str) -> None:
    with pytest.raises(ValueError, match=r"memory_limit=.* is no size"):
        bytes_from(limit)
