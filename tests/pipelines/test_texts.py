from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.pipelines.errors import BadInput
from accel.pipelines.language_loading import Speaker
from accel.pipelines.loading import Placement
from accel.pipelines.texts import Text, batches, read_texts, tokenized

Encode = Callable[[str], list[int]]


def _speaker(encode: Encode, entries: int = 100, positions: int | None = None) -> Speaker:
    def tokenizer(prompt: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=encode(prompt))

    model = torch.nn.Embedding(entries, 2)
    model.get_input_embeddings = lambda: model
    text = SimpleNamespace(max_position_embeddings=positions)
    model.config = SimpleNamespace(get_text_config=lambda: text)
    return Speaker("m", model, tokenizer, Placement(torch.device("cpu"), torch.float32))


def test_prompts_come_as_arguments_from_a_file_or_from_stdin(
    tmp_path: Path, piped: Callable[[str], None]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two \n", encoding="utf-8")
    assert read_texts(["one", "two"], None) == ["one", "two"]
    assert read_texts([], str(file)) == ["one", "two"]
    for arguments, name in (([], "-"), (["-"], None)):
        piped("one\ntwo\n")
        assert read_texts(arguments, name) == ["one", "two"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no prompt: give one in quotes, or a file of them as --prompts"),
        ([""], "the prompt is empty"),
        (["a", " \n"], "prompt 2 of 2 is empty"),
        (["\udcff"], "holds bytes that are no UTF-8"),
    ],
)
def test_nothing_to_read_is_told(arguments: list[str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_texts(arguments, None)


def test_texts_keep_prompt_and_ids() -> None:
    speaker = _speaker(lambda prompt: [len(word) for word in prompt.split()])
    assert tokenized(speaker, ["a bb", "ccc"], 2) == [Text("a bb", [1, 2]), Text("ccc", [3])]


@pytest.mark.parametrize(
    ("ids", "positions", "words"),
    [
        ([], None, "the prompt has no token: --model m leaves nothing of it"),
        ([1] * 9, None, "the prompt has 9 tokens, the limit is 8: --max-tokens raises it"),
        ([1] * 9, 5, "the prompt has 9 tokens, and --model m takes 5 at most"),
        ([3, 100], None, "holds token 100, but the model knows 100: the tokenizer in --model m"),
    ],
)
def test_what_the_model_cannot_take_is_told(
    ids: list[int], positions: int | None, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        tokenized(_speaker(lambda prompt: ids, positions=positions), ["x"], 8)


def test_a_tokenizer_that_fails_is_named() -> None:
    def fail(prompt: str) -> list[int]:
        raise KeyError("no such piece")

    with pytest.raises(BadInput, match="--model m: its tokenizer cannot read a prompt: "):
        tokenized(_speaker(fail), ["x"], 8)


@given(
    st.lists(st.integers(1, 40), max_size=30),
    st.integers(40, 100),
    st.integers(1, 5),
)
def test_batches_hold_all_texts_in_order_and_fit(
    lengths: list[int], tokens: int, requests: int
) -> None:
    texts = [Text(str(index), [0] * length) for index, length in enumerate(lengths)]
    made = batches(texts, tokens, requests)
    assert [text for batch in made for text in batch] == texts
    for batch in made:
        assert 1 <= len(batch) <= requests
        assert sum(len(text.ids) for text in batch) <= tokens
    for batch, after in pairwise(made):  # no batch could have taken one more
        full = sum(len(text.ids) for text in [*batch, after[0]]) > tokens
        assert full or len(batch) == requests
