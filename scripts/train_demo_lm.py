"""Trains the built-in language model on captions of the demo's scenes, from nothing, on a CPU.

    python scripts/train_demo_lm.py --steps 1200 --output pipelines/demo_lm/model

Makes a tokenizer, a Qwen3 of a million weights, and rows of captions, each behind the token that
begins and ends a text; trains, saves in bfloat16 and judges what was saved on captions that were
kept from it. Same seed, same machine and versions: same weights. `docs/prefill.md` says what the
model is for.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from accel.pipelines.demo_lm.corpus import held_out_captions, shuffled, training_captions

END = "<|endoftext|>"
"""Begins every text, so that its first word has a probability too, and ends it."""

VOCABULARY = 1024
POSITIONS = 8192
SHAPES = ((64, 32), (64, 32), (64, 32), (16, 128))
"""Rows and tokens of the batches, in turns: mostly two captions a row, now and then ten."""

RATE, WARM_UP, DECAY, CLIP = 3e-3, 60, 0.05, 1.0
JUDGED = 500


def main(
    steps: Annotated[int, typer.Option(min=1, help="batches of 2,048 tokens")] = 1200,
    output: Annotated[Path, typer.Option(help="folder for the model")] = Path("demo-lm"),
    words: Annotated[int, typer.Option(help="captions that the tokenizer is made from")] = 20_000,
    seed: Annotated[int, typer.Option(help="seed of captions and weights")] = 0,
    threads: Annotated[int, typer.Option(help="processor threads")] = 1,
) -> None:
    """Trains, saves and judges the built-in language model."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = new_tokenizer(itertools.islice(training_captions(seed), words))
    model = new_model(tokenizer)
    print(f"{sum(w.numel() for w in model.parameters()):,} weights, {len(tokenizer)} tokens")
    train(model, batches(tokenizer, seed), steps)
    save(model, tokenizer, output)
    print(judged(output, JUDGED, seed=1))


def new_tokenizer(texts: Iterable[str]) -> Any:
    """Byte-level pairs merged as `texts` suggest, lower case: frequent words are one token, any
    other text is pieces and bytes. It puts `END` before what it reads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=8,  # made-up words are rarer
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = (END, tokenizer.token_to_id(END))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[end]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=POSITIONS,
    )


def new_model(tokenizer: Any) -> Any:
    """A Qwen3 with random weights; heads of 64, which every attention kernel takes."""
    config = Qwen3Config(
        vocab_size=64 * math.ceil(len(tokenizer) / 64),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def batches(tokenizer: Any, seed: int) -> Iterator[Tensor]:
    """Rows of token ids `[rows, tokens]` without end. A row begins with a caption's first token and
    holds captions one after another; the last one is cut."""
    texts = training_captions(seed)
    for rows, tokens in itertools.cycle(SHAPES):
        yield torch.tensor([_row(tokenizer, texts, tokens) for _ in range(rows)])


def _row(tokenizer: Any, texts: Iterator[str], tokens: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer(next(texts)).input_ids
    return ids[:tokens]


def train(model: Any, rows: Iterator[Tensor], steps: int) -> None:
    """Next-token prediction with AdamW, the rate warmed up and then a cosine down to nothing."""
    matrices = [w for w in model.parameters() if w.ndim > 1]
    others = [w for w in model.parameters() if w.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
    begin, seen = time.monotonic(), []
    model.train()
    for step, ids in enumerate(itertools.islice(rows, steps), start=1):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        seen.append(loss.item())
        if step % 100 == 0 or step == steps:
            recent = sum(seen[-100:]) / len(seen[-100:])
            print(f"[{time.monotonic() - begin:6.1f} s] step {step}: loss {recent:.4f}", flush=True)
    model.eval()


def _share(step: int, steps: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the folder: the file holds bfloat16, the configuration asks for float32, which any
    processor computes fast."""
    model.to(torch.bfloat16).save_pretrained(folder)
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # as saved, only its owner may read it
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"saved to {folder}: {size / 1e6:.2f} MB")


@torch.inference_mode()
def judged(folder: Path, number: int, seed: int) -> str:
    """How the saved model does on captions kept from it, in words."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng, texts = Random(seed), list(itertools.islice(held_out_captions(seed), number))
    own = [log_probabilities(model, tokenizer, text) for text in texts]
    other = [log_probabilities(model, tokenizer, shuffled(text, rng)) for text in texts]
    above = sum(bool(a.sum() > b.sum()) for a, b in zip(own, other, strict=True))
    loss = -torch.cat(own).mean().item()
    return f"{number} captions kept back: loss {loss:.4f}, {above} score above their shuffled words"


def log_probabilities(model: Any, tokenizer: Any, text: str) -> Tensor:
    """The natural logarithm of every token's probability, `[tokens - 1]`: `END` has none."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    logits = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logits.gather(-1, ids[0, 1:, None])[:, 0]


if __name__ == "__main__":
    typer.run(main)
