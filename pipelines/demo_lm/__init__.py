"""The built-in language model: a stock transformers causal LM small enough to ship.

It has read captions of the demo's scenes and nothing else. This module knows where it lies;
importing it brings in neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_lm_folder"]


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
