"""Small tokenizers made in code, of the stock classes that the pipelines expect.

Knows how to train one on a few sentences about pictures, so that a common word is one token, as it
is with a published vocabulary, and any other text falls back to characters or bytes. Every id lies
inside the text encoder's vocabulary. It knows no published one: ids mean nothing to real weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "a red circle on a blue background, a green square, a yellow triangle",
    "a photo of an astronaut riding a horse on the moon, a cat and a dog in the snow",
    "an oil painting of a mountain lake at sunset, soft light, highly detailed, sharp focus",
    "the portrait of an old man with a white beard, studio lighting, film grain",
    "a small house in a forest, morning mist, cinematic, 4k, best quality",
    "blurry, low quality, worst quality, bad anatomy, watermark, text, deformed, ugly",
    "describe the image: color, shape, size, texture, quantity, text, objects and background",
    "detailing its spatial relationships, key features, style and layout of the input picture",
    "is it with that this one two three four to for from by at as",
    *("system", "user", "assistant", "Describe", "A", "An", "The"),  # as a line's first word
)

# Chat template of Qwen-type tokenizers: one block a message, an empty thought if thinking is off.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")


def clip_tokenizer(
    max_length: int = 77, pad_token: str = "<|endoftext|>", size: int | None = None
) -> Any:
    """A `CLIPTokenizer` whose start and end tokens have the two highest ids below `size`.

    CLIP encoders find the prompt's end by that id, older ones by its being the highest; `size` is
    the encoder's vocabulary, by default just large enough. `pad_token="!"` pads with id 0, as the
    second tokenizers of SDXL and SD 3 do.
    """
    from transformers import CLIPTokenizer

    ids, merges = _clip_vocabulary()
    first = len(ids) if size is None else size - 2
    ids = {**ids, "<|startoftext|>": first, "<|endoftext|>": first + 1}
    return CLIPTokenizer(ids, merges, model_max_length=max_length, pad_token=pad_token)


def qwen_tokenizer(max_length: int = 131072) -> Any:
    """A `Qwen2Tokenizer` with the chat template that the Qwen-type pipelines call."""
    from transformers import Qwen2Tokenizer

    vocabulary, merges = _qwen_vocabulary()
    return Qwen2Tokenizer(
        vocabulary,
        merges,
        model_max_length=max_length,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def t5_tokenizer(max_length: int = 512) -> Any:
    """A `T5Tokenizer`: whole words of `SENTENCES`, single characters for the rest."""
    from transformers import T5Tokenizer

    return T5Tokenizer(_t5_pieces(), extra_ids=0, model_max_length=max_length)


def gemma_tokenizer(max_length: int = 8192) -> Any:
    """A `GemmaTokenizer` with byte fallback, padding on the right as the Sana pipeline sets it."""
    from transformers import GemmaTokenizer

    vocabulary, merges = _gemma_vocabulary()
    tokenizer = GemmaTokenizer(
        vocabulary, merges, model_max_length=max_length, padding_side="right"
    )
    start = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[start]
    )
    return tokenizer


MAKERS: dict[str, Callable[..., Any]] = {
    "clip": clip_tokenizer,
    "qwen": qwen_tokenizer,
    "t5": t5_tokenizer,
    "gemma": gemma_tokenizer,
}


def vocabulary_size(kind: str) -> int:
    """Number of ids of the tokenizer `kind` (a key of `MAKERS`): what a tiny encoder must embed."""
    return len(MAKERS[kind]())


@cache
def _clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    vocabulary, merges = _train(tokenizer, suffix="</w>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = ["!", *letters, *(letter + "</w>" for letter in letters), *vocabulary]
    ids = {token: number for number, token in enumerate(dict.fromkeys(whole))}
    return ids, merges


@cache
def _qwen_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary, merges = _train(tokenizer)
    tokens = dict.fromkeys([*vocabulary, *QWEN_SPECIAL])
    return {token: number for number, token in enumerate(tokens)}, merges


@cache
def _gemma_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    vocabulary, merges = _train(tokenizer, letters=["▁"])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = dict.fromkeys([*GEMMA_SPECIAL, *fallback, *vocabulary])
    return {token: number for number, token in enumerate(tokens)}, merges


@cache
def _t5_pieces() -> list[tuple[str, float]]:
    words = dict.fromkeys("▁" + word for line in SENTENCES for word in line.split())
    letters = [chr(code) for code in range(33, 127)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return [*special, *((word, -4.0) for word in words), *((letter, -8.0) for letter in letters)]


def _train(
    tokenizer: Any, suffix: str = "", letters: list[str] | None = None
) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens, by id, and the merges that byte-pair training on `SENTENCES` gives."""
    options: dict[str, Any] = {"end_of_word_suffix": suffix} if suffix else {}
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=letters or pre_tokenizers.ByteLevel.alphabet(),
        **options,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = model["vocab"]
    merges = [tuple(merge) for merge in model["merges"]]
    return sorted(vocabulary, key=vocabulary.get), merges
