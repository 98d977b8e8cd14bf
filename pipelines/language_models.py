"""Which folder a language model's name stands for, and whether that folder may be loaded.

A name is `demo` (the built-in model), a folder, or a hub id. This module reads names,
configurations and file lists; it loads no weights and runs no code of the model. What needs pickle
or code of its own is refused here unless asked for, by the rules of `models`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accel.pipelines.errors import BadInput
from accel.pipelines.models import (
    INDEXES,
    Trust,
    code_line,
    is_of_zoo,
    located,
    pickle_line,
    read_json,
)

DEMO = "demo"
CONFIG = "config.json"
_READABLE = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja")
_WEIGHTS = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class LanguageModel:
    """A causal LM's folder that may be loaded. `name` is what the person wrote."""

    name: str
    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration, as written. Raises `BadInput` for what is none."""
        content = read_json(self.folder / CONFIG)
        if not isinstance(content, dict):
            raise BadInput(f"{self.folder / CONFIG} is no configuration: it holds no object")
        return content


def resolve(name: str, trust: Trust | None = None, unreachable: str | None = None) -> LanguageModel:
    """The model that `name` stands for, downloaded if it is a hub id. Raises `BadInput` in one line
    if there is none, if it is no causal LM, or if it needs what `trust` (default: nothing) does
    not allow. `unreachable` says why the hub cannot be asked (`hub.unreachable`): a hub id then
    stands for what the hub's cache holds.

    >>> resolve("./no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    accel.pipelines.errors.BadInput: no such model folder: ./no/such/folder (a model is ...
    """
    trust = trust or Trust()
    if is_of_zoo(name):
        raise BadInput(
            f"--model {name} is no causal LM but a picture model of the zoo: accel bench, verify "
            "and explain take it"
        )

    def download(offline: bool) -> Path:
        return _downloaded(name, trust, offline=offline)

    model = LanguageModel(name, located(name, _demo_folder, download, unreachable))
    _refuse_what_is_no_language_model(model)
    if not trust.pickle:
        _refuse_pickle(model)
    _refuse_code_or_another_kind(model, trust)
    return model


def _demo_folder() -> Path:
    from accel.pipelines.demo_lm import demo_lm_folder

    return demo_lm_folder()


def _downloaded(name: str, trust: Trust, *, offline: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    config = Path(hf_hub_download(name, CONFIG, local_files_only=offline))
    # What is no causal LM is told before gigabytes come down.
    _refuse_code_or_another_kind(LanguageModel(name, config.parent), trust)
    wanted = (*_READABLE, *(_WEIGHTS if trust.pickle else ()), *(("*.py",) if trust.code else ()))
    # Folders inside hold the same weights for other programs.
    return Path(
        snapshot_download(
            name, allow_patterns=list(wanted), ignore_patterns=["*/*"], local_files_only=offline
        )
    )


def _refuse_what_is_no_language_model(model: LanguageModel) -> None:
    if any((model.folder / index).is_file() for index in INDEXES):
        raise BadInput(
            f"--model {model.name} is no causal LM but a diffusers pipeline: accel generate and "
            "accel bench take this picture model; prefill takes one of its parts by that part's "
            "folder"
        )
    if not (model.folder / CONFIG).is_file():
        raise BadInput(f"--model {model.name} is no causal LM: it has no {CONFIG}")


def _refuse_pickle(model: LanguageModel) -> None:
    files = sorted(path.name for path in model.folder.iterdir() if path.is_file())
    if any(file.endswith(".safetensors") for file in files):
        return
    pickles = [file for file in files if file.startswith("pytorch_model")]
    if pickles:
        raise BadInput(pickle_line(f"--model {model.name}", pickles[0]))
    raise BadInput(f"--model {model.name}: there are no weights (*.safetensors) in that folder")


def _refuse_code_or_another_kind(model: LanguageModel, trust: Trust) -> None:
    """A kind that transformers knows is run by its own code, whatever code lies beside it."""
    if _is_causal(model.config.get("model_type")):
        return
    if "AutoModelForCausalLM" in (model.config.get("auto_map") or {}):
        if not trust.code:
            raise BadInput(code_line(f"--model {model.name}", f"{CONFIG} names it"))
        return
    kind = model.config.get("model_type")
    said = f"transformers has no causal LM of the kind {kind!r}" if kind else "it names no kind"
    raise BadInput(f"--model {model.name} is no causal LM: {said} ({CONFIG}: model_type)")


def _is_causal(kind: object) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
