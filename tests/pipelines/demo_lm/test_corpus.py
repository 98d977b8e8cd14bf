from itertools import islice
from random import Random

import pytest

from accel.pipelines.demo_lm.corpus import (
    KEPT_BACK,
    held_out_captions,
    is_held_out,
    shuffled,
    training_captions,
)


def test_no_seed_trains_on_what_another_holds_out() -> None:
    shown = {text for seed in range(4) for text in islice(training_captions(seed), 2000)}
    kept = {text for seed in range(4) for text in islice(held_out_captions(seed), 200)}
    assert len(shown) > 5000 and len(kept) > 600
    assert not shown & kept


def test_a_small_share_is_held_out() -> None:
    texts = [*islice(training_captions(0), 1000), *islice(held_out_captions(0), 1000)]
    assert sum(map(is_held_out, texts)) == 1000
    letters = [f"a {number} circle" for number in range(4000)]
    assert sum(map(is_held_out, letters)) == pytest.approx(4000 / KEPT_BACK, rel=0.3)


def test_a_seed_gives_the_same_captions_again() -> None:
    one, again, other = (list(islice(held_out_captions(seed), 20)) for seed in (3, 3, 4))
    assert one == again != other


def test_shuffling_moves_words_and_keeps_them() -> None:
    text = "a red circle on a blue background"
    for seed in range(20):
        other = shuffled(text, Random(seed))
        assert other != text
        assert sorted(other.split()) == sorted(text.split())


@pytest.mark.parametrize("text", ["circle", "red red", ""])
def test_words_with_one_order_cannot_be_shuffled(text: str) -> None:
    with pytest.raises(ValueError, match="have one order only"):
        shuffled(text, Random(0))
