"""Sizes of memory in words, as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def bytes_from(limit: int | str) -> int:
    """`limit` in bytes; strings are "2GiB", "500 MB" and the like.

    >>> bytes_from("2GiB"), bytes_from(1000)
    (2147483648, 1000)
    >>> bytes_from("lots")
    Traceback (most recent call last):
    ValueError: memory_limit='lots' is no size: give bytes or a string such as "2GiB"
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", str(limit).lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(
            f'memory_limit={limit!r} is no size: give bytes or a string such as "2GiB"'
        )
    return int(float(found[1]) * _UNITS[found[2]])
