"""The built-in language model: a stock transformers causal LM small enough to ship.

It has read captions of the demo's scenes and nothing else. This module knows where it lies;
importing it brings in neither torch nor transformers, `load_demo_lm` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accel.pipelines.hushing import hushed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["demo_lm_folder", "load_demo_lm"]


def demo_lm_folder() -> Path:
    """The folder of the saved model and its tokenizer, as `AutoModelForCausalLM.from_pretrained`
    takes it.

    Raises FileNotFoundError where the installation came without the weights.
    """
    folder = Path(__file__).parent / "model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the built-in language model is missing from {folder}: reinstall the package, or "
            "train it with scripts/train_demo_lm.py"
        )
    return folder


def load_demo_lm() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The built-in language model in float32 on the CPU, in evaluation mode, and its tokenizer;
    move the model with `.to(…)` as any other.

    Raises FileNotFoundError where the installation came without the weights.

    >>> model, tokenizer = load_demo_lm()
    >>> ids = tokenizer("a red circle on a blue", return_tensors="pt").input_ids
    >>> tokenizer.decode(model(ids).logits[0, -1].argmax())
    'background'
    """
    import torch
    import transformers

    folder = demo_lm_folder()
    with hushed(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer
