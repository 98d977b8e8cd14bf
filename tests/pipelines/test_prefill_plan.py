"""What graphs will take is told from shapes alone: as much as the real thing has alive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, GptOssConfig, MambaConfig, Qwen3MoeConfig

from accel.patches.llm import TransformersModel
from accel.pipelines import prefill_plan, prefill_tables
from accel.pipelines.demo_lm import demo_lm_folder
from accel.pipelines.errors import AccelError
from accel.pipelines.language_models import LanguageModel, resolve
from accel.pipelines.loading import Placement

CPU = Placement(torch.device("cpu"), torch.float32)
GPU = Placement(torch.device("cuda"), torch.bfloat16)
GIB = 2**30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many bytes are free on a card that is not there."""

    def free(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (count, 80 * GIB))

    return free


@pytest.mark.parametrize("tokens", [64, 256])
def test_as_much_is_planned_as_a_real_forward_has_alive(device: torch.device, tokens: int) -> None:
    plan = prefill_plan.plan(resolve("demo"), CPU, tokens)
    model = AutoModelForCausalLM.from_pretrained(demo_lm_folder()).eval().to(device)
    alive = prefill_plan._activation_bytes(TransformersModel(model), tokens)
    assert plan["ceilings"][-1]["activation_bytes"] == pytest.approx(alive, rel=0.01)


def test_the_parts_add_up() -> None:
    plan = prefill_plan.plan(resolve("demo"), CPU, 128)
    assert 1_083_008 * 4 <= plan["weight_bytes"] <= 1_083_008 * 4 + 1024
    assert [row["tokens"] for row in plan["ceilings"]] == [64, 128]
    for row in plan["ceilings"]:
        assert row["output_bytes"] == row["tokens"] * 128 * 4
        parts = plan["weight_bytes"] + row["activation_bytes"] + row["output_bytes"]
        assert row["total_bytes"] == parts
        assert row["fits"] is None
    small, large = (row["activation_bytes"] for row in plan["ceilings"])
    assert large == pytest.approx(2 * small, rel=0.01)


def test_half_the_precision_takes_half_the_memory() -> None:
    whole, half = (
        prefill_plan.plan(resolve("demo"), Placement(torch.device("cpu"), dtype), 64)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half["weight_bytes"] == pytest.approx(whole["weight_bytes"] / 2, rel=0.01)
    assert half["ceilings"][0]["output_bytes"] == whole["ceilings"][0]["output_bytes"] / 2


def test_no_weight_is_read(tmp_path: Path) -> None:
    shutil.copy(demo_lm_folder() / "config.json", tmp_path)
    model = LanguageModel("m", tmp_path)
    assert prefill_plan.plan(model, CPU, 64) == prefill_plan.plan(resolve("demo"), CPU, 64)


def test_what_has_no_room_is_told(card: Any) -> None:
    card(80 * GIB)
    roomy = prefill_plan.plan(resolve("demo"), GPU, 512)
    assert all(row["fits"] for row in roomy["ceilings"])
    assert roomy["largest_that_fits"] == 512
    third = roomy["ceilings"][2]
    card(third["total_bytes"] + prefill_plan.LIBRARIES)
    tight = prefill_plan.plan(resolve("demo"), GPU, 512)
    assert [row["fits"] for row in tight["ceilings"]] == [True] * 3 + [False] * 3
    assert tight["largest_that_fits"] == 192
    card(0)
    assert prefill_plan.plan(resolve("demo"), GPU, 512)["largest_that_fits"] is None


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (80 * GIB, "80.00 GiB free on d, 512.0 MiB of it set aside for libraries: room for all"),
        (prefill_plan.LIBRARIES + 2_900_000, "take --max-tokens 128, there is no room for 512"),
        (1, "no room for any graph"),
    ],
)
def test_room_is_told_in_words(
    card: Any, capsys: pytest.CaptureFixture[str], free: int, words: str
) -> None:
    card(free)
    plan = prefill_plan.plan(resolve("demo"), GPU, 512)
    names = {"model": "m", "dtype": "bfloat16", "device": "d", "max_tokens": 512}
    prefill_tables.print_plan({**names, **plan})
    assert words in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("config", [Qwen3MoeConfig, GptOssConfig])
def test_a_mixture_of_experts_can_be_planned(tmp_path: Path, config: Any) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config(**small, moe_intermediate_size=32, num_experts_per_tok=2).save_pretrained(tmp_path)
    half = Placement(torch.device("cpu"), torch.bfloat16)
    plan = prefill_plan.plan(LanguageModel("m", tmp_path), half, 64)
    assert plan["ceilings"][0]["activation_bytes"] > 64 * 64 * 2


@pytest.mark.parametrize(
    ("config", "why"),
    [(BertConfig, "attention is not causal"), (MambaConfig, "no layer asks for attention")],
)
def test_a_model_that_cannot_be_packed_gets_no_plan(tmp_path: Path, config: Any, why: str) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config(**small, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(AccelError, match=f"no graphs of --model m as planned: {why}"):
        prefill_plan.plan(LanguageModel("m", tmp_path), CPU, 64)


def test_a_quantized_model_takes_what_its_files_take(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_lm_folder(), tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    model = LanguageModel("m", folder)
    empty = prefill_plan._without_weights(model, CPU, prefill_plan.Trust())
    size = (folder / "model.safetensors").stat().st_size
    assert prefill_plan._weight_bytes(model, empty) != size
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    assert prefill_plan._weight_bytes(LanguageModel("m", folder), empty) == size


def test_what_cannot_be_told_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknowable(*arguments: Any) -> int:
        raise RuntimeError("a shape that depends on values\nand more")

    monkeypatch.setattr(prefill_plan, "_activation_bytes", unknowable)
    with pytest.raises(AccelError, match="cannot be told without running it: RuntimeError: a sh"):
        prefill_plan.plan(resolve("demo"), CPU, 64)


def test_a_plan_has_few_ceilings() -> None:
    sizes = prefill_plan._ceilings(3000)
    assert sizes[8:] == [1280, 1536, 1792, 2048, 2560, 3000]
    assert sizes[:8] == [64, 128, 192, 256, 384, 512, 768, 1024]
