"""The ladder of buckets, and how calls are cut into passes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.prefill.buckets import Ladder
from accel.prefill.passes import cut, fitting

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=8)


@given(st.integers(1, 20_000))
def test_the_ceiling_is_a_bucket(max_tokens: int) -> None:
    sizes = Ladder(max_tokens).sizes
    assert sizes[-1] == max_tokens
    assert list(sizes) == sorted(set(sizes))
    assert all(b <= 1.5 * a or b <= 192 for a, b in pairwise(sizes))


@given(st.integers(1, 8192))
def test_a_bucket_holds_its_tokens_with_little_padding(tokens: int) -> None:
    bucket = Ladder(8192).bucket(tokens)
    assert bucket is not None and bucket >= tokens
    assert tokens <= 1024 or bucket <= 1.125 * tokens
    assert tokens <= 4096 or bucket <= 1.125 * tokens


def test_sizes_can_be_given() -> None:
    assert Ladder(100, [10, 50]).sizes == (10, 50, 100)


@pytest.mark.parametrize("sizes", [[], [0], [101]])
def test_sizes_outside_the_range_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"buckets=.*max_tokens=100"):
        Ladder(100, sizes)


@given(lengths, st.integers(1, 100))
def test_chunks_cover_every_prompt_in_order(lengths: list[int], max_tokens: int) -> None:
    passes = cut(lengths, max_tokens, cached=True)
    assert all(sum(p.stop - p.start for p in one) <= max_tokens for one in passes)
    for prompt, length in enumerate(lengths):
        mine = [[p for p in one if p.prompt == prompt] for one in passes]
        assert all(len(pieces) <= 1 for pieces in mine)
        edges = [(pieces[0].start, pieces[0].stop) for pieces in mine if pieces]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
        assert edges[-1][1] == length


@given(lengths, st.integers(300, 600), st.integers(1, 4))
def test_groups_fit_one_pass(lengths: list[int], max_tokens: int, max_requests: int) -> None:
    groups = fitting(lengths, max_tokens, max_requests)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= max_tokens for group in groups)
    assert all(1 <= len(group) <= max_requests for group in groups)
