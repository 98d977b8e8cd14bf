"""The parts of the demo pipeline: how large they are, how they start, how they are saved.

Sizes are chosen so that all weights together stay below 12 MB in half precision.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderTiny,
    DPMSolverMultistepScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.models.autoencoders.vae import AutoencoderTinyBlock
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from accel.pipelines.demo.words import known_words

PROMPT_TOKENS = 48
LATENT_CHANNELS = 8
SHRINKING = 8
TEXT_WIDTH = 128
FLOW_SHIFT = 2.0
START, END = "<|startoftext|>", "<|endoftext|>"


@dataclass
class Parts:
    """The modules that are trained, and the tokenizer that is not."""

    tokenizer: CLIPTokenizer
    text_encoder: CLIPTextModel
    unet: UNet2DConditionModel
    vae: AutoencoderTiny


def new_parts(side: int) -> Parts:
    """All parts, freshly initialised, for pictures of `side` by `side` pixels."""
    tokenizer = make_tokenizer(known_words())
    return Parts(tokenizer, _text_encoder(tokenizer), _unet(side), _vae())


def load_parts(folder: Path) -> Parts:
    """The parts of the pipeline that `save` wrote, in float32.

    Raises ValueError where its tokenizer cuts a word of today's world into pieces.
    """
    pipe = StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    known = pipe.tokenizer.get_vocab()
    unknown = sorted(word for word in known_words() if f"{word}</w>" not in known)
    if unknown:
        raise ValueError(
            f"the tokenizer in {folder} lacks {', '.join(unknown)}: the vocabulary has changed "
            "since it was trained, train anew without --resume"
        )
    return Parts(pipe.tokenizer, pipe.text_encoder, pipe.unet, pipe.vae)


def make_tokenizer(words: Iterable[str]) -> CLIPTokenizer:
    """A CLIP tokenizer for which every one of `words` is one token and any other text is bytes or
    pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, min_frequency=1, end_of_word_suffix="</w>", show_progress=False
    )
    learner.train_from_iterator(sorted(words), trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    pieces += [left + right for left, right in merges]
    pieces += [START, END]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=PROMPT_TOKENS)


def _text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=3 * TEXT_WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=PROMPT_TOKENS,
            projection_dim=TEXT_WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _unet(side: int) -> UNet2DConditionModel:
    unet = UNet2DConditionModel(
        sample_size=side // SHRINKING,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(64, 96, 96),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DCrossAttn",
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=3,  # diffusers' name for the number of heads here
        norm_num_groups=8,
    )
    nn.init.zeros_(unet.conv_out.weight)
    return unet


def _vae() -> AutoencoderTiny:
    """An autoencoder without normalisation.

    It starts as "every eighth pixel, repeated": identity kernels and residual branches near zero.
    """
    vae = AutoencoderTiny(
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(48,) * 4,
        num_encoder_blocks=(0, 2, 2, 2),
        num_decoder_blocks=(3, 3, 2, 1),
    )
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
                module.weight.mul_(0.3).add_(nn.init.dirac_(torch.empty_like(module.weight)))
                if module.bias is not None:
                    module.bias.zero_()
        for block in vae.modules():
            if isinstance(block, AutoencoderTinyBlock):
                _start_near_zero(block.conv)
    return vae


def _start_near_zero(branch: nn.Sequential) -> None:
    for layer in branch:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    branch[-1].weight.mul_(0.05)


def scheduler(shift: float = FLOW_SHIFT) -> DPMSolverMultistepScheduler:
    """A second-order solver of the rectified flow that the denoiser is trained on."""
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        steps_offset=1,  # without meaning for a flow, but the pipeline warns about 0
    )


def pipeline(parts: Parts) -> StableDiffusionPipeline:
    """The parts as a pipeline, in evaluation mode."""
    for part in (parts.text_encoder, parts.unet, parts.vae):
        part.eval().requires_grad_(False)
    pipe = StableDiffusionPipeline(
        vae=parts.vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        unet=parts.unet,
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(parts: Parts, folder: Path) -> None:
    """Writes the pipeline in half precision, replacing `folder` only once it is complete."""
    half = Parts(
        parts.tokenizer,
        deepcopy(parts.text_encoder).to("cpu", torch.float16),
        deepcopy(parts.unet).to("cpu", torch.float16),
        deepcopy(parts.vae).to("cpu", torch.float16),
    )
    beside = folder.with_name(folder.name + ".writing")
    shutil.rmtree(beside, ignore_errors=True)
    pipeline(half).save_pretrained(beside, safe_serialization=True)
    # transformers loads a model in its configuration's dtype, diffusers in float32: without this
    # line the two halves of the pipeline would come up in different ones.
    config = beside / "text_encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}, indent=2))
    # diffusers writes this derived setting and then warns about it when it loads it.
    config = beside / "vae" / "config.json"
    settings = json.loads(config.read_text())
    settings.pop("block_out_channels", None)
    config.write_text(json.dumps(settings, indent=2))
    for path in beside.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


@torch.no_grad()
def normalise(vae: AutoencoderTiny, latents: torch.Tensor) -> None:
    """Gives the encoder's last layer zero mean and unit variance in each channel of `latents`.

    `latents` (n, channels, height, width) are what it gives now. The decoder's first layer undoes
    the change, up to the squashing of its input and the padding at the rim.
    """
    mean, std = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    last, first = vae.encoder.layers[-1], vae.decoder.layers[0]
    last.weight.div_(std[:, None, None, None])
    last.bias.sub_(mean).div_(std)
    first.bias.add_(first.weight.sum(dim=(2, 3)) @ mean)
    first.weight.mul_(std[None, :, None, None])
