"""Which folder a model's name stands for, and whether that folder may be loaded.

A name is `demo`, a folder, or a hub id. This module reads names, indexes and file lists; it loads
no weights and runs no code of the model. Weights that need pickle, and code that ships with the
model, are refused here unless asked for: loading either one runs whatever its author wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from accel.pipelines import hub
from accel.pipelines.errors import BadInput, first_line
from accel.pipelines.names import instead

ZOO = ("zimage", "qwenimage", "flux", "sdxl", "sd15", "sd35m", "sana", "pixart", "wan")
"""The names of `zoo.names()`, here so that others are answered before torch is loaded."""
INDEXES = ("model_index.json", "modular_model_index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack")
_NAMES = "a model is demo, a folder or a hub id, owner/name"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_BLOCK = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True)
class Trust:
    """What a person allows a model to bring along: `pickle` weights, `code` of its own."""

    pickle: bool = False
    code: bool = False


@dataclass(frozen=True)
class Model:
    """A pipeline folder that may be loaded. `name` is what the person wrote."""

    name: str
    folder: Path

    @cached_property
    def modular(self) -> bool:
        """Whether the folder holds a modular pipeline only."""
        return not (self.folder / INDEXES[0]).is_file()

    @cached_property
    def index(self) -> dict[str, Any]:
        """The pipeline's index: its class and what each component is."""
        return read_json(self.folder / INDEXES[1 if self.modular else 0])

    @cached_property
    def components(self) -> dict[str, tuple[str, str]]:
        """Library and class of every component that the index names."""
        return {
            name: (str(value[0]), str(value[1]))
            for name, value in self.index.items()
            if not name.startswith("_") and isinstance(value, list) and all(value[:2])
        }

    @cached_property
    def variant(self) -> str | None:
        """`fp16` where a component's weights come in that variant only, else None."""
        for name in self.components:
            weights = [path.name for path in (self.folder / name).glob("*.safetensors")]
            if weights and all(".fp16." in weight for weight in weights):
                return "fp16"
        return None

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the model does. Configurations are read whole; of a
        weight file its name, size and three blocks of 64 KiB (start, middle, end), so that 20 GB
        take milliseconds."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            if path.suffix in (".json", ".safetensors", *PICKLES) and path.is_file():
                digest.update(path.relative_to(self.folder).as_posix().encode())
                for block in _sample(path, whole=path.suffix == ".json"):
                    digest.update(block)
        return digest.hexdigest()[:16]


def resolve(name: str, trust: Trust | None = None, unreachable: str | None = None) -> Model:
    """The model that `name` stands for. Raises `BadInput` in one line if there is none, if the
    folder is no pipeline, or if it needs what `trust` (default: nothing) does not allow.
    `unreachable` says why the hub cannot be asked (`hub.unreachable`): a hub id then stands for
    what the hub's cache holds.

    >>> resolve("./no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    accel.pipelines.errors.BadInput: no such model folder: ./no/such/folder (a model is ...
    """
    trust = trust or Trust()
    model = Model(name, _folder_of(name, trust, unreachable))
    _refuse_what_is_no_pipeline(model)
    if not trust.code:
        _refuse_code(model)
    if not trust.pickle:
        _refuse_pickle(model)
    return model


def is_of_zoo(name: str) -> bool:
    """Whether `name` is a model of the zoo, and nothing on disk.

    >>> is_of_zoo("sdxl"), is_of_zoo("demo")
    (True, False)
    """
    return name in ZOO and not os.path.exists(name)


def is_hub_id(name: str) -> bool:
    """Whether `name` is looked for on the hub: it reads `owner/name` and is nothing on disk."""
    hub_like = _HUB_ID.fullmatch(name) is not None and not name.startswith(".")
    return hub_like and not os.path.exists(name)


def sought(name: str, find: Callable[[str | None], T]) -> Callable[[], T]:
    """Looks for the model called `name`, and returns a function that gives it. `find` makes the
    model; it is told why the hub cannot be asked, or None.

    What is on disk, or in the cache of a hub out of reach, is found at once, so that what is
    missing is told before torch is loaded. A download waits for the call of what is returned.
    Raises `BadInput` in one line if there is no such model, or if it is refused; for a download
    the call of what is returned raises that too."""
    if not is_hub_id(name):
        model = find(None)
        return lambda: model
    unreachable = hub.unreachable(name, "--model")
    if unreachable is None:
        return lambda: find(None)
    cached = find(unreachable)
    hub.tell_cached(name, unreachable)
    return lambda: cached


def located(
    name: str, demo: Callable[[], Path], download: Callable[[bool], Path], unreachable: str | None
) -> Path:
    """The folder that a model's name stands for: the built-in one's, one on disk, or one of the
    hub's, which `download` gets (True: from its cache alone, since the hub is `unreachable`).
    Raises `BadInput` in one line, the same for every kind of model."""
    if name == "demo":  # the default: a folder that happens to be called so is ./demo
        return _built_in(demo)
    path = os.path.expanduser(name)
    if os.path.isdir(path):  # pathlib raises where a name is too long, or the home nobody's
        return Path(path)
    if os.path.isfile(path):
        raise BadInput(f"{name} is a file: {_NAMES}")
    if is_hub_id(name):
        return hub.fetched(name, "--model", download, unreachable)
    meant = instead(name, ("demo",), "")
    raise BadInput(f"no such model folder: {name}" + (f"; {meant}" if meant else f" ({_NAMES})"))


def _built_in(demo: Callable[[], Path]) -> Path:
    try:
        return demo()
    except FileNotFoundError as error:
        raise BadInput(f"{first_line(error)}, or give a folder or hub id as --model") from error


def _folder_of(name: str, trust: Trust, unreachable: str | None) -> Path:
    if is_of_zoo(name):
        raise BadInput(
            f"{name} has random weights: accel bench, verify and explain take it, generate does not"
        )

    def download(offline: bool) -> Path:
        try:
            return _downloaded(name, trust, offline=offline)
        except Exception as error:  # the hub, its client and diffusers raise a dozen types
            if "safetensors" in str(error) and not trust.pickle:
                raise BadInput(pickle_line(name, "no safetensors weights on the hub")) from error
            if "trust_remote_code" in str(error):
                raise BadInput(code_line(name, "its repository says so")) from error
            raise

    return located(name, _demo_folder, download, unreachable)


def _demo_folder() -> Path:
    from accel.pipelines.demo import demo_folder

    return demo_folder()


def _downloaded(name: str, trust: Trust, *, offline: bool) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, INDEXES[0], local_files_only=offline)
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError) and not offline:
            raise  # the network went away: no use in asking again
        return Path(hf_hub_download(name, INDEXES[1], local_files_only=offline)).parent
    from diffusers import DiffusionPipeline

    return Path(
        DiffusionPipeline.download(
            name,
            use_safetensors=None if trust.pickle else True,
            trust_remote_code=trust.code,
            local_files_only=offline,
        )
    )


def _refuse_what_is_no_pipeline(model: Model) -> None:
    if not any((model.folder / index).is_file() for index in INDEXES):
        raise BadInput(
            f"{model.name} is no pipeline: it has neither {INDEXES[0]} nor {INDEXES[1]} "
            "(a single component or a checkpoint file cannot be run by itself)"
        )
    if not isinstance(model.index, dict) or "_class_name" not in model.index:
        raise BadInput(f"{model.name} is no pipeline: its index names no _class_name")


def _refuse_code(model: Model) -> None:
    if isinstance(model.index["_class_name"], list):
        raise BadInput(code_line(model.name, "the pipeline's class is its own"))
    for name, (library, kind) in model.components.items():
        if (model.folder / name / f"{library}.py").is_file():
            raise BadInput(code_line(model.name, f"{name} is defined in {name}/{library}.py"))
        config = model.folder / name / "config.json"
        if kind.startswith("Auto") and config.is_file() and "auto_map" in read_json(config):
            raise BadInput(code_line(model.name, f"{name} names code in {name}/config.json"))


def _refuse_pickle(model: Model) -> None:
    for name in model.components:
        files = [path.name for path in (model.folder / name).glob("*") if path.is_file()]
        pickles = [file for file in files if file.endswith(PICKLES) and _is_weight(file)]
        if pickles and not any(file.endswith(".safetensors") for file in files):
            raise BadInput(pickle_line(model.name, f"{name}/{sorted(pickles)[0]}"))


def _is_weight(file: str) -> bool:
    return not file.startswith(("training_args", "optimizer", "scheduler", "rng_state"))


def pickle_line(name: str, where: str) -> str:
    """Why a model whose weights (`where`) need pickle is not loaded, and what allows it."""
    return (
        f"{name} needs pickle ({where}): loading it runs any code it holds; "
        "take safetensors weights, or allow it with --trust-pickle"
    )


def code_line(name: str, where: str) -> str:
    """Why a model that brings code along (`where`) is not loaded, and what allows it."""
    return (
        f"{name} needs code of its own ({where}): read that code, "
        "then allow it with --trust-remote-code"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The file's content. Raises `BadInput` for what is no JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {first_line(error)}") from error
    return content


def _sample(path: Path, *, whole: bool) -> Iterable[bytes]:
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        if whole or size <= 3 * _BLOCK:
            yield file.read()
            return
        for start in (0, size // 2, size - _BLOCK):
            file.seek(start)
            yield file.read(_BLOCK)


def file_fingerprint(path: Path) -> str:
    """Sixteen hex digits for one weight file (a LoRA), sampled like a folder's."""
    digest = hashlib.sha256()
    for block in _sample(path, whole=False):
        digest.update(block)
    return digest.hexdigest()[:16]
