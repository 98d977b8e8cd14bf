"""Whole models: the simulated device computes what the CPU does, eagerly and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
)

Inputs = Callable[[int], dict[str, Any]]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 60, (2, 7), generator=generator)}


def unet() -> tuple[nn.Module, Inputs]:
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return model, lambda seed: {
        "sample": draw(seed, 2, 4, 16, 16),
        "timestep": torch.tensor(500 + seed),
        "encoder_hidden_states": draw(seed + 1, 2, 7, 32),
    }


def flux() -> tuple[nn.Module, Inputs]:
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, lambda seed: {
        "hidden_states": draw(seed, 1, 16, 16),
        "encoder_hidden_states": draw(seed + 1, 1, 7, 32),
        "pooled_projections": draw(seed + 2, 1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.arange(48.0).view(16, 3) % 4,
        "txt_ids": torch.zeros(7, 3),
    }


class Decoder(nn.Module):
    """The decoding half of a tiny VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, latent_channels=4)

    def forward(self, latents: Tensor) -> Any:
        return self.vae.decode(latents)


def vae() -> tuple[nn.Module, Inputs]:
    return Decoder(), lambda seed: {"latents": draw(seed, 1, 4, 8, 8)}


def clip() -> tuple[nn.Module, Inputs]:
    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    return CLIPTextModel(config), tokens


def t5() -> tuple[nn.Module, Inputs]:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return T5EncoderModel(config), tokens


def qwen3() -> tuple[nn.Module, Inputs]:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config), tokens


def leaves(output: Any) -> list[Tensor]:
    return [value for value in output.to_tuple() if isinstance(value, Tensor)]


def moved(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in inputs.items()}


@pytest.mark.parametrize("build", [unet, flux, vae, clip, t5, qwen3])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_eager_equals_the_cpu(
    build: Callable[[], tuple[nn.Module, Inputs]], context: Any, sim: torch.device
) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    with context():
        expected = leaves(model(**inputs(0)))
        result = leaves(model.to(sim)(**moved(inputs(0), sim)))
    assert expected and all(x.isfinite().all() for x in expected)
    assert all(x.device == sim for x in result)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(expected, result, strict=True))


@pytest.mark.parametrize("build", [unet, flux, vae])
def test_one_segment_holds_a_whole_forward(
    build: Callable[[], tuple[nn.Module, Inputs]], sim: torch.device, record: Any
) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    static = moved(inputs(0), sim)
    with torch.no_grad():
        expected = [leaves(model(**inputs(seed))) for seed in (1, 2)]
        model.to(sim)(**static)
        segment, output = record(lambda: model(**static))
        assert all(x.isnan().all().item() for x in leaves(output))
        for seed, fresh in enumerate(expected, start=1):
            for name, value in inputs(seed).items():
                static[name].copy_(value)
            segment.replay()
            pairs = zip(fresh, leaves(output), strict=True)
            assert all(torch.equal(x, y.cpu()) for x, y in pairs)
