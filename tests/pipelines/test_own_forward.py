"""The model's own forward in one padded batch says what it says text by text."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from accel.pipelines import own_forward
from accel.pipelines.demo_lm import demo_lm_folder

CPU = torch.device("cpu")
IDS = [[0, 257, 308, 403], [0, 257], [0, 257, 324, 279, 271, 257, 308]]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_lm_folder()).eval()


def _alone(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


def test_padding_moves_no_last_logit(model: Any) -> None:
    found = own_forward.last_logits(model, IDS, CPU)
    for row, ids in zip(found, IDS, strict=True):
        torch.testing.assert_close(row, _alone(model, ids)[-1], atol=1e-4, rtol=1e-4)


def test_padding_moves_no_score(model: Any) -> None:
    found = own_forward.scores(model, IDS, CPU)
    assert [len(row) for row in found] == [3, 1, 6]
    for row, ids in zip(found, IDS, strict=True):
        said = _alone(model, ids)[:-1].log_softmax(-1)
        expected = said[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


def test_a_forward_that_keeps_all_logits_does_too() -> None:
    class Old(torch.nn.Module):
        def forward(self, input_ids: Any, use_cache: bool) -> Any:
            from types import SimpleNamespace

            return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids, 5).float())

    assert own_forward.last_logits(Old(), [[1, 2, 3]], CPU).argmax(-1).tolist() == [3]
