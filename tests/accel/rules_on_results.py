"""L8, L11, L12: what each does for results, arguments and context, and how to switch it off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel import layout, recorded, signature
from accel.graph import Refused, eager_on_graph
from accel.guard import Ambient
from accel.record import OpRecorder
from accel.recorded import Results
from accel.signature import Edits, map_tree
from tests.accel.rules import Box, Rule, new_runner, replaced, together, wrapped
from tests.accel.same import assert_same

# L8: results


@torch.no_grad()
def an_earlier_result_is_kept(device: torch.device) -> None:
    runner = new_runner(lambda x: x * 2, device)
    kept = [runner(torch.full((3,), float(turn), device=device)) for turn in range(4)]
    assert [x.tolist()[0] for x in kept] == [0.0, 2.0, 4.0, 6.0], "a later call overwrote it"


@torch.no_grad()
def results_share_memory(device: torch.device) -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.t()

    runner = new_runner(forward, device)
    for _ in range(3):
        one, other = runner(torch.ones(2, 3, device=device))
        one[0, 1] = 7.0
        assert other[1, 0].item() == 7.0, "they share it no more"


@torch.no_grad()
def results_are_what_was_there_before(device: torch.device) -> None:
    layer = nn.Linear(3, 3).to(device)
    runner = new_runner(lambda x: (x, layer.weight, x + 1), device, module=layer)
    for _ in range(3):
        x = torch.ones(2, 3, device=device)
        same, weight, _ = runner(x)
        assert same is x and weight is layer.weight, "a copy was returned"


@torch.no_grad()
def a_result_of_unknown_type(device: torch.device) -> None:
    runner = new_runner(lambda x: (x * 2, Box("new")), device)
    for _ in range(4):
        _, box = runner(torch.ones(3, device=device))
        assert box.value == "new", "an earlier caller has written to it"
        box.value = "used"


def copied_one_by_one(self: Results, tensors: list[Tensor]) -> Any:
    return map_tree(lambda x: x.clone() if isinstance(x, Tensor) else x, self._result)


# L11: arguments


@torch.no_grad()
def strides_show_in_the_result(device: torch.device) -> None:
    runner = new_runner(lambda x: x * 2, device)
    for turn in range(4):
        x = torch.full((2, 3), float(turn), device=device).t()
        assert_same(runner(x), x * 2)
    assert runner.report.replays == 2


def contiguous(x: Tensor, backend: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.no_grad()
def alignment_decides(device: torch.device) -> None:
    """As kernels do that read several numbers at once."""
    base = torch.ones(9, device=device)
    runner = new_runner(lambda x: x * (2 if x.data_ptr() % 16 else 3), device)
    for turn in range(8):
        x = base[turn % 2 : turn % 2 + 8]
        assert runner(x)[0].item() == (2.0 if turn % 2 else 3.0), "another kernel was chosen"
    assert runner.report.replays == 4


@torch.no_grad()
def an_argument_is_changed(device: torch.device) -> None:
    runner = new_runner(lambda x: x.add_(1) * 2, device)
    for _ in range(4):
        x = torch.ones(3, device=device)
        assert runner(x).tolist() == [4.0] * 3
        assert x.tolist() == [2.0] * 3, "the caller's tensor stayed as it was"


def unaware_of_arguments(note: Any) -> Any:
    def note_writes(self: OpRecorder, *args: Any) -> None:
        try:
            note(self, *args)
        except Refused as refused:
            if "changes an argument" not in str(refused):
                raise
            self._recording.refusal = None

    return note_writes


@torch.no_grad()
def a_list_is_used_up(device: torch.device) -> None:
    runner = new_runner(lambda xs: xs.pop() * 2, device)
    for _ in range(4):
        given = [torch.ones(3, device=device) for _ in range(2)]
        runner(given)
        assert len(given) == 1, "the caller's list stayed as it was"
    assert runner.report.replays == 2


# L12: context


@dataclass
class Context:
    """A break whose result depends on `switch`, which the forward has turned around it."""

    switch: Callable[[torch.device], Any]
    body: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def __call__(self, device: torch.device) -> None:
        body = eager_on_graph(self.body)

        def forward(x: Tensor) -> Tensor:
            with self.switch(x.device):
                y = body(x)
            return y.double() * 2

        runner = new_runner(forward, device)
        for seed in range(4):
            draw = torch.Generator().manual_seed(seed)
            x = torch.randn(1, 2, 32, 64, generator=draw).to(device)
            assert_same(runner(x), forward(x), "the break computed something else")
        assert runner.report.replays == 2


@contextlib.contextmanager
def doubles(device: torch.device) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


with_autocast = Context(
    lambda device: torch.autocast(device.type, dtype=torch.bfloat16),
    lambda x: (x @ x.mT).float(),
)
with_default_dtype = Context(
    doubles, lambda x: x.double() * torch.full((), 0.1).double().to(x.device)
)
with_default_device = Context(lambda device: device, lambda x: x + torch.ones(64))
with_attention = Context(
    lambda device: sdpa_kernel(SDPBackend.MATH), lambda x: F.scaled_dot_product_attention(x, x, x)
)


@torch.no_grad()
def the_autocast_cache_is_off(device: torch.device) -> None:
    """What the simulated device's autocast lacks is a cache: seen here is only that it is off."""
    seen: list[bool] = []

    def forward(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_cache_enabled())
        return x * 2

    runner = new_runner(forward, device)
    for _ in range(3):
        runner(torch.ones(3, device=device))
    assert seen == [True, False], "a weight cast while recording would stay in the cache"
    assert torch.is_autocast_cache_enabled()


def _as_they_are(self: Results, tensors: list[Tensor]) -> Any:
    return self._result


_UNRESTORED = replaced(Ambient, "restored", lambda self: contextlib.nullcontext())

ON_RESULTS = [
    Rule(
        "L8",
        "copies",
        an_earlier_result_is_kept,
        replaced(Results, "give", _as_they_are),
        "a later call overwrote it",
    ),
    Rule(
        "L8",
        "shared memory",
        results_share_memory,
        replaced(Results, "give", copied_one_by_one),
        "share it no more",
    ),
    Rule(
        "L8",
        "arguments and weights are themselves",
        results_are_what_was_there_before,
        replaced(Results, "give", copied_one_by_one),
        "a copy was returned",
    ),
    Rule(
        "L8",
        "containers of unknown type",
        a_result_of_unknown_type,
        replaced(recorded, "is_value", lambda x: True),
        "an earlier caller has written",
    ),
    Rule(
        "L11",
        "strides",
        strides_show_in_the_result,
        replaced(signature, "like_in_memory", contiguous),
        "strides",
    ),
    Rule(
        "L11",
        "alignment",
        alignment_decides,
        together(
            replaced(signature, "misalignment", lambda x, backend: 0),
            replaced(layout, "misalignment", lambda x, backend: 0),
        ),
        "another kernel was chosen",
    ),
    Rule(
        "L11",
        "arguments changed in place",
        an_argument_is_changed,
        wrapped(OpRecorder, "_note_writes", unaware_of_arguments),
        "the caller's tensor stayed",
    ),
    Rule(
        "L11",
        "lists changed in place",
        a_list_is_used_up,
        replaced(Edits, "apply", lambda self, call: None),
        "the caller's list stayed",
    ),
    Rule("L12", "autocast", with_autocast, _UNRESTORED, "computed something else"),
    Rule("L12", "default dtype", with_default_dtype, _UNRESTORED, "computed something else"),
    Rule("L12", "default device", with_default_device, _UNRESTORED, "same device"),
    Rule("L12", "attention switches", with_attention, _UNRESTORED, "computed something else"),
    Rule(
        "L12",
        "the autocast cache",
        the_autocast_cache_is_off,
        replaced(torch, "set_autocast_cache_enabled", lambda on: None),
        "would stay in the cache",
    ),
]
