import pytest
import torch
from torch import Tensor

from accel.pipelines.live_bytes import LiveBytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_peak_counts_what_is_alive_together(device: str) -> None:
    weight = torch.empty(100, 100, device=device)
    with LiveBytes() as counted:
        x = torch.empty(10, 100, device=device)  # 4,000 bytes
        for _ in range(5):
            x = x @ weight
    assert (counted.peak, counted.now) == (8_000, 4_000)


def test_weights_and_views_and_changes_in_place_are_no_new_bytes() -> None:
    weight = torch.empty(100, device="meta")
    with LiveBytes() as counted:
        view = weight[:50].view(5, 10)
        view.add_(1).mul_(2)
        weight.transpose(0, 0)
    assert counted.peak == 0


def test_what_several_results_share_is_counted_once() -> None:
    with LiveBytes() as counted:
        parts: tuple[Tensor, ...] = torch.empty(100, device="meta").chunk(4)
        assert counted.now == 400
        del parts
    assert (counted.peak, counted.now) == (400, 0)


def test_memory_used_again_is_not_counted_twice() -> None:
    with LiveBytes() as counted:
        for _ in range(50):
            torch.empty(1000, dtype=torch.uint8, device="meta")
    assert (counted.peak, counted.now) == (1000, 0)
