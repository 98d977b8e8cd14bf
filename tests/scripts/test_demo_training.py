"""Training the demo model: fixed buffers change nothing, resuming starts where training ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accel.pipelines.demo import demo_folder
from accel.pipelines.demo.captions import caption
from accel.pipelines.demo.drawing import draw_scene
from accel.pipelines.demo.scene import random_scene

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_training.autoencoding import AutoencoderTraining, encode_data
from demo_training.data import Dataset, as_signal
from demo_training.denoising import DenoiserTraining, noise_levels
from demo_training.masters import Masters
from demo_training.parts import PROMPT_TOKENS, Parts, load_parts
from demo_training.replay import recorded
from demo_training.studio import CAPTIONS, CHUNK, Studio

CPU = torch.device("cpu")
SIDE = 64


@pytest.fixture(scope="module")
def trained() -> Parts:
    return load_parts(demo_folder())


@pytest.fixture
def parts(trained: Parts) -> Parts:
    return Parts(
        trained.tokenizer, *map(deepcopy, (trained.text_encoder, trained.unet, trained.vae))
    )


@pytest.fixture
def data(parts: Parts) -> Iterator[Dataset]:
    def tokenize(text: str) -> list[int]:
        found = parts.tokenizer(text, padding="max_length", max_length=PROMPT_TOKENS)
        return list(found.input_ids)

    studio = Studio(2 * CHUNK, SIDE, 1, 0, tokenize)
    found = Dataset(studio, CPU, CHUNK, seed=1)
    encode_data(parts.vae, found)
    found.wait_for(CHUNK)
    yield found
    studio.close()


def plain_losses(
    unet: torch.nn.Module, text: torch.nn.Module, batches: list[dict[str, Any]], rate: float
) -> list[float]:
    """The same training without buffers and masters: torch's own optimizer on the modules."""
    weights = [*unet.parameters(), *text.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    losses = []
    for batch in batches:
        share = batch["sigma"].view(-1, 1, 1, 1)
        noisy = batch["latents"] * (1 - share) + batch["noise"] * share
        context = text(batch["tokens"]).last_hidden_state  # its own causal mask
        flow = unet(noisy, (batch["sigma"] * 1000).long(), context).sample
        loss = ((flow - (batch["noise"] - batch["latents"])) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_step_on_fixed_buffers_is_the_plain_step(parts: Parts, data: Dataset) -> None:
    training = DenoiserTraining(parts, data, 4)
    update = recorded(training.update, CPU, print)
    addresses = [t.data_ptr() for t in vars(training.batch).values() if isinstance(t, torch.Tensor)]
    unet, text = deepcopy(training.unet), deepcopy(training.text)
    batches, losses = [], []
    for number in range(3):
        training.masters.set(number, 1e-3)
        training.batch.fill()
        names = ("latents", "noise", "sigma", "tokens")
        batches.append({name: getattr(training.batch, name).clone() for name in names})
        update()
        losses.append(training.figures[0].item())
    assert losses == pytest.approx(plain_losses(unet, text, batches, 1e-3), rel=1e-4)
    assert len(set(losses)) == 3
    kept = [t.data_ptr() for t in vars(training.batch).values() if isinstance(t, torch.Tensor)]
    assert kept == addresses


def test_a_step_at_rate_zero_moves_no_weight_and_no_mean(parts: Parts, data: Dataset) -> None:
    training = DenoiserTraining(parts, data, 2)
    before = deepcopy(training.masters.masters)
    training.update()
    for moved in (training.masters.masters, training.masters.means, training.masters.weights):
        assert all(map(torch.equal, before, moved))


def test_resumed_training_starts_at_the_loss_where_training_ended(
    parts: Parts, data: Dataset
) -> None:
    training = DenoiserTraining(parts, data, 2)
    training.batch = real_batch(parts, 12)  # type: ignore[assignment]
    with torch.no_grad():
        assert training.loss().item() < 0.2  # 2 before any training


def real_batch(parts: Parts, size: int) -> SimpleNamespace:
    """Scenes of full size, with noise levels spread as they were in the first training."""
    rng = Random(0)
    scenes = [random_scene(rng) for _ in range(size)]
    pixels = np.stack([np.asarray(draw_scene(scene, 256, rng)) for scene in scenes])
    texts = [caption(scene, rng) for scene in scenes]
    tokens = parts.tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        latents = parts.vae.encode(as_signal(torch.from_numpy(pixels))).latents
    return SimpleNamespace(
        latents=latents * parts.vae.config.scaling_factor,
        noise=torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)),
        sigma=torch.sigmoid(torch.linspace(-2, 2, size) + 0.5),
        tokens=tokens,
    )


def test_training_publishes_the_running_mean_and_reports_steps(parts: Parts, data: Dataset) -> None:
    training = DenoiserTraining(parts, data, 2)
    before = deepcopy(list(parts.unet.parameters()))
    visits: list[int] = []
    now = time.monotonic()
    steps = training.run(now + 3, 1e-3, lambda line: None, [now], lambda: visits.append(1))
    assert steps >= 1
    assert visits == [1]
    after = list(parts.unet.parameters())
    assert not all(map(torch.equal, before, after))
    assert all(map(torch.equal, after, training.masters.means))


def test_masters_follow_the_rate_that_is_set_and_skip_bad_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    masters = Masters([weight], [weight], decay=0.5)
    masters.set(1000, 0.1)
    weight.grad = torch.ones(3)
    masters.step()
    assert torch.allclose(weight, torch.full((3,), 0.899))  # 1 - 0.1 - weight decay of 0.001
    assert torch.allclose(masters.means[0], torch.full((3,), 0.9495))
    moved = weight.detach().clone()
    weight.grad = torch.full((3,), float("nan"))
    masters.step()
    assert torch.equal(weight, moved)


def test_a_decoder_trains_without_moving_the_latents(parts: Parts, data: Dataset) -> None:
    pictures = as_signal(data.pixels[:2])
    with torch.no_grad():
        latents = parts.vae.encode(pictures).latents
    decoder = deepcopy(list(parts.vae.decoder.parameters()))
    training = AutoencoderTraining(parts.vae, data, 2, decoder_only=True)
    training.rate.fill_(1e-3)
    training.update()
    with torch.no_grad():
        assert torch.equal(parts.vae.encode(pictures).latents, latents)
    assert not all(map(torch.equal, decoder, parts.vae.decoder.parameters()))


def test_the_set_grows_until_every_scene_is_drawn(parts: Parts, data: Dataset) -> None:
    assert data.ready == data.pictures == CHUNK
    data.wait_for(2 * CHUNK)
    assert data.complete
    assert not data.grow()
    assert data.pictures == CHUNK  # pixels of the second chunk were not to be kept
    assert data.tokens.shape == (2 * CHUNK, CAPTIONS, PROMPT_TOKENS)
    text = parts.tokenizer.decode(data.tokens[-1, 0].long(), skip_special_tokens=True)
    assert text.strip()
    with torch.no_grad():
        again = (
            parts.vae.encode(as_signal(data.pixels[:4])).latents * parts.vae.config.scaling_factor
        )
    assert torch.allclose(data.latents[:4].float(), again, atol=2e-2)


def test_chunks_do_not_depend_on_who_draws_them() -> None:
    def draw(workers: int) -> dict[bytes, bytes]:
        studio = Studio(2 * CHUNK, SIDE, workers, 7, lambda text: [len(text)])
        found: dict[bytes, bytes] = {}
        while len(found) < 2:
            if (chunk := studio.collect()) is not None:
                found[chunk[1].tobytes()] = np.ascontiguousarray(chunk[0]).tobytes()
        assert studio.collect() is None
        studio.close()
        return found

    assert draw(1) == draw(2)


def test_noise_levels_leave_enough_for_layouts_and_for_the_last_steps() -> None:
    levels = noise_levels(20_000, torch.Generator().manual_seed(0))
    assert levels.min() >= 0 and levels.max() <= 1
    assert 0.22 < (levels > 0.85).float().mean() < 0.34
    assert (levels < 0.15).float().mean() > 0.02


def test_a_pipeline_of_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo_training.parts.known_words", lambda: {"red", "zeppelin"})
    with pytest.raises(ValueError, match=r"zeppelin.*without --resume"):
        load_parts(demo_folder())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_replayed_step_is_the_eager_step() -> None:
    device = torch.device("cuda")
    layer = torch.nn.Linear(8, 8, device=device)
    other = deepcopy(layer)
    inputs, lines = torch.randn(4, 8, device=device), list[str]()

    def stepper(module: torch.nn.Linear) -> tuple[Masters, Any]:
        masters = Masters(list(module.parameters()), list(module.parameters()), 0.9)

        def step() -> None:
            masters.forget_gradients()
            module(inputs).square().mean().backward()
            masters.step()

        return masters, step

    masters, step = stepper(layer)
    replay = recorded(step, device, lines.append)
    assert lines == ["the training step is one CUDA graph"]
    twin, eager = stepper(other)
    for _ in range(4):
        eager()  # as many at rate zero
    for number in range(5):
        inputs.normal_()
        for each in (masters, twin):
            each.set(number, 1e-2)
        replay()
        eager()
    assert torch.allclose(layer.weight, other.weight)
    assert torch.allclose(masters.means[0], twin.means[0])
