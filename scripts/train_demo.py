"""Trains the built-in demo model from nothing, in a given number of minutes.

    python scripts/train_demo.py --minutes 8.2 --output pipelines/demo/model --report report

Draws captioned scenes, trains the autoencoder, then the denoiser with its text encoder, saves the
pipeline and judges it on the prompts of the tests. `docs/demo-model.md` tells why it is built so.
"""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from demo_training.data import Dataset, Studio, as_signal
from demo_training.judging import (
    Prompt,
    Settings,
    add_strip,
    contact_sheet,
    judge,
    random_prompts,
    sample,
)
from demo_training.learning import DenoiserTraining, cache_latents, train_vae
from demo_training.parts import FLOW_SHIFT, PROMPT_TOKENS, Parts, new_parts, pipeline, save
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
    Settings(DEFAULT_STEPS, 7.0, FLOW_SHIFT),
    Settings(DEFAULT_STEPS, DEFAULT_GUIDANCE, 1.0),
    Settings(DEFAULT_STEPS, DEFAULT_GUIDANCE, 3.5),
    Settings(10, DEFAULT_GUIDANCE, FLOW_SHIFT),
    Settings(25, DEFAULT_GUIDANCE, FLOW_SHIFT),
)


@dataclass(frozen=True)
class Plan:
    """When what ends, on the clock of `time.monotonic`."""

    begin: float
    vae: float
    denoiser: float
    end: float

    @classmethod
    def of(cls, begin: float, minutes: float, vae_share: float) -> Plan:
        """`vae_share` of the time for the autoencoder, a tenth for judging, the rest between."""
        total = minutes * 60
        return cls(begin, begin + vae_share * total, begin + 0.9 * total, begin + total)


class Report:
    """What is left of a run: a log, contact sheets, results, the model in a tar."""

    def __init__(self, folder: Path, begin: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.begin = folder, begin
        self._log = (folder / "log.txt").open("w")

    def log(self, line: str) -> None:
        """Prints a line with the seconds since the beginning, and keeps it."""
        stamped = f"[{time.monotonic() - self.begin:6.1f} s] {line}"
        print(stamped, flush=True)
        self._log.write(stamped + "\n")
        self._log.flush()

    def pack(self, model: Path) -> None:
        """Puts the saved pipeline into `model.tar`, complete or not at all."""
        part = self.folder / "model.tar.writing"
        with tarfile.open(part, "w") as archive:
            archive.add(model, arcname="model")
        part.replace(self.folder / "model.tar")


def main(
    minutes: Annotated[float, typer.Option(help="wall-clock time for everything")] = 8.2,
    output: Annotated[Path, typer.Option(help="folder for the pipeline")] = Path("demo-model"),
    report: Annotated[Path, typer.Option(help="folder for log and sheets")] = Path("demo-report"),
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    scenes: Annotated[int, typer.Option(help="scenes to draw")] = 160_000,
    batch: Annotated[int, typer.Option(help="latents a denoiser step")] = 256,
    vae_batch: Annotated[int, typer.Option(help="squares an autoencoder step")] = 96,
    vae_share: Annotated[float, typer.Option(help="the autoencoder's share of the time")] = 0.23,
    rate: Annotated[float, typer.Option(help="peak learning rate")] = 1e-3,
    trials: Annotated[int, typer.Option(help="random prompts for each sampling setting")] = 256,
    side: Annotated[int, typer.Option(help="side of the pictures, less for rehearsals")] = SIZE,
    seed: Annotated[int, typer.Option(help="seed of scenes and weights")] = 0,
) -> None:
    """Trains, saves and judges the demo model."""
    begin = time.monotonic()
    papers, plan = Report(report, begin), Plan.of(begin, minutes, vae_share)
    studio = Studio(scenes, side, _workers(), seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    parts = new_parts(side)
    for name in ("text_encoder", "unet", "vae"):
        count = sum(weight.numel() for weight in getattr(parts, name).parameters())
        papers.log(f"{name}: {count / 1e6:.2f} M weights")
    data = Dataset(studio, _tokenize(parts), torch.device(device))
    data.wait_for(2 * vae_batch)
    papers.log(f"{data.ready} scenes drawn, training the autoencoder")
    train_vae(parts.vae, data, plan.vae, vae_batch, 1.5e-3, papers.log)
    papers.log(f"{data.ready} scenes drawn, encoding them")
    _show_reconstructions(parts, data, papers)
    cache_latents(parts.vae, data, 2 * vae_batch)
    spread = [f"{value:.2f}" for value in data.latents[:2000].float().std(dim=(0, 2, 3)).tolist()]
    papers.log(f"{len(data.latents)} latents, standard deviations {' '.join(spread)}")
    _train_denoiser(parts, data, plan, batch, rate, output, papers)
    save(parts, output)
    papers.pack(output)
    papers.log(f"saved to {output}: {_bytes_in(output) / 1e6:.2f} MB")
    _judge_saved(output, device, studio, plan, trials, papers)
    studio.close()
    papers.log("done")


def _workers() -> int:
    """Processes that may draw: most of the processors, but no more than help."""
    return max(1, min(14, len(os.sched_getaffinity(0)) - 2))


def _tokenize(parts: Parts) -> Callable[[list[str]], torch.Tensor]:
    def tokenize(texts: list[str]) -> torch.Tensor:
        tokens = parts.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=PROMPT_TOKENS,
            return_tensors="pt",
        )
        return tokens.input_ids

    return tokenize


def _train_denoiser(
    parts: Parts,
    data: Dataset,
    plan: Plan,
    batch: int,
    rate: float,
    output: Path,
    papers: Report,
) -> None:
    device = data.device
    parts.unet.to(device)
    parts.text_encoder.to(device)
    training = DenoiserTraining(parts, data, rate, decay=0.999)
    shown = [(prompt, seed) for prompt, seed, _ in fixed_prompts()[::5]]
    pipe = pipeline(parts)

    def visit() -> None:
        add_strip(sample(pipe, shown, DEFAULTS), papers.folder / "progress.png")
        save(parts, output)
        papers.pack(output)
        papers.log("checkpoint saved")

    now = time.monotonic()
    moments = [now + (plan.denoiser - now) * share for share in (0.1, 0.25, 0.45, 0.7)]
    steps = training.run(plan.denoiser, batch, papers.log, moments, visit)
    papers.log(f"{steps} denoiser steps of {batch}")
    visit()


@torch.no_grad()
def _show_reconstructions(parts: Parts, data: Dataset, papers: Report) -> None:
    pictures = as_signal(data.pixels[:10])
    rebuilt = parts.vae.decode(parts.vae.encode(pictures).latents).sample
    papers.log(f"reconstruction L1 {(rebuilt - pictures).abs().mean().item():.4f}")
    both = torch.cat([pictures, rebuilt.clamp(-1, 1)]).add(1).mul(127.5).round().byte()
    images = [Image.fromarray(array) for array in both.permute(0, 2, 3, 1).cpu().numpy()]
    titles = ["drawn"] * 10 + ["rebuilt"] * 10
    contact_sheet(images, titles, papers.folder / "reconstructions.png")


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
    _write(results, papers)
    prompts = random_prompts(trials, seed=1)
    for settings in ALTERNATIVES:
        if time.monotonic() > plan.end - 8:
            papers.log("no time left for other settings")
            break
        pictures = sample(pipe, [(text, seed) for text, seed, _ in prompts], settings)
        strict = judge(studio, pictures, prompts, shapes=True)
        loose = [[line for line in found if ", not " not in line or "things" in line or
                  "background" in line] for found in strict]  # fmt: skip
        passed, strictly = (sum(not found for found in all_) for all_ in (loose, strict))
        line = f"{settings}: {passed} of {trials} pass, {strictly} with shapes"
        papers.log(line)
        results["settings"].append(
            {"settings": vars(settings), "passed": passed, "strictly": strictly, "of": trials}
        )
        if settings == DEFAULTS:
            results["failures"] = [
                {"prompt": text, "complaints": found}
                for (text, _, _), found in zip(prompts, strict, strict=True)
                if found
            ]
        _write(results, papers)


def _judge_check(
    pipe: StableDiffusionPipeline, studio: Studio, papers: Report
) -> list[dict[str, Any]]:
    prompts = fixed_prompts()
    pictures = sample(pipe, [(text, seed) for text, seed, _ in prompts], DEFAULTS)
    loose = judge(studio, pictures, prompts, shapes=False)
    strict = judge(studio, pictures, prompts, shapes=True)
    passed, strictly = sum(not found for found in loose), sum(not found for found in strict)
    papers.log(f"check: {passed} of {len(prompts)} pass, {strictly} with shapes")
    titles = []
    for (text, _, _), found in zip(prompts, strict, strict=True):
        titles.append(f"{'OK' if not found else 'X'} {text}")
        if found:
            papers.log(f"  {text}: {'; '.join(found)}")
    contact_sheet(pictures, titles, papers.folder / "check.png")
    return [
        {"prompt": text, "seed": seed, "complaints": found}
        for (text, seed, _), found in zip(prompts, strict, strict=True)
    ]


def _write(results: dict[str, Any], papers: Report) -> None:
    (papers.folder / "check.json").write_text(json.dumps(results, indent=1))


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    typer.run(main)
