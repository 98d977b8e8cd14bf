"""Tiny complete pipelines of the kinds that people patch, plain and patched side by side.

Knows how each kind is put together out of the tiny recipes, and what a call of it is given.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import numpy as np
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from torch import Tensor

import accel
from accel.patches.overview import Report
from accel.pipelines import tiny
from accel.pipelines.random_weights import build
from accel.pipelines.recipe import Part
from accel.pipelines.tiny_adapters import IMAGE, TOKENS
from accel.pipelines.tiny_controlnets import CONTROLNET, CONTROLNET_FLUX
from accel.pipelines.tiny_unets import SD15
from accel.reporting import PartReport

PIXELS = 16
Inputs = Callable[[int, int], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of pipeline: how it is made, on the CPU, what a call is given for a seed and a size
    in pixels, and the parts that run in every step."""

    make: Callable[[], Any]
    inputs: Inputs
    steps: tuple[str, ...] = ("unet",)
    options: dict[str, Any] = field(default_factory=dict)


def denoiser(pipe: Any) -> Any:
    """Its UNet or transformer."""
    return getattr(pipe, "transformer", None) or pipe.unet


def part(kind: str, config: Any, seed: int) -> Any:
    """A module with random weights."""
    return build(Part(kind, config).make, "cpu", torch.float32, seed)


def picture(seed: int, size: int) -> Tensor:
    """A picture of noise, (1, 3, size, size), from 0 to 1."""
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(seed))


def photograph(seed: int, size: int) -> Any:
    """The same as an image of the kind that a file holds."""
    pixels = picture(seed, size)[0].permute(1, 2, 0) * 255
    return Image.fromarray(pixels.byte().numpy())


def controlnet(seed: int) -> Any:
    """As small as the tiny VAE's latents ask for: two pixels each."""
    return part(
        "ControlNetModel", {**CONTROLNET, "conditioning_embedding_out_channels": (8, 16)}, seed
    )


def _of(name: str, kind: str, **more: Any) -> Any:
    """A pipeline class around the parts of a tiny recipe and some more."""
    made: Any = getattr(diffusers, kind)
    taken = inspect.signature(made.__init__).parameters
    parts = {**tiny.pipeline(name).components, "requires_safety_checker": False, **more}
    return made(**{part: parts[part] for part in parts if part in taken})


def adapter(seed: int) -> Any:
    """A T2I-Adapter for the tiny "sd15"."""
    config = {"channels": [16, 32], "num_res_blocks": 1, "downscale_factor": 2}
    return part("T2IAdapter", config, seed)


def _adapter_sdxl() -> Any:
    config = {"channels": [16, 32], "num_res_blocks": 1, "downscale_factor": 4}
    return part("T2IAdapter", {**config, "adapter_type": "full_adapter_xl"}, 5)


def _with_adapter(adapter: Any) -> Any:
    return _of("sd15", "StableDiffusionAdapterPipeline", adapter=adapter)


def _image_encoder() -> Any:
    config = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": PIXELS,
        "patch_size": 8,
        "projection_dim": IMAGE,
    }
    return part("CLIPVisionModelWithProjection", config, 6)


def image_prompts(pipe: Any, seed: int) -> None:
    """Loads an IP-Adapter with random weights, and what makes embeddings of pictures."""
    from transformers import CLIPImageProcessor

    side = {"height": PIXELS, "width": PIXELS}
    pipe.image_encoder = _image_encoder().to(pipe.device)
    pipe.feature_extractor = CLIPImageProcessor(size={"shortest_edge": PIXELS}, crop_size=side)
    draw = torch.Generator().manual_seed(seed)
    width = pipe.unet.config.cross_attention_dim
    attentions = [m for name, m in pipe.unet.named_modules() if name.endswith("attn2")]
    layers = {
        f"{2 * number + 1}.to_{key}_ip.weight": torch.randn(m.inner_dim, width, generator=draw) / 5
        for number, m in enumerate(attentions)
        for key in "kv"
    }
    projection = {
        "proj.weight": torch.randn(width * TOKENS, IMAGE, generator=draw) / 5,
        "proj.bias": torch.zeros(width * TOKENS),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    weights = {"image_proj": projection, "ip_adapter": layers}
    pipe.load_ip_adapter(weights, subfolder="", weight_name="", image_encoder_folder=None)


def _ip_adapter() -> Any:
    pipe = tiny.pipeline("sd15")
    image_prompts(pipe, 8)
    return pipe


def lora(seed: int) -> dict[str, Tensor]:
    """A LoRA for the attention of the tiny "sd15", in the form that pipelines load."""
    torch.manual_seed(seed)
    unet = part("UNet2DConditionModel", SD15, 0)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return {f"unet.{name}": x.clone() for name, x in get_peft_model_state_dict(unet).items()}


def _with_lora() -> Any:
    pipe = tiny.pipeline("sd15")
    pipe.load_lora_weights(lora(1), adapter_name="first")
    return pipe


def _modular() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tiny.save_pipeline(folder, "sdxl")
        pipe = diffusers.ModularPipeline.from_pretrained(folder)
        pipe.load_components()
    return pipe


def _masked(seed: int, size: int) -> dict[str, Any]:
    mask = torch.zeros(1, 1, size, size)
    mask[..., seed % 4 :, : size // 2] = 1
    return {"image": picture(seed, size), "mask_image": mask}


def _inpainting_unet() -> Any:
    return part("UNet2DConditionModel", {**SD15, "in_channels": 9}, 9)


def _image(seed: int, size: int) -> dict[str, Any]:
    return {"image": picture(seed, size)}


def _sized(inputs: Inputs) -> Inputs:
    return lambda seed, size: {"height": size, "width": size, **inputs(seed, size)}


KINDS: dict[str, Kind] = {
    "lora": Kind(_with_lora, _sized(lambda seed, size: {})),
    "controlnet": Kind(
        lambda: _of("sd15", "StableDiffusionControlNetPipeline", controlnet=controlnet(3)),
        _image,
        ("controlnet", "unet"),
    ),
    "two_controlnets": Kind(
        lambda: _of(
            "sd15",
            "StableDiffusionControlNetPipeline",
            controlnet=diffusers.MultiControlNetModel([controlnet(3), controlnet(4)]),
        ),
        lambda seed, size: {"image": [picture(seed, size), picture(seed + 50, size)]},
        ("controlnet[0]", "controlnet[1]", "unet"),
    ),
    "controlnet_inpaint": Kind(
        lambda: _of(
            "sd15",
            "StableDiffusionControlNetInpaintPipeline",
            controlnet=controlnet(3),
            unet=_inpainting_unet(),
        ),
        lambda seed, size: {**_masked(seed, size), "control_image": picture(seed + 9, size)},
        ("controlnet", "unet"),
    ),
    "t2i_adapter": Kind(lambda: _with_adapter(adapter(5)), _sized(_image)),
    "sdxl_t2i_adapter": Kind(
        lambda: _of("sdxl", "StableDiffusionXLAdapterPipeline", adapter=_adapter_sdxl()),
        _sized(_image),
    ),
    "two_t2i_adapters": Kind(
        lambda: _with_adapter(diffusers.MultiAdapter([adapter(5), adapter(6)])),
        _sized(lambda seed, size: {"image": [picture(seed, size), picture(seed + 50, size)]}),
        options={"adapter_conditioning_scale": [0.6, 0.4]},
    ),
    "ip_adapter": Kind(
        _ip_adapter, _sized(lambda seed, size: {"ip_adapter_image": photograph(seed, PIXELS)})
    ),
    "inpaint": Kind(
        lambda: _of("sd15", "StableDiffusionInpaintPipeline", unet=_inpainting_unet()),
        _sized(_masked),
    ),
    "img2img": Kind(
        lambda: _of("sd15", "StableDiffusionImg2ImgPipeline"), _image, options={"strength": 0.8}
    ),
    "flux_img2img": Kind(
        lambda: _of("flux", "FluxImg2ImgPipeline"),
        _sized(_image),
        ("transformer",),
        {"strength": 0.6, "max_sequence_length": 32},
    ),
    "flux_controlnet": Kind(
        lambda: _of(
            "flux",
            "FluxControlNetPipeline",
            controlnet=part(
                "FluxControlNetModel",
                {
                    **CONTROLNET_FLUX,
                    "in_channels": 16,
                    "axes_dims_rope": (4, 4, 8),
                    "num_mode": None,
                },
                3,
            ),
        ),
        _sized(lambda seed, size: {"control_image": picture(seed, size)}),
        ("controlnet", "transformer"),
        {"max_sequence_length": 32},
    ),
    "modular": Kind(_modular, _sized(lambda seed, size: {}), options={"output": "images"}),
}


@functools.cache
def _template(name: str) -> Any:
    """A pipeline to be copied. The end of a first picture leaves an empty registry of hooks on some
    models: on this one it is there from the beginning."""
    pipe = KINDS[name].make()
    pipe.set_progress_bar_config(disable=True)
    if hasattr(pipe, "maybe_free_model_hooks"):
        pipe.maybe_free_model_hooks()
    return pipe


class Both:
    """A kind's pipeline twice, of equal weights, one of them patched: what is done is done to
    both. On the simulated device the plain one stays on the CPU, whose bits the device's are."""

    def __init__(self, name: str, device: torch.device, **options: Any) -> None:
        self.name, self.kind, self.device = name, KINDS[name], device
        eager_on = torch.device("cpu") if device.type == "sim" else device
        self.plain = copy.deepcopy(_template(name)).to(eager_on)
        self.patched = copy.deepcopy(_template(name)).to(device)
        accel.patch(self.patched, **{"capture": "always", **options})

    def both(self, do: Callable[[Any], Any]) -> None:
        """Does the same to both, from the same random state."""
        for pipe in (self.plain, self.patched):
            torch.manual_seed(7)
            do(pipe)

    def picture(
        self, seed: int, prompt: str = "a red circle", size: int = PIXELS, **call: Any
    ) -> np.ndarray:
        """The picture that both draw; fails where they differ in one bit."""
        expected, result = (
            self.drawn(pipe, seed, prompt, size, **call) for pipe in (self.plain, self.patched)
        )
        assert np.array_equal(expected, result), f"{self.name}: another picture, seed {seed}"
        return expected

    def pictures(self, *seeds: int, **call: Any) -> list[np.ndarray]:
        """Several of them."""
        return [self.picture(seed, **call) for seed in seeds]

    def drawn(
        self, pipe: Any, seed: int, prompt: str = "a red circle", size: int = PIXELS, **call: Any
    ) -> np.ndarray:
        """The picture that one of them draws, as numbers."""
        return np.array(self._called(pipe, seed, prompt, size, output_type="np", **call))

    def latents(self, pipe: Any, seed: int) -> Tensor:
        """What it draws, before it is made a picture: the tensor that the call returned."""
        latents: Tensor = self._called(pipe, seed, "a red circle", PIXELS, output_type="latent")
        return latents

    def _called(self, pipe: Any, seed: int, prompt: str, size: int, **call: Any) -> Any:
        options = {"num_inference_steps": 3, **self.kind.options, **self.kind.inputs(seed, size)}
        generator = torch.Generator().manual_seed(seed)
        drawn = pipe(prompt=prompt, generator=generator, **{**options, **call})
        return drawn if "output" in options else drawn[0]

    @property
    def report(self) -> Report:
        """What was done to the patched one."""
        return accel.report(self.patched)

    def steps(self) -> dict[str, PartReport]:
        """The reports on the parts that run in every step."""
        return {name: self.report[name] for name in self.kind.steps}

    def counts(self) -> list[tuple[int, int]]:
        """Captures and eager calls of those parts."""
        return [(part.captures, part.eager_calls) for part in self.steps().values()]

    def replays(self) -> int:
        """The fewest replays of those parts."""
        return min(part.replays for part in self.steps().values())
