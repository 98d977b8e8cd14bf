"""From a causal LM's folder to a model and its tokenizer, on their device.

This module knows transformers' loading calls. Which folder a name stands for is
`language_models`' matter, device and dtype are `loading`'s.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

from accel.pipelines.errors import AccelError, BadInput, explained, first_line, is_out_of_memory
from accel.pipelines.language_models import LanguageModel
from accel.pipelines.loading import Placement
from accel.pipelines.models import Trust

NEIGHBOURS = 4
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")


@dataclass(frozen=True)
class Speaker:
    """A causal LM on its device, in evaluation mode, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    where: Placement

    @property
    def positions(self) -> int | None:
        """How many tokens of one text the model was made for, None where it does not say."""
        config = self.model.config.get_text_config()
        value = getattr(config, "max_position_embeddings", None)
        return int(value) if value else None

    def pieces(self, ids: list[int], start: int = 0) -> list[str]:
        """The text that each token from `start` on adds to those before it: with its space, if it
        has one."""
        return [self._piece(ids, index) for index in range(start, len(ids))]

    def _piece(self, ids: list[int], index: int) -> str:
        # Alone a token often loses its space; a few neighbours are as good as the whole text.
        first = max(0, index - NEIGHBOURS)
        before, text = self._text(ids[first:index]), self._text(ids[first : index + 1])
        # A letter of several bytes may be complete only now: then the text before it changes.
        return text[len(before) :] if text.startswith(before) else self._text([ids[index]])

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def quiet() -> None:
    """Silences transformers' progress bars and advice; errors that it logs are also raised."""
    import transformers

    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")


def load(model: LanguageModel, where: Placement, *, trust: Trust | None = None) -> Speaker:
    """Loads `model` from safetensors (unless `trust` allows pickle) onto `where`. Raises `BadInput`
    in one line where a file is broken, weights are missing, or there is no tokenizer."""
    trust = trust or Trust()
    tokenizer = _tokenizer(model, trust)
    try:
        found, info = _weights(model, where, trust)
        _refuse_missing(model, info["missing_keys"])
        return Speaker(model.name, found.eval().to(where.device), tokenizer, where)
    except AccelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise explained(error) from error
        raise BadInput(f"--model {model.name} cannot be loaded: {first_line(error)}") from error


def _weights(model: LanguageModel, where: Placement, trust: Trust) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    found, info = AutoModelForCausalLM.from_pretrained(
        model.folder,
        dtype=where.dtype,
        use_safetensors=None if trust.pickle else True,
        trust_remote_code=trust.code,
        local_files_only=True,
        output_loading_info=True,
    )
    return found, info


def _refuse_missing(model: LanguageModel, names: Any) -> None:
    """Absent weights would be drawn at random: an encoder without a head would talk nonsense."""
    missing = sorted(names)
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BadInput(
            f"--model {model.name} is no whole causal LM: its files lack {len(missing)} of its "
            f"weights ({shown})"
        )


def _tokenizer(model: LanguageModel, trust: Trust) -> Any:
    from transformers import AutoTokenizer

    if not any(file for name in VOCABULARIES for file in model.folder.glob(name)):
        # transformers would make one that knows no word.
        raise BadInput(
            f"--model {model.name}: there is no tokenizer in that folder (tokenizer.json or "
            "another vocabulary): save one beside the weights"
        )
    try:
        return AutoTokenizer.from_pretrained(
            model.folder, trust_remote_code=trust.code, local_files_only=True
        )
    except Exception as error:  # a dozen types, by tokenizer and by what is missing
        raise BadInput(
            f"--model {model.name}: its tokenizer cannot be loaded: {first_line(error)}"
        ) from error
