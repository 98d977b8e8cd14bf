"""One rank of a tensor-parallel prefill: `torchrun … llm_rank.py FOLDER cpu|cuda`.

The model in FOLDER is split over all ranks, and run whole on each beside it. The first rank prints
one JSON object: the largest difference, and the report's counters, by mode.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed
from transformers import AutoModelForCausalLM

import accel
from tests.patches.llm_families import own_hidden, prompts_of

BATCHES = [(5,), (40, 17), (64, 1, 30), (100,)]
LOADING: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}


def measure(split: Any, whole: Any, mode: str) -> dict[str, Any]:
    """One mode's largest difference from the whole model's own hidden states, and its counters."""
    runner = accel.prefill_runner(
        split, max_tokens=128, max_requests=4, attention="reference", mode=mode
    )
    worst = 0.0
    for lengths in BATCHES:
        prompts = prompts_of(*lengths)
        result = runner(prompts)
        for i, prompt in enumerate(prompts):
            difference = result.hidden(i) - own_hidden(whole, prompt)
            worst = max(worst, difference.abs().max().item())
    report = runner.report
    counters = {"replays": report.replays, "eager_passes": report.eager_passes}
    runner.close()
    return {"worst": worst, "declined": report.declined, "notes": report.notes, **counters}


def main(folder: str, device: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", **LOADING).eval()
    whole = AutoModelForCausalLM.from_pretrained(folder, **LOADING).eval().to(split.device)
    found = {mode: measure(split, whole, mode) for mode in ("eager", "breakable", "full")}
    if rank == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
