"""From a model folder to a pipeline that runs: device, dtype, LoRA, and no noise on the way.

This module knows diffusers' loading calls. Which folder a name stands for is `models`' matter.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.pipelines import hub
from accel.pipelines.errors import AccelError, BadInput, explained, first_line, is_out_of_memory
from accel.pipelines.models import Model, Trust, file_fingerprint, is_hub_id
from accel.pipelines.names import instead, refuse_unknown
from accel.pipelines.settings import Lora

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Placement:
    """Where and in which precision a pipeline runs."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """`bfloat16` rather than `torch.bfloat16`."""
        return str(self.dtype).removeprefix("torch.")


def placement(device: str = "auto", dtype: str = "auto") -> Placement:
    """Device and dtype from what the person wrote. `auto` is CUDA where there is one, else the CPU;
    bfloat16 on CUDA (float16 where the GPU has none), float32 on the CPU. Raises `BadInput` for
    what is not there."""
    refuse_unknown("--dtype", dtype, DTYPES)  # before torch is loaded
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = _device(device)
    if dtype == "auto":
        dtype = "float32"
        if chosen.type == "cuda":
            dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return Placement(chosen, getattr(torch, dtype))


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        choice = "no such device; choose auto, cpu, cuda or cuda:N"
        meant = instead(name, ("auto", "cpu", "cuda"), choice)
        raise BadInput(f"--device {name}: {meant}") from error
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device {name}: pipelines run on cpu and cuda here")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA GPU"
            raise BadInput(
                f"--device {name}: torch {torch.__version__} {built}; accel doctor says more, "
                "--device cpu runs without"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise BadInput(f"--device {name}: there are {torch.cuda.device_count()} CUDA GPUs here")
    return device


def quiet() -> None:
    """Silences progress bars and advice of the libraries: they are not about the picture. Errors
    that they log are also raised, and told in one line then."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity(logging.CRITICAL)
        library.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")


def load(
    model: Model, where: Placement, *, trust: Trust | None = None, loras: Sequence[Lora] = ()
) -> Any:
    """The pipeline of `model` on its device, its LoRAs active. Raises `AccelError` in one line."""
    trust = trust or Trust()
    try:
        pipe = (_load_modular if model.modular else _load_classic)(model, where, trust)
        pipe = pipe.to(where.device)
    except AccelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise explained(error) from error
        raise BadInput(f"{model.name} cannot be loaded: {first_line(error)}") from error
    hide_progress(pipe)
    activate(pipe, loras, trust)
    return pipe


def hide_progress(pipe: Any) -> None:
    """Switches off the progress bars of `pipe`; of a modular one those of all its blocks."""
    pipe.set_progress_bar_config(disable=True)
    blocks: list[Any] = [getattr(pipe, "_blocks", None)]
    while blocks:
        block = blocks.pop()
        blocks += getattr(block, "sub_blocks", {}).values()
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)


def _load_classic(model: Model, where: Placement, trust: Trust) -> Any:
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(
        model.folder,
        dtype=where.dtype,
        variant=model.variant,
        use_safetensors=None if trust.pickle else True,
        trust_remote_code=trust.code,
    )


def _load_modular(model: Model, where: Placement, trust: Trust) -> Any:
    import torch
    from diffusers import AutoModel, ModularPipeline

    pipe = ModularPipeline.from_pretrained(str(model.folder), trust_remote_code=trust.code)
    names = pipe.pretrained_component_names
    kinds = {name: pipe.get_component_spec(name).type_hint for name in names}
    weighty = {
        n for n, k in kinds.items() if k is None or issubclass(k, torch.nn.Module | AutoModel)
    }
    allowed = None if trust.pickle else True
    # Each component may lie in a repository of its own.
    away = {pipe.get_component_spec(n).pretrained_model_name_or_path for n in names}
    reasons = [
        hub.unreachable(a, "a component") for a in sorted(filter(None, away)) if is_hub_id(a)
    ]
    pipe.load_components(
        dtype=where.dtype,
        use_safetensors=dict.fromkeys(weighty, allowed),
        local_files_only=any(reasons),
    )
    missing = [n for n in names if n in model.components and getattr(pipe, n, None) is None]
    if missing:
        # The library only warns here, and the call fails much later with a riddle.
        raise BadInput(f"{model.name} cannot be loaded: no {', '.join(missing)} (--debug says why)")
    return pipe


def identified(loras: Sequence[Lora]) -> tuple[Lora, ...]:
    """The LoRAs with the fingerprints of those that are files. Raises `BadInput` for one that is
    neither on disk nor named like something on the hub."""
    return tuple(_identified(lora) for lora in loras)


def _identified(lora: Lora) -> Lora:
    path = os.path.expanduser(lora.path)
    if os.path.isfile(path):
        return replace(lora, fingerprint=file_fingerprint(Path(path)))
    of_hub = is_hub_id(lora.path) and not path.endswith(".safetensors")
    if not os.path.exists(path) and not of_hub:
        raise BadInput(f"--lora {lora.path}: no such file")
    return lora


def activate(pipe: Any, loras: Sequence[Lora], trust: Trust | None = None) -> None:
    """Loads `loras` into `pipe` and sets their scales."""
    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise BadInput(f"--lora: {type(pipe).__name__} takes no LoRA")
    names = [f"lora_{index}" for index in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        try:
            _load_lora(pipe, lora, name, trust or Trust())
        except AccelError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise explained(error) from error
            where = " from the hub" if is_hub_id(lora.path) else ""
            raise BadInput(
                f"--lora {lora.path} cannot be loaded{where}: {first_line(error)}"
            ) from error
    if not set(names) <= {n for ns in pipe.get_list_adapters().values() for n in ns}:
        raise BadInput("--lora: its layers do not belong to this model, nothing would change")
    pipe.set_adapters(names, [lora.scale for lora in loras])


def _load_lora(pipe: Any, lora: Lora, name: str, trust: Trust) -> None:
    path = Path(lora.path).expanduser()
    safely = None if trust.pickle else True
    if not path.is_file():
        _load_lora_folder(pipe, lora.path, name, safely)
        return
    if path.suffix != ".safetensors" and not trust.pickle:
        # The library reads such a file whatever `use_safetensors` says.
        raise BadInput(f"--lora {lora.path} needs pickle: allow it with --trust-pickle")
    pipe.load_lora_weights(
        str(path.parent), weight_name=path.name, adapter_name=name, use_safetensors=safely
    )


def _load_lora_folder(pipe: Any, path: str, name: str, safely: bool | None) -> None:
    unreachable = hub.unreachable(path, "--lora") if is_hub_id(path) else None
    folder = path if unreachable is None else _cached_folder(path, unreachable)
    pipe.load_lora_weights(folder, adapter_name=name, use_safetensors=safely)


def _cached_folder(name: str, unreachable: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise hub.missing(name, "--lora", unreachable) from error
    hub.tell_cached(name, unreachable)
    return folder
