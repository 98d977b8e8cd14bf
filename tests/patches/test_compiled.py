"""torch.compile beside a patch: blocks, the whole module in place or wrapped, before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel.pipelines import tiny
from tests.patches.pair import draw

SMALL = {"height": 16, "width": 16, "num_inference_steps": 2}


def compile_blocks(pipe: Any) -> None:
    pipe.unet.compile_repeated_blocks(backend="eager")


def compile_in_place(pipe: Any) -> None:
    pipe.unet.compile(backend="eager")


def wrap_compiled(pipe: Any) -> None:
    pipe.unet = torch.compile(pipe.unet, backend="eager")


WAYS: dict[str, Callable[[Any], None]] = {
    "blocks": compile_blocks,
    "in place": compile_in_place,
    "wrapped": wrap_compiled,
}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pipe(device: torch.device) -> Any:
    return tiny.pipeline("sd15").to(device)


@pytest.fixture
def same(device: torch.device, pipe: Any) -> Callable[[int], None]:
    """Compares pictures with those of a pipeline neither patched nor compiled: the compiler's
    backend "eager" runs the same kernels."""
    plain = tiny.pipeline("sd15").to("cpu" if device.type == "sim" else device)

    def compare(count: int) -> None:
        for seed in range(count):
            pictures = []
            for each in (plain, pipe):
                each.set_progress_bar_config(disable=True)
                pictures.append(draw(each, "sd15", seed, **SMALL))
            assert np.array_equal(*pictures), f"another picture, seed {seed}"

    return compare


def patch(pipe: Any) -> None:
    accel.patch(pipe, capture="always", vae=False)


def replays(pipe: Any) -> int:
    return accel.report(pipe)["unet"].replays


@pytest.mark.parametrize("way", WAYS)
def test_compiled_before_the_patch(way: str, pipe: Any, same: Callable[[int], None]) -> None:
    WAYS[way](pipe)
    patch(pipe)
    same(3)
    assert replays(pipe) > 2
    assert not accel.report(pipe)["unet"].graphs[0].breaks
    accel.unpatch(pipe)
    same(1)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_after_the_patch(way: str, pipe: Any, same: Callable[[int], None]) -> None:
    patch(pipe)
    same(2)
    WAYS[way](pipe)
    same(4)
    before = replays(pipe)
    same(2)
    assert replays(pipe) > before
    module = getattr(pipe.unet, "_orig_mod", pipe.unet)
    accel.unpatch(pipe)
    same(1)
    assert not {"forward"} & set(vars(module))


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_compiled_after_the_patch_and_called_first(
    way: str, pipe: Any, same: Callable[[int], None]
) -> None:
    """Without a text encoder before it whose call looks around."""
    accel.patch(pipe, capture="always", vae=False, text_encoder=False)
    same(2)
    WAYS[way](pipe)
    same(3)


def test_what_compile_is_given_runs_compiled(device: torch.device) -> None:
    """Not the forward as it was: what is recorded is what the compiler made."""
    if device.type == "sim":
        pytest.skip(
            "the compiler reads the simulated device's Python and makes graphs of that, too"
        )

    def twice(graph: Any, inputs: Any) -> Callable[..., Any]:
        return lambda *given: tuple(2 * x for x in graph(*given))

    class Own(torch.nn.Linear):
        """The compiler leaves torch's own classes alone."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight, self.bias)

    layer = Own(4, 4).to(device)
    x = torch.ones(2, 4, device=device)
    with torch.no_grad():
        right = 2 * layer(x)
        accel.patch(layer, capture="always")
        layer(x)
        layer.compile(backend=twice)
        accel.patch(layer, capture="always")
        for _ in range(4):
            assert torch.equal(layer(x), right)
    assert accel.report(layer)["module"].replays > 0


def test_what_compiles_while_a_call_is_recorded_leaves_the_recorder_alone(
    device: torch.device,
) -> None:
    """A graph break runs the layers below it under the compiler's eyes, and the recorder's too."""
    if device.type == "sim":
        pytest.skip("the compiler reads the simulated device's Python")
    seen: list[str] = []

    def listening(graph: Any, inputs: Any) -> Callable[..., Any]:
        seen.append(str(graph.code))
        return graph  # type: ignore[no-any-return]

    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.run = torch.compile(self.inner, backend=listening)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)  # type: ignore[no-any-return]

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return self.layer(x) * 2  # type: ignore[no-any-return]

    module, x = Broken().to(device), torch.ones(2, 4, device=device)
    with torch.no_grad():
        right = module.layer(x) * 2
        accel.patch(module, capture="always")
        for _ in range(4):
            assert torch.equal(module(x), right)
            if accel.report(module)["module"].captures == 0:
                torch._dynamo.reset()  # so that it compiles once more, in the recording
    assert accel.report(module)["module"].replays > 0
    assert not any("_known" in code or "aten" in code for code in seen), seen


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_written_in_place_are_followed(
    compiled: bool, pipe: Any, device: torch.device
) -> None:
    patch(pipe)
    if compiled:
        compile_in_place(pipe)
    pictures = [draw(pipe, "sd15", 0, **SMALL) for _ in range(3)]
    with torch.no_grad():
        pipe.unet.conv_out.weight.mul_(2)
    changed = draw(pipe, "sd15", 0, **SMALL)
    assert np.array_equal(pictures[0], pictures[2])
    assert not np.array_equal(pictures[0], changed)
    accel.unpatch(pipe)
    assert np.array_equal(changed, draw(pipe, "sd15", 0, **SMALL))
