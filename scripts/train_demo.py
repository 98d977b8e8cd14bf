"""Trains the built-in demo model in a given number of minutes, from nothing or further.

    python scripts/train_demo.py --minutes 8.2 --output demo-model --report report
    python scripts/train_demo.py --resume pipelines/demo/model --minutes 8.4 --output demo-model

Draws captioned scenes, trains the autoencoder (with --resume its decoder only), then the denoiser
with its text encoder, saves the pipeline and judges it on the prompts of the tests.
`docs/demo-model.md` tells why it is built so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from demo_training.autoencoding import AutoencoderTraining, encode_data, scale_latents
from demo_training.data import Dataset, as_signal
from demo_training.denoising import DenoiserTraining
from demo_training.judging import (
    Prompt,
    Settings,
    Verdict,
    add_strip,
    contact_sheet,
    judge,
    random_prompts,
    sample,
)
from demo_training.parts import (
    FLOW_SHIFT,
    PROMPT_TOKENS,
    Parts,
    load_parts,
    new_parts,
    pipeline,
    save,
)
from demo_training.report import Report
from demo_training.studio import Studio, Tokenize, drawn_scenes
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from PIL import Image

from accel.pipelines.demo import DEFAULT_GUIDANCE, DEFAULT_STEPS, SIZE
from accel.pipelines.demo.measuring import Expectation

PROMPTS = Path(__file__).parent.parent / "tests" / "pipelines" / "demo" / "prompts.json"
DEFAULTS = Settings(DEFAULT_STEPS, DEFAULT_GUIDANCE, FLOW_SHIFT)
ALTERNATIVES = (
    DEFAULTS,
    Settings(DEFAULT_STEPS, 2.0, FLOW_SHIFT),
    Settings(DEFAULT_STEPS, 4.5, FLOW_SHIFT),
    Settings(DEFAULT_STEPS, DEFAULT_GUIDANCE, 1.0),
    Settings(DEFAULT_STEPS, DEFAULT_GUIDANCE, 3.5),
    Settings(25, DEFAULT_GUIDANCE, FLOW_SHIFT),
)
JUDGING = 40.0
"""Seconds kept for saving and judging, at most a quarter of the time."""

TREND_PROMPTS = 128
VAE_BATCH = 96
VAE_SHARE = 0.23
VAE_RATE, DECODER_RATE = 1.5e-3, 8e-4
KEPT = 12_000
"""Scenes whose pixels stay on the device for a decoder's training."""


@dataclass(frozen=True)
class Plan:
    """When what ends, on the clock of `time.monotonic`."""

    vae: float
    denoiser: float
    end: float

    @classmethod
    def of(cls, begin: float, seconds: float, vae: float) -> Plan:
        """`vae` seconds for the autoencoder, `JUDGING` at the end, the rest between."""
        end = begin + seconds
        return cls(begin + vae, end - min(JUDGING, seconds / 4), end)


def main(
    minutes: Annotated[float, typer.Option(help="wall-clock time for everything")] = 8.4,
    resume: Annotated[Path | None, typer.Option(help="saved pipeline to train further")] = None,
    output: Annotated[Path, typer.Option(help="folder for the pipeline")] = Path("demo-model"),
    report: Annotated[Path, typer.Option(help="folder for log and sheets")] = Path("demo-report"),
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    scenes: Annotated[int, typer.Option(help="scenes to draw")] = 160_000,
    batch: Annotated[int, typer.Option(help="latents a denoiser step")] = 256,
    vae_batch: Annotated[int, typer.Option(help="squares an autoencoder step")] = VAE_BATCH,
    decoder: Annotated[
        float, typer.Option(help="with --resume: the second until which the decoder trains")
    ] = 45.0,
    rate: Annotated[float, typer.Option(help="peak learning rate; 1e-3, resumed 8e-4")] = 0.0,
    looks: Annotated[int, typer.Option(help="times the model is judged on the way")] = 4,
    trials: Annotated[int, typer.Option(help="random prompts for each sampling setting")] = 256,
    side: Annotated[int, typer.Option(help="side of the pictures, less for rehearsals")] = SIZE,
    seed: Annotated[int, typer.Option(help="seed of scenes and weights")] = 0,
) -> None:
    """Trains, saves and judges the demo model."""
    papers = Report(report)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    parts = new_parts(side) if resume is None else load_parts(resume)
    studio = Studio(scenes, side, _workers(), seed, _tokenize(parts))
    papers.log(f"{_weights(parts)}; {_workers()} processes draw")
    vae_time = VAE_SHARE * minutes * 60 if resume is None else decoder
    plan = Plan.of(papers.begin, minutes * 60, vae_time)
    kept = scenes if resume is None else KEPT
    data = Dataset(studio, torch.device(device), kept, seed + 1)
    _train_vae(parts, data, plan.vae, vae_batch, papers, resumed=resume is not None)
    _judge_autoencoder(parts, data, studio, min(TREND_PROMPTS, trials), papers)
    peak = rate or (1e-3 if resume is None else 8e-4)
    now, share = time.monotonic(), 1 / (looks + 1)
    moments = [now + (plan.denoiser - now) * share * (look + 1) for look in range(looks)]
    visit = _visits(parts, output, studio, min(TREND_PROMPTS, trials), papers)
    _train_denoiser(parts, data, plan.denoiser, batch, peak, papers, moments, visit)
    _save(parts, output, papers)
    _judge_saved(output, device, studio, plan, trials, papers)
    studio.close()
    papers.log("done")


def _weights(parts: Parts) -> str:
    names = ("text_encoder", "unet", "vae")
    counts = [sum(w.numel() for w in getattr(parts, name).parameters()) for name in names]
    return ", ".join(f"{n} {c / 1e6:.2f} M weights" for n, c in zip(names, counts, strict=True))


def _workers() -> int:
    """Processes that may draw: some processors stay with the training."""
    return max(1, min(12, len(os.sched_getaffinity(0)) - 3))


def _tokenize(parts: Parts) -> Tokenize:
    def tokenize(text: str) -> list[int]:
        ids: list[int] = parts.tokenizer(
            text, padding="max_length", truncation=True, max_length=PROMPT_TOKENS
        ).input_ids
        return ids

    return tokenize


def _train_vae(
    parts: Parts,
    data: Dataset,
    until: float,
    batch: int,
    papers: Report,
    *,
    resumed: bool,
) -> None:
    """Trains the autoencoder, resumed its decoder only; gives the data their latents."""
    if resumed:
        encode_data(parts.vae, data)
    data.wait_for(2 * batch)
    papers.log(f"{data.ready} scenes drawn")
    if time.monotonic() < until:
        training = AutoencoderTraining(parts.vae, data, batch, decoder_only=resumed)
        steps = training.run(until, DECODER_RATE if resumed else VAE_RATE, papers.log)
        papers.log(f"{steps} autoencoder steps of {batch}, {data.ready} scenes drawn")
    parts.vae.eval().requires_grad_(False)
    if not resumed:
        scale_latents(parts.vae, data)
        encode_data(parts.vae, data)
    spread = data.latents[: min(2000, data.ready)].float().std(dim=(0, 2, 3)).tolist()
    papers.log(f"standard deviations of latents {' '.join(f'{value:.2f}' for value in spread)}")


@torch.no_grad()
def _judge_autoencoder(
    parts: Parts, data: Dataset, studio: Studio, number: int, papers: Report
) -> None:
    """How far drawn scenes survive the autoencoder: the denoiser cannot do better."""
    pictures = as_signal(data.pixels[:10])
    rebuilt = parts.vae.decode(parts.vae.encode(pictures).latents).sample
    papers.log(f"reconstruction L1 {(rebuilt - pictures).abs().mean().item():.4f}")
    images = _images(torch.cat([pictures, rebuilt]))
    contact_sheet(images, ["drawn"] * 10 + ["rebuilt"] * 10, papers.folder / "reconstructions.png")
    scenes = drawn_scenes(number, studio.side, seed=2)
    through: list[Image.Image] = []
    for image, _ in scenes:
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        signal = as_signal(pixels.view(1, studio.side, studio.side, 3).to(data.device))
        through += _images(parts.vae.decode(parts.vae.encode(signal).latents).sample)
    expected = [expectation for _, expectation in scenes]
    drawn = judge(studio, [image for image, _ in scenes], expected)
    papers.log(f"drawn scenes: {drawn}; after the autoencoder {judge(studio, through, expected)}")


def _images(signal: torch.Tensor) -> list[Image.Image]:
    levels = signal.clamp(-1, 1).add(1).mul(127.5).round().byte()
    return [Image.fromarray(array) for array in levels.permute(0, 2, 3, 1).cpu().numpy()]


def _train_denoiser(
    parts: Parts,
    data: Dataset,
    until: float,
    batch: int,
    rate: float,
    papers: Report,
    moments: list[float],
    visit: Callable[[], None],
) -> None:
    data.wait_for(batch)
    parts.unet.to(data.device)
    parts.text_encoder.to(data.device)
    steps = DenoiserTraining(parts, data, batch).run(until, rate, papers.log, moments, visit)
    papers.log(f"{steps} denoiser steps of {batch}, {data.ready} scenes drawn")


def _visits(
    parts: Parts, output: Path, studio: Studio, others: int, papers: Report
) -> Callable[[], None]:
    """Saves the model and says how it does by now, on the check and on other prompts."""
    check = fixed_prompts()
    prompts = check + random_prompts(others, seed=1)

    def visit() -> None:
        _save(parts, output, papers)
        pictures = sample(pipeline(parts), prompts, DEFAULTS)
        faults = judge(studio, pictures, [expected for *_, expected in prompts]).faults
        known, random = Verdict(faults[: len(check)]), Verdict(faults[len(check) :])
        papers.log(f"by now, check: {known}; random prompts: {random}")
        add_strip(pictures[2 : len(check) : 4], papers.folder / "progress.png")

    return visit


def _save(parts: Parts, output: Path, papers: Report) -> None:
    save(parts, output)
    papers.pack(output)
    papers.log(f"saved to {output}: {_bytes_in(output) / 1e6:.2f} MB")


def fixed_prompts() -> list[Prompt]:
    """The prompts of the tests' check."""
    entries: list[dict[str, Any]] = json.loads(PROMPTS.read_text())
    return [(e["prompt"], e["seed"], Expectation.from_dict(e)) for e in entries]


def _judge_saved(
    folder: Path, device: str, studio: Studio, plan: Plan, trials: int, papers: Report
) -> None:
    pipe = DiffusionPipeline.from_pretrained(folder).to(device)
    pipe.set_progress_bar_config(disable=True)
    results: dict[str, Any] = {"check": _judge_check(pipe, studio, papers), "settings": []}
    papers.write("check.json", results)
    prompts = random_prompts(trials, seed=1)
    for settings in ALTERNATIVES:
        if time.monotonic() > plan.end - 6:
            papers.log("no time left for other settings")
            break
        pictures = sample(pipe, prompts, settings)
        verdict = judge(studio, pictures, [expected for *_, expected in prompts])
        papers.log(f"{settings}: {verdict}")
        results["settings"].append({"settings": asdict(settings), "verdict": str(verdict)})
        if settings == DEFAULTS:
            results["failures"] = [entry for entry in _entries(prompts, verdict) if entry["faults"]]
        papers.write("check.json", results)


def _judge_check(
    pipe: StableDiffusionPipeline, studio: Studio, papers: Report
) -> list[dict[str, Any]]:
    prompts = fixed_prompts()
    pictures = sample(pipe, prompts, DEFAULTS)
    verdict = judge(studio, pictures, [expected for *_, expected in prompts])
    papers.log(f"check: {verdict}")
    entries = _entries(prompts, verdict)
    for entry in entries:
        if entry["faults"]:
            papers.log(f"  {entry['prompt']}: {'; '.join(entry['faults'])}")
    titles = [f"{'X' if entry['faults'] else 'OK'} {entry['prompt']}" for entry in entries]
    contact_sheet(pictures, titles, papers.folder / "check.png")
    return entries


def _entries(prompts: list[Prompt], verdict: Verdict) -> list[dict[str, Any]]:
    return [
        {"prompt": text, "seed": seed, "faults": faults}
        for (text, seed, _), faults in zip(prompts, verdict.faults, strict=True)
    ]


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    typer.run(main)
