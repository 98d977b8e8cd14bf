"""Prompts as token ids, and batches of them that a prefill takes in one go.

This module knows tokenizers and limits; what runs the batches is `prefilling`'s matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.pipelines.errors import BadInput, first_line
from accel.pipelines.prompts import read_prompts

if TYPE_CHECKING:
    from accel.pipelines.language_loading import Speaker


@dataclass(frozen=True)
class Text:
    """One prompt: as written, and as the model reads it."""

    prompt: str
    ids: list[int]


def read_texts(arguments: Sequence[str], file: str | None) -> list[str]:
    """The prompts given as arguments, or those in `file`, one a line; `-` is stdin, as `file` or as
    the only argument. Raises `BadInput` where there is none, or an empty one."""
    if list(arguments) == ["-"] and file is None:
        arguments, file = (), "-"
    prompts = read_prompts(arguments, file)
    if not prompts:
        raise BadInput("no prompt: give one in quotes, or a file of them as --prompts (- is stdin)")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise BadInput(f"{_which(number, len(prompts))} is empty: there is nothing to read")
    return prompts


def tokenized(speaker: Speaker, prompts: Sequence[str], max_tokens: int) -> list[Text]:
    """The prompts as the model's tokenizer reads them. Raises `BadInput` for one that has no token,
    more than `max_tokens`, or more than the model has positions for."""
    texts = [Text(prompt, _ids(speaker, prompt)) for prompt in prompts]
    for number, text in enumerate(texts, start=1):
        _refuse_unfit(speaker, text, _which(number, len(texts)), max_tokens)
    return texts


def _ids(speaker: Speaker, prompt: str) -> list[int]:
    try:
        return [int(token) for token in speaker.tokenizer(prompt, verbose=False).input_ids]
    except Exception as error:  # tokenizers in Python raise what they like
        raise BadInput(
            f"--model {speaker.name}: its tokenizer cannot read a prompt: {first_line(error)}"
        ) from error


def _refuse_unfit(speaker: Speaker, text: Text, which: str, max_tokens: int) -> None:
    length, entries = len(text.ids), speaker.model.get_input_embeddings().weight.shape[0]
    if length == 0:
        raise BadInput(f"{which} has no token: --model {speaker.name} leaves nothing of it")
    if not 0 <= min(text.ids) <= max(text.ids) < entries:
        raise BadInput(
            f"{which} holds token {max(text.ids)}, but the model knows {entries}: the tokenizer in "
            f"--model {speaker.name} belongs to another model"
        )
    if speaker.positions is not None and length > speaker.positions:
        raise BadInput(
            f"{which} has {length} tokens, and --model {speaker.name} takes {speaker.positions} at "
            "most: shorten it, or take another model"
        )
    if length > max_tokens:
        raise BadInput(
            f"{which} has {length} tokens, the limit is {max_tokens}: --max-tokens raises it"
        )


def _which(number: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {number} of {count}"


def batches(texts: Sequence[Text], max_tokens: int, max_requests: int) -> list[list[Text]]:
    """The texts in order, in batches of at most `max_tokens` tokens and `max_requests` texts, none
    of which is longer than that."""
    return list(_batches(texts, max_tokens, max_requests))


def _batches(texts: Sequence[Text], max_tokens: int, max_requests: int) -> Iterator[list[Text]]:
    batch: list[Text] = []
    tokens = 0
    for text in texts:
        if batch and (tokens + len(text.ids) > max_tokens or len(batch) == max_requests):
            yield batch
            batch, tokens = [], 0
        batch.append(text)
        tokens += len(text.ids)
    if batch:
        yield batch
