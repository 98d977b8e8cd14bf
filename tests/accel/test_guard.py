"""Guards see what may change under a graph, and only that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel.backend import Backend
from accel.guard import Ambient, Held, WeightGuard


def net(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2))).to(
        device
    )


def replace_data(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.clone()


MOVES: dict[str, Callable[[Any], Any]] = {
    "data replaced": replace_data,
    "a parameter replaced": lambda m: setattr(
        m[0], "weight", nn.Parameter(m[0].weight.data.clone())
    ),
    "a buffer replaced": lambda m: setattr(m[1], "running_mean", m[1].running_mean.clone()),
    "a bias gone": lambda m: setattr(m[0], "bias", None),
    "a new parameter": lambda m: m[0].register_parameter("extra", nn.Parameter(torch.ones(1))),
    "a new layer": lambda m: m[2].append(nn.Linear(2, 2)),
    "a layer replaced": lambda m: m[2].__setitem__(0, nn.Linear(4, 2)),
    "a layer gone": lambda m: m.pop(2),
    "a parameter transposed in place": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "another dtype in the same place": lambda m: setattr(
        m[0].weight, "data", m[0].weight.data.view(torch.int32).view(torch.float32)[:2]
    ),
    "to another dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_weight_that_moves_is_another_version(
    move: str, device: torch.device, backend: Backend
) -> None:
    model = net(device)
    guard = WeightGuard(model, backend)
    before = guard.check()
    assert guard.check() == before
    MOVES[move](model)
    after = guard.check()
    assert after != before
    assert guard.check() == after


def test_values_that_change_in_place_are_the_same_version(
    device: torch.device, backend: Backend
) -> None:
    model = net(device)
    guard = WeightGuard(model, backend)
    before = guard.check()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        model(torch.ones(3, 4, device=device))
    model.requires_grad_(False)
    model.eval()
    assert guard.check() == before


def test_weights_are_told_from_other_memory(device: torch.device, backend: Backend) -> None:
    model = net(device)
    guard = WeightGuard(model, backend)
    bases = {backend.storage(t).data_ptr() for t in model.state_dict().values()}
    assert bases == guard.storages


def test_a_weights_death_is_noticed_without_a_look(device: torch.device, backend: Backend) -> None:
    model = net(device)
    guard = WeightGuard(model, backend)
    before = guard.check_alive()
    replace_data(model)
    assert guard.check_alive() != before


def test_a_dead_module_is_no_error(device: torch.device, backend: Backend) -> None:
    model = net(device)
    guard = WeightGuard(model, backend)
    before = guard.check()
    del model
    assert guard.module() is None
    assert guard.check() == before
    assert not guard.requires_grad()


def test_whether_gradients_are_asked_for(device: torch.device, backend: Backend) -> None:
    model = net(device)
    guard = WeightGuard(model, backend)
    assert guard.requires_grad()
    model.requires_grad_(False)
    assert not guard.requires_grad()


class TestHeld:
    def test_memory_is_kept_and_its_replacement_noticed(
        self, device: torch.device, backend: Backend
    ) -> None:
        held, table = Held(), torch.ones(64, device=device)
        held.hold(backend.storage(table))
        view = table[3:]
        del table
        assert held.stale() is None
        del view
        assert "replaced a tensor" in str(held.stale())

    def test_a_host_tensor_is_watched_by_version(self) -> None:
        held, table = Held(), torch.ones(3)
        held.hold_host(table)
        assert held.stale() is None
        table[0] = 5
        assert "has changed" in str(held.stale())

    def test_a_host_tensors_replacement_is_noticed(self) -> None:
        held, table = Held(), torch.ones(3)
        held.hold_host(table)
        del table
        assert "replaced a host tensor" in str(held.stale())

    def test_a_host_tensor_changed_through_a_view(self) -> None:
        held, table = Held(), torch.ones(3, 3)
        held.hold_host(table)
        table[1].zero_()
        assert "has changed" in str(held.stale())

    @pytest.mark.parametrize("how", ["data", "numpy", "inference mode"])
    def test_a_host_tensor_changed_where_no_version_tells(self, how: str) -> None:
        with torch.inference_mode(how == "inference mode"):
            held, table = Held(), torch.ones(100, 40)
        held.hold_host(table)
        assert held.stale() is None
        if how == "numpy":
            table.numpy()[3] = 5
        else:
            with torch.inference_mode(how == "inference mode"):
                table.data[3] = 5
        assert "has changed" in str(held.stale())


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "flash": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
        False,
    ),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "autocast cache": (
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
        False,
    ),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high",
    ),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
}


class TestAmbient:
    @pytest.mark.parametrize("name", SWITCHES)
    def test_a_switch_is_part_of_the_key(self, name: str) -> None:
        read, write, other = SWITCHES[name]
        before, key = read(), Ambient("cpu").key
        hash(key)
        write(other)
        try:
            assert Ambient("cpu").key != key
        finally:
            write(before)
        assert Ambient("cpu").key == key

    @pytest.mark.parametrize("name", ["default dtype", "flash", "math", "autocast cache"])
    def test_a_switch_is_restored_and_put_back(self, name: str) -> None:
        read, write, other = SWITCHES[name]
        before = read()
        write(other)
        inside = Ambient("cpu")
        write(before)
        with inside.restored():
            assert read() == other
        assert read() == before

    def test_autocast_and_default_device(self) -> None:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            inside = Ambient("cpu")
        with inside.restored():
            assert torch.is_autocast_enabled("cpu")
            assert torch.ones(1).device.type == "meta"
        assert not torch.is_autocast_enabled("cpu")
        assert torch.ones(1).device.type == "cpu"

    def test_an_error_inside_puts_back_too(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            inside = Ambient("cpu")
        with pytest.raises(ValueError, match="x"), inside.restored():
            raise ValueError("x")
        assert not torch.is_autocast_enabled("cpu")
