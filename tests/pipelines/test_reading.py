from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from accel.pipelines.reading import WARM_UP, Way, read_in_turns
from accel.pipelines.texts import Text

CPU = torch.device("cpu")
BATCHES = [[Text("a", [1, 2]), Text("b", [3])], [Text("c", [4, 5, 6])]]


def test_every_way_reads_every_batch_and_takes_turns() -> None:
    said: list[str] = []

    def way(name: str) -> Way:
        def read(batch: Sequence[Sequence[int]]) -> list[Tensor]:
            said.append(f"{name}{len(batch)}")
            return [torch.tensor(ids) for ids in batch]

        return Way(read)

    one, other = way("one"), way("other")
    heard: list[str] = []
    read_in_turns([one, other], BATCHES, CPU, 3, heard.append)
    assert [row.tolist() for row in one.found] == [[1, 2], [3], [4, 5, 6]]
    assert len(one.seconds) == len(other.seconds) == 3
    first, second = ["one2", "one1"], ["other2", "other1"]
    warm = first * WARM_UP + second * WARM_UP
    assert said == [*warm, *first, *second, *second, *first, *first, *second]
    assert heard == ["warming up", *(f"round {n} of 3" for n in (1, 2, 3))]


def test_the_clock_tells_the_median_and_the_rate() -> None:
    way = Way(lambda batch: [], seconds=[0.5, 0.1, 0.2])
    assert way.to_dict(tokens=10) == {
        "median_s": 0.2,
        "tokens_per_s": pytest.approx(50),
        "seconds": [0.5, 0.1, 0.2],
    }
