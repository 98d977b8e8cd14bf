import math
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from accel.pipelines import answers
from accel.pipelines.demo_lm import demo_lm_folder
from accel.pipelines.language_loading import Speaker
from accel.pipelines.loading import Placement
from accel.pipelines.texts import Text


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    tokenizer = AutoTokenizer.from_pretrained(demo_lm_folder())
    return Speaker("demo", None, tokenizer, Placement(torch.device("cpu"), torch.float32))


def _text(speaker: Speaker, prompt: str) -> Text:
    return Text(prompt, speaker.tokenizer(prompt).input_ids)


def test_the_most_likely_tokens_come_first_and_are_read_as_text(speaker: Speaker) -> None:
    red, blue = (_text(speaker, word).ids[1] for word in ("red", "blue"))
    logits = torch.zeros(768)
    logits[red], logits[blue] = 5.0, 7.0
    found = answers.next_tokens(speaker, _text(speaker, "a"), logits, top=2)
    assert [token["id"] for token in found["next"]] == [blue, red]
    assert [token["token"] for token in found["next"]] == [" blue", " red"]
    total = math.log(math.exp(5) + math.exp(7) + 766)
    assert found["next"][0]["log_probability"] == pytest.approx(7 - total, abs=1e-5)
    assert (found["prompt"], found["tokens"]) == ("a", 2)


def test_no_more_tokens_are_shown_than_there_are(speaker: Speaker) -> None:
    assert len(answers.next_tokens(speaker, _text(speaker, "a"), torch.zeros(3), 9)["next"]) == 3


def test_a_score_is_told_token_by_token(speaker: Speaker) -> None:
    found = answers.score(speaker, _text(speaker, "a red"), torch.tensor([-1.0, -2.5]))
    assert [token["token"] for token in found["scores"]] == ["<|endoftext|>", " a", " red"]
    assert [token["log_probability"] for token in found["scores"]] == [None, -1.0, -2.5]
    assert (found["sum"], found["mean"]) == (-3.5, -1.75)
    assert found["perplexity"] == pytest.approx(math.exp(1.75))


def test_one_token_has_no_mean(speaker: Speaker) -> None:
    found = answers.score(speaker, Text("", [0]), torch.tensor([]))
    assert (found["sum"], found["mean"], found["perplexity"]) == (0, None, None)


def test_letters_of_several_tokens_are_never_lost(speaker: Speaker) -> None:
    ids = _text(speaker, "a 😀 日 red").ids
    pieces = speaker.pieces(ids)
    assert pieces[:2] == ["<|endoftext|>", " a"]
    assert pieces[-1] == " red"
    assert len(pieces) == len(ids)


def test_differences_are_those_of_log_probabilities() -> None:
    one = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])]
    shifted = [row + 7 for row in one]  # the same probabilities
    same: dict[str, Any] = answers.difference(one, shifted, scores=False)
    assert same == {"largest_log_probability": pytest.approx(0, abs=1e-5), "same_next_token": 2}
    turned = [one[0].flip(0), one[1]]
    other = answers.difference(one, turned, scores=False)
    assert other == {"largest_log_probability": pytest.approx(1), "same_next_token": 1}
    assert answers.difference(one, turned, scores=True) == {"largest_log_probability": 1.0}
