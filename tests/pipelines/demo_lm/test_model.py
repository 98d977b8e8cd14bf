"""The built-in language model: stock classes alone load it, and its scores mean something."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.pipelines.demo import known_words
from accel.pipelines.demo_lm import demo_lm_folder, load_demo_lm
from accel.pipelines.demo_lm.corpus import held_out_captions, shuffled

NUMBER = 200


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load_demo_lm()


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[0]


@torch.inference_mode()
def log_probabilities(model: Any, tokenizer: Any, text: str) -> Tensor:
    ids = tokenizer(text, return_tensors="pt").input_ids
    found = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("seed", [11, 12])
def test_held_out_captions_score_above_their_shuffled_words(
    model: Any, tokenizer: Any, seed: int
) -> None:
    rng, above = Random(seed), 0
    for text in islice(held_out_captions(seed), NUMBER):
        own = log_probabilities(model, tokenizer, text)
        other = log_probabilities(model, tokenizer, shuffled(text, rng))
        above += bool(own.sum() > other.sum())
    assert above / NUMBER >= 0.95


def test_held_out_captions_are_as_expected_as_the_grammar_allows(
    model: Any, tokenizer: Any
) -> None:
    scores = [
        log_probabilities(model, tokenizer, text) for text in islice(held_out_captions(5), 50)
    ]
    assert -torch.cat(scores).mean().item() < 2.6
    assert torch.cat(scores).isfinite().all()


def test_the_next_word_is_one_that_a_caption_goes_on_with(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("a red circle on a blue", return_tensors="pt").input_ids
    with torch.inference_mode():
        best = model(input_ids=ids).logits[0, -1].topk(3).indices.tolist()
    assert "background" in {tokenizer.decode([one]).strip() for one in best}


def test_captions_end(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("a red circle on a blue background", return_tensors="pt").input_ids
    made = model.generate(ids, do_sample=False, max_new_tokens=24)
    assert made[0, -1].item() == tokenizer.eos_token_id


def test_every_word_of_the_demo_is_one_token(tokenizer: Any) -> None:
    in_pieces = [word for word in known_words() if len(tokenizer(word).input_ids) != 2]
    assert in_pieces == []


@pytest.mark.parametrize("text", ["a red circle", "héllo wörld", "日本 x 😀", "a  b\nc"])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_model_is_small() -> None:
    assert (demo_lm_folder() / "model.safetensors").stat().st_size <= 3_000_000


def test_it_comes_in_float32_on_the_cpu_ready_to_answer(model: Any) -> None:
    assert (model.dtype, model.device.type, model.training) == (torch.float32, "cpu", False)


def test_loading_says_nothing_and_leaves_the_library_talkative() -> None:
    program = (
        "import sys\n"
        "from accel.pipelines.demo_lm import load_demo_lm\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "load_demo_lm()\n"
        "from transformers.utils import logging\n"
        "assert logging.is_progress_bar_enabled() and logging.get_verbosity() == 30\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Loading" not in done.stderr


def test_it_loads_without_accel() -> None:
    script = (
        "import json, sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], use_safetensors=True)\n"
        "text = AutoTokenizer.from_pretrained(sys.argv[1])('a red circle', return_tensors='pt')\n"
        "finite = bool(model(**text).logits.isfinite().all())\n"
        "kind, dtype = type(model).__name__, str(model.dtype)\n"
        "print(json.dumps([finite, kind, dtype, 'accel' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(demo_lm_folder())],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout) == [True, "Qwen3ForCausalLM", "torch.float32", False]
