"""What the mode answers, what it forgets, and that it never answers wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.patches.scheduler_answers import Answering
from accel.patches.scheduler_tables import Known
from tests.patches.scheduler_loops import waits

VALUES = [9.0, 7.0, 7.0, 2.5, 0.0]


@pytest.fixture
def table(device: torch.device) -> Tensor:
    return torch.tensor(VALUES).to(device)


@pytest.fixture
def known(table: Tensor) -> Known:
    found = Known(table)
    found.host()
    return found


@pytest.fixture
def reads(known: Known) -> Iterator[Callable[[Callable[[], Any]], int]]:
    """How often something reads the device while the mode is on."""

    def count(do: Callable[[], Any]) -> int:
        with waits(known.source.device) as counts, Answering([known], may_solve=True):
            do()
        return counts()[0]

    yield count


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[1].item(),
        lambda x: bool(x[3] - 1 > 1),
        lambda x: float(x[1:][0] * 2),
        lambda x: x[1:3].tolist(),
        lambda x: x[::2][1].item(),
        lambda x: int((x[0] + 1).to(torch.long)),
        lambda x: (x == x[1]).nonzero().tolist(),
        lambda x: (x == 3).nonzero().tolist(),
        lambda x: (x == x[1]).nonzero(as_tuple=True)[0][1].item(),
        lambda x: [t.item() for t in x],
        lambda x: [t.item() for t in x + 1],
        lambda x: (x * 2).cpu().tolist(),
        lambda x: x[1].to("cpu").item(),
        lambda x: torch.arange(9)[x[1].long()].item(),
    ],
)
def test_what_follows_from_the_table_is_answered(
    ask: Callable[[Tensor], Any], table: Tensor, reads: Callable[..., int]
) -> None:
    answers = [ask(torch.tensor(VALUES))]
    assert reads(lambda: answers.append(ask(table))) == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: (x[1] / 3).item(),  # a division may round another way
        lambda x: torch.add(x[1], 3, alpha=2).item(),
        lambda x: torch.add(x[1], other=x[0]).item(),
        lambda x: x[1].clone().item(),
        lambda x: torch.ones_like(x).sum().item(),
        lambda x: x[:, None].nonzero().tolist(),
    ],
)
def test_what_does_not_is_read(
    ask: Callable[[Tensor], Any], table: Tensor, reads: Callable[..., int], device: torch.device
) -> None:
    answers = [ask(torch.tensor(VALUES, device=device))]
    assert reads(lambda: answers.append(ask(table))) > 0 or device.type != "sim"
    assert answers[0] == answers[1]


def _table_written(x: Tensor) -> Any:
    t = x[0] + 1
    x[0] = 5
    return x[0].item(), x[1].item(), t.item()


def _derived_written(x: Tensor) -> Any:
    t = x[0] + 1
    u = t + 1
    t += 3
    return t.item(), u.item()


def _written_through_a_view(x: Tensor) -> Any:
    t = x + 1
    t.view(1, -1).mul_(2)
    return t[0].item()


def _written_as_out(x: Tensor) -> Any:
    t = x[0] + 1
    torch.add(x[0], 5, out=t)
    return t.item()


def _host_number_written(x: Tensor) -> Any:
    number = torch.tensor(1.0)
    t = x[0] + number
    number.fill_(100)
    return t.item()


@pytest.mark.parametrize(
    "ask",
    [
        _table_written,
        _derived_written,
        _written_through_a_view,
        _written_as_out,
        _host_number_written,
    ],
)
def test_what_was_written_to_is_not_answered_from_before(
    ask: Callable[[Tensor], Any], table: Tensor, reads: Callable[..., int]
) -> None:
    answers = [ask(torch.tensor(VALUES))]
    reads(lambda: answers.append(ask(table)))
    assert answers[0] == answers[1]


def test_a_list_of_positions_is_not_uploaded(table: Tensor, known: Known) -> None:
    with waits(table.device, forbidden=True) as counts, Answering([known], may_solve=True):
        picked = table[[3, 0, -2]]
    assert counts() == (0, 0) and picked.tolist() == [2.5, 9.0, 2.5]


def test_a_host_table_is_uploaded_once(device: torch.device) -> None:
    known = Known(torch.tensor(VALUES))
    copy = known.on(device)
    with waits(device, forbidden=True) as counts, Answering([known], may_solve=True):
        parts = [known.source[i].to(device) for i in range(3)]
        half = known.source[1:].to(device=device, dtype=torch.float16)
    assert counts() == (0, 0)
    parts[0].fill_(3)  # a part is the caller's own, as without us
    assert copy.tolist() == VALUES and half.tolist() == VALUES[1:]
