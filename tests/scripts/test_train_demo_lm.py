"""Training the language model: it learns from nothing, and what is saved is what was trained."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel.pipelines.demo_lm.corpus import is_held_out, training_captions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import train_demo_lm

STEPS = 24


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_demo_lm.new_tokenizer(islice(training_captions(0), 2000))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setattr(train_demo_lm, "SHAPES", ((8, 32),))
    monkeypatch.setattr(train_demo_lm, "WARM_UP", 4)


def test_rows_are_whole_captions_that_were_not_kept_back(tokenizer: Any) -> None:
    rows = next(train_demo_lm.batches(tokenizer, seed=0))
    assert rows.shape == (8, 32)
    for row in rows.tolist():
        assert row[0] == tokenizer.bos_token_id
        first = tokenizer.decode(row[1 : row.index(row[0], 1)]).strip()
        assert len(first.split()) > 1
        assert not is_held_out(first)


def test_it_learns_and_saves_what_it_learnt(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = train_demo_lm.new_model(tokenizer)
    ids = tokenizer("a red circle on a blue background", return_tensors="pt").input_ids
    before = model(input_ids=ids, labels=ids).loss.item()
    train_demo_lm.train(model, train_demo_lm.batches(tokenizer, seed=0), STEPS)
    after = model(input_ids=ids, labels=ids).loss.item()
    assert after < before - 1
    train_demo_lm.save(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        assert loaded(input_ids=ids, labels=ids).loss.item() == pytest.approx(after, abs=0.02)
    again = AutoTokenizer.from_pretrained(tmp_path)("a red circle").input_ids
    assert again == tokenizer("a red circle").input_ids
    assert f"step {STEPS}: loss " in capsys.readouterr().out


def test_a_saved_model_is_judged_on_captions_kept_back(tokenizer: Any, tmp_path: Path) -> None:
    train_demo_lm.save(train_demo_lm.new_model(tokenizer), tokenizer, tmp_path)
    said = train_demo_lm.judged(tmp_path, 10, seed=1)
    assert said.startswith("10 captions kept back: loss ")
    assert said.endswith(" score above their shuffled words")


def test_the_rate_rises_and_falls() -> None:
    shares = [train_demo_lm._share(step, 40) for step in range(40)]
    assert shares[0] < shares[3] <= 1 == max(shares)
    assert shares[-1] < 0.01
