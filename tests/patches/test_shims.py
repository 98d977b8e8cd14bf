"""Shims: fewer breaks, the plain class's bits, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import accel
from accel.graph import BreakableGraph, capture, current_recording
from accel.memory import Pool
from accel.patches import shims
from accel.pipelines.tiny import FAMILIES
from accel.reporting import PartReport
from accel.runner import GraphRunner
from accel.signature import map_tree
from tests.accel.same import assert_same

CALLS = [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (4, 0), (5, 1), (6, 0), (7, 1), (8, 1)]
"""Seed and variant, that is shape, of each call: a second shape, and back."""
LEFT = {
    "controlnet_zimage": 0,
    "glm_image": 0,
    "hidream": 2,  # the experts, in which guards kept missing
    "mochi": 1,
    "nucleus": 0,
    "omnigen": 1,  # whether the prompt is longer than the model was trained for
    "qwenimage21": 1,
    "sana_wm": 0,
}
"""The breaks that are left in the recordings of families that have a shim."""


@pytest.fixture(autouse=True)
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms("nucleus" in request.node.name, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def moved(tree: Any, device: torch.device | str) -> Any:
    return map_tree(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def attributes(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(child)) for child in module.modules()]


def report_of(name: str, device: torch.device, model: nn.Module, calls: Any = CALLS) -> PartReport:
    """The report after calls of a patched family, each compared with the plain one."""
    family = FAMILIES[name]
    eager_on = "cpu" if device.type == "sim" else device
    plain = family.make(seed=0).to(eager_on)
    accel.patch(model, capture="always")
    for seed, variant in calls:
        with torch.no_grad():
            expected = plain(**moved(family.inputs(seed, variant), eager_on))
            result = model(**moved(family.inputs(seed, variant), device))
        assert_same(moved(result, "cpu"), moved(expected, "cpu"))
    return accel.report(model)["module"]


def plain_breaks(name: str, device: torch.device) -> int:
    """How many breaks the family has without its shim; declined: as many as you like."""
    family = FAMILIES[name]
    model = family.make(seed=0).to(device)
    runner = GraphRunner(model, pool=Pool(device), module=model, capture="always")
    with torch.no_grad():
        for seed in (1, 2):
            runner(**moved(family.inputs(seed, 0), device))
    return max((len(graph.breaks) for graph in runner.report.graphs), default=100)


@pytest.mark.parametrize("name", LEFT)
class TestAFamilyWithAShim:
    def test_is_equal_and_has_fewer_breaks(self, name: str, device: torch.device) -> None:
        report = report_of(name, device, FAMILIES[name].make(seed=0).to(device))
        assert report.captures >= 2, report
        assert {len(graph.breaks) for graph in report.graphs} == {LEFT[name]}
        assert report.replays, report
        assert plain_breaks(name, device) > LEFT[name]

    def test_is_what_it_was_after_unpatch(self, name: str, device: torch.device) -> None:
        model, assign = FAMILIES[name].make(seed=0).to(device), Tensor.__setitem__
        before = attributes(model)
        report_of(name, device, model, CALLS[:3])
        assert Tensor.__setitem__ is assign
        accel.unpatch(model)
        for was, now in zip(before, attributes(model), strict=True):
            assert was.keys() == now.keys()
            changed = [x for x in was if was[x] is not now[x]]
            assert changed in ([], ["freqs"]), changed  # which a plain call replaces too


@pytest.mark.parametrize("kind", shims._SHIMS)
def test_shims_fit_the_library(kind: str) -> None:
    if diffusers.__version__ != "0.42.1":
        pytest.skip(f"made for diffusers 0.42.1, here is {diffusers.__version__}")
    shim = shims._SHIMS[kind]
    assert shims._text(getattr(diffusers, kind).__module__, shim.of) == shim.text


def test_a_shim_stays_away_from_another_text(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shims, "_text", lambda module, names: "another")
    report = report_of("nucleus", sim, FAMILIES["nucleus"].make(seed=0).to(sim), CALLS[:3])
    assert len(report.graphs[0].breaks) == plain_breaks("nucleus", sim)


def test_a_shim_stays_away_from_other_methods(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES["hidream"].make(seed=0)
    assert shims._shim_of(model) is not shims._plainly
    patchify = type(model).patchify
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "patchify", lambda self, x: patchify(self, x))
        assert shims._shim_of(model) is shims._plainly
    assert shims._shim_of(model) is not shims._plainly
    model.patchify = lambda x: patchify(model, x)
    assert shims._shim_of(model) is shims._plainly


class Meeting:
    """One thread in the midst of a plain call, while another records the same model."""

    __slots__ = ("_done", "_eager", "_forward", "_model", "_other", "_records")  # no one sees them

    def __init__(self, model: nn.Module, place: nn.Module) -> None:
        self._model, self._forward = model, place.forward
        self._eager, self._records, self._done = (threading.Event() for _ in range(3))
        place.forward = self._meet
        accel.patch(model, capture="always")

    def _meet(self, *args: Any, **kwargs: Any) -> Any:
        if current_recording() is not None:
            self._records.set()
            assert self._done.wait(30)
        elif self._other is threading.current_thread():
            self._eager.set()
            assert self._records.wait(30)
        return self._forward(*args, **kwargs)

    def result_of_the_other(self, mine: Any, others: Any) -> Any:
        found: list[Any] = []

        def call() -> None:
            torch.set_num_threads(1)
            with torch.no_grad():
                found.append(self._model(**others))
            self._done.set()

        self._other = threading.Thread(target=call)
        with torch.no_grad():
            self._model(**mine)
            self._other.start()
            assert self._eager.wait(30)
            self._model(**mine)
        self._other.join(30)
        return found[0]


def test_another_thread_in_the_midst_of_a_call_sees_no_shim(sim: torch.device) -> None:
    family = FAMILIES["glm_image"]
    mine, others = family.inputs(1, 0), family.inputs(5, 1)
    mine["prior_token_drop"] = torch.ones_like(mine["prior_token_drop"])
    others["prior_token_drop"] = torch.zeros_like(others["prior_token_drop"])
    with torch.no_grad():
        expected = family.make(seed=0)(**others)
    model = family.make(seed=0).to(sim)
    meeting = Meeting(model, model.image_projector)
    result = meeting.result_of_the_other(moved(mine, sim), moved(others, sim))
    assert_same(moved(result, "cpu"), expected)
    assert accel.report(model)["module"].captures == 1


def test_a_text_that_is_not_found_is_another() -> None:
    assert shims._text(nn.Linear.__module__, ("Linear.forward",))
    assert shims._text(nn.Linear.__module__, ("Linear.no_such_method",)) == ""


def test_a_shim_stays_away_from_compiled_layers(sim: torch.device) -> None:
    model = FAMILIES["nucleus"].make(seed=0).to(sim)
    assert shims._shim_of(model) is not shims._plainly
    model.transformer_blocks[0].compile()
    assert shims._shim_of(model) is shims._plainly


ROWS = torch.tensor([True, False, False, True])
ASSIGNMENTS: dict[str, tuple[tuple[int, ...], Tensor, Tensor]] = {
    "a row": ((4, 3), ROWS, torch.tensor([1.0, float("nan"), -0.0])),
    "a row of one": ((4, 3), ROWS, torch.tensor([[7.0]])),
    "a number": ((4, 3), ROWS, torch.tensor(5.0)),
    "a row in a row": ((4, 3), ROWS, torch.tensor([[1.0, 2.0, 3.0]])),
    "no row": ((4, 3), torch.zeros(4, dtype=torch.bool), torch.ones(3)),
    "all rows": ((4, 3), torch.ones(4, dtype=torch.bool), torch.ones(3)),
    "matrices": ((2, 2, 2, 2), torch.eye(2).bool(), torch.eye(2)),
    "single elements": ((4,), ROWS, torch.tensor([2.0])),
}


@pytest.mark.parametrize("what", ASSIGNMENTS)
class TestAnAssignedRow:
    def recorded(self, what: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor, int]:
        shape, mask, row = ASSIGNMENTS[what]
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        ours, mask, row = x.to(device), mask.to(device), row.to(device)
        expected, graph = ours * 1, BreakableGraph(Pool(device))
        expected[mask] = row
        expected = expected * 1  # devices write a NaN that they compute in bits of their own
        with (
            torch.no_grad(),
            capture(graph),
            shims._rows_by_choice(),
        ):
            y = ours * 1
            y[mask] = row
            result = y * 1
        return result.cpu(), expected.cpu(), len(graph.breaks)

    def test_needs_no_break(self, what: str, device: torch.device) -> None:
        result, expected, breaks = self.recorded(what, device, seed=1)
        assert_same(result, expected)
        assert breaks == 0


class TestAMaskOnTheHost:
    def test_is_the_positions_it_names(self, device: torch.device) -> None:
        x, columns = torch.arange(12.0).view(4, 3), torch.tensor([True, False, True])
        expected, ours, graph = x.clone(), x.to(device), BreakableGraph(Pool(device))
        expected[:, columns] = 0.5
        expected = torch.cat([expected[ROWS], expected[:, ~columns].T[:, :3]])
        with torch.no_grad(), capture(graph), shims._host_masks_as_positions():
            y = ours * 1
            rows, columns = torch.tensor(ROWS.tolist()), torch.tensor(columns.tolist())
            y[:, columns] = torch.full((), 0.5, device=device)
            result = torch.cat([y[rows], y[:, ~columns].T[:, :3]])
        assert_same(result.cpu(), expected)
        assert graph.breaks == []

    def test_of_the_host_is_left_alone(self, device: torch.device) -> None:
        graph = BreakableGraph(Pool(device))
        with torch.no_grad(), capture(graph), shims._host_masks_as_positions():
            result = torch.tensor([1, 2, 3, 4])[torch.tensor(ROWS.tolist())]
        assert result.tolist() == [1, 4]


@pytest.mark.parametrize(("name", "attention"), [("mochi", "attn1"), ("qwenimage21", "attn")])
def test_processors_of_others_see_the_mask_itself(
    name: str, attention: str, sim: torch.device
) -> None:
    model = FAMILIES[name].make(seed=0).to(sim)
    processor: Any = type(getattr(model.transformer_blocks[1], attention).processor)
    own = type("OwnProcessor", (processor,), {})
    getattr(model.transformer_blocks[1], attention).processor = own()
    report = report_of(name, sim, model, CALLS[:3])
    assert len(report.graphs[0].breaks) == plain_breaks(name, sim)


class TestOtherAssignments:
    @pytest.mark.parametrize(
        "assign",
        [
            lambda x, mask: x.__setitem__(mask, torch.ones(2, 3, device=x.device)),
            lambda x, mask: x.__setitem__((mask, 0), torch.ones((), device=x.device)),
            lambda x, mask: x.__setitem__(mask, x[:1].double()[0].float() * 2),
            lambda x, mask: x.__setitem__(0, torch.ones(3, device=x.device)),
            lambda x, mask: x.__setitem__(slice(1, 3), 4.0),
            lambda x, mask: x.__setitem__(mask, 2.0),
        ],
    )
    def test_are_what_they_were(self, assign: Any, device: torch.device) -> None:
        x = torch.arange(12.0).view(4, 3)
        expected, ours, graph = x.clone(), x.to(device), BreakableGraph(Pool(device))
        assign(expected, ROWS)
        mask = ROWS.to(device)
        with torch.no_grad(), capture(graph), shims._rows_by_choice():
            y = ours * 1
            assign(y, mask)
            result = y * 1
        assert_same(result.cpu(), expected)

    def test_that_are_wrong_are_still_refused(self, device: torch.device) -> None:
        x, mask = torch.zeros(4, 3, device=device), torch.ones(4, dtype=torch.bool, device=device)
        assert not shims._is_row_for_all(x, mask, torch.zeros(2, device=device))
        assert not shims._is_row_for_all(x, mask[:3], torch.zeros(3, device=device))
        assert not shims._is_row_for_all(x, mask, torch.zeros(3, device=device).double())
        assert not shims._is_row_for_all(x, mask, torch.zeros(1, 1, 3, device=device))
