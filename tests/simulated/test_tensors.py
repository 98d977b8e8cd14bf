"""Tensors of the simulated device behave as those of any device, and compute what the CPU does."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def on_both(sim: torch.device, function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Any]:
    """What `function` makes of `inputs` on the CPU and on the device, the latter brought back."""
    expected = function(*(x.clone() for x in inputs))
    result = function(*(x.to(sim) for x in inputs))
    assert result.device == sim
    return expected, result.cpu()


def attend(x: Tensor, mask: list[list[bool]] | None = None) -> Tensor:
    shut = None if mask is None else torch.tensor(mask, device=x.device)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=shut)


def mask_fill(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = -1.0
    x[0, 1] = 5.0
    x[:, 2:4].mul_(3.0)
    return x[torch.tensor([2, 0], device=x.device)]


def out_of_nothing(x: Tensor) -> Tensor:
    out = torch.empty(0, device=x.device)
    torch.add(x, x, out=out)
    return torch.mul(out, 2, out=torch.empty_like(x))


def rotate(x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones(4, device=x.device), torch.arange(4.0, device=x.device))
    pairs = torch.view_as_complex(x.reshape(4, 4, 2))
    return torch.view_as_real(pairs * turns.conj()).flatten(1)


def lists(x: Tensor) -> Tensor:
    several = [x.clone(), x * 2]
    torch._foreach_mul_(several, 0.5)
    torch._foreach_add_(several, [x, x])
    return torch.stack(several)


def in_place_views(x: Tensor) -> Tensor:
    x = x.clone().unsqueeze_(0).squeeze_(0).t_()
    return x.as_strided((2, 3), (8, 1), 1).contiguous().resize_(3, 2)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: (x * 2.0 + x / 3 - 1).abs().sqrt(),
    "matmul": lambda x: x @ x.T,
    "norms": lambda x: F.layer_norm(x, (8,)) + F.group_norm(x[None], 2)[0],
    "attention": lambda x: attend(x.view(1, 2, 2, 8)),
    "attention with a mask": lambda x: attend(x.view(1, 2, 2, 8), [[True, False], [True, True]]),
    "convolution": lambda x: F.conv2d(x.view(1, 2, 4, 4), x.view(2, 2, 2, 4)[..., :2]),
    "channels last": lambda x: x.view(1, 2, 4, 4).to(memory_format=torch.channels_last) + 1,
    "resampling": lambda x: F.interpolate(x.view(1, 2, 4, 4), scale_factor=2.0),
    "embedding": lambda x: F.embedding(torch.tensor([1, 3]).to(x.device), x),
    "masks and indices": mask_fill,
    "boolean indexing": lambda x: x[x > 0],
    "sorting": lambda x: x.sort()[0] + x.topk(8)[0] + x.cumsum(1),
    "out": out_of_nothing,
    "complex": rotate,
    "foreach": lists,
    "views in place": in_place_views,
    "expanded strides": lambda x: x[:1].expand(4, 8) * 2,
    "half precision": lambda x: F.silu(x.bfloat16() @ x.bfloat16().T) * 1.5,
    "host scalar": lambda x: x * torch.tensor(2.0),
    "number first": lambda x: torch.add(1e-6, x, alpha=2.0),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([2, 0]).to(x.device), x[:2]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_the_cpus_bit_for_bit(case: str, sim: torch.device) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    expected, result = on_both(sim, CASES[case], x)
    assert torch.equal(expected, result)
    assert expected.stride() == result.stride()
    assert expected.dtype == result.dtype


def test_a_mode_sees_the_parts_of_composite_operators(sim: torch.device) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.overloadpacket.__name__)
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and func.overloadpacket.__name__ != "_to_copy":
                assert out.device == sim
            return out

    seen: list[str] = []
    layer = torch.nn.Linear(8, 8).to(sim)
    x = torch.randn(1, 2, 4, 8, device=sim)
    with torch.no_grad(), Names():  # type: ignore[no-untyped-call]
        F.scaled_dot_product_attention(x, x, x)
        layer(x[0, 0])
        F.layer_norm(x, (8,))
        x[x > 0]
        x.sum().item()
        x.cpu()
    parts = ["addmm", "native_layer_norm", "index", "_local_scalar_dense", "_to_copy"]
    assert [name for name in seen if name in parts] == parts
    assert not {"linear", "layer_norm", "scaled_dot_product_attention", "item"} & set(seen)


def test_data_pointers_are_real_and_views_share_them(sim: torch.device) -> None:
    x = torch.randn(4, 8, device=sim)
    assert x[1:].data_ptr() == x.data_ptr() + 32
    assert x.data_ptr() % 64 == 0
    assert x[1:]._base is x
    x[1:].zero_()
    assert x[1:].eq(0).all().item()
    assert not x[0].eq(0).any().item()


def test_a_parameter_can_take_other_data(sim: torch.device) -> None:
    parameter, data = torch.nn.Parameter(torch.zeros(3, device=sim)), torch.ones(3, device=sim)
    parameter.data = data
    assert parameter.data_ptr() == data.data_ptr()
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_modules_move_there_and_back(sim: torch.device) -> None:
    layer = torch.nn.Linear(8, 8)
    weight = layer.weight.detach().clone()
    assert layer.to(sim).weight.device == sim
    assert torch.equal(layer.cpu().weight, weight)


def test_training_gives_the_cpus_gradients(sim: torch.device) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 1))
    there = copy.deepcopy(net).to(sim)
    x = torch.randn(4, 8)
    for model, data in ((net, x), (there, x.to(sim))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(there.parameters(), net.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.device == sim
        assert torch.equal(mine.cpu(), theirs)


def test_inference_mode_makes_inference_tensors(sim: torch.device) -> None:
    x = torch.randn(4, 8)
    with torch.inference_mode():
        y = x.to(sim) + 1
        y.add_(1)
        assert y.is_inference()
        assert torch.equal(y.cpu(), x + 1 + 1)


def test_autocast_lowers_precision(sim: torch.device) -> None:
    layer, x = torch.nn.Linear(8, 8).to(sim), torch.randn(4, 8, device=sim)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_copying_and_pickling_keep_values_and_sharing(sim: torch.device) -> None:
    layer = torch.nn.Linear(8, 8).to(sim)
    pair = [layer.weight.data, layer.weight.data[1:]]
    for again in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert again[0].device == sim
        assert torch.equal(again[0].cpu(), pair[0].cpu())
        assert again[0].data_ptr() != pair[0].data_ptr()
    copied = copy.deepcopy(pair)
    assert copied[1].data_ptr() == copied[0].data_ptr() + 32


def test_saving_and_loading(sim: torch.device) -> None:
    x, file = torch.randn(3, device=sim), io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["x"].cpu(), x.cpu())
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].device.type == "cpu"


def test_other_threads_compute_too(sim: torch.device) -> None:
    x, sums = torch.ones(3, device=sim), []
    workers = [threading.Thread(target=lambda: sums.append((x + x).sum().item())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sums == [6.0] * 4


def test_whole_host_tensors_do_not_mix_in(sim: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=sim) + torch.ones(3)


def test_pinned_memory_is_accepted(sim: torch.device) -> None:
    x = torch.randn(3).pin_memory().to(sim, non_blocking=True)
    assert x.device == sim
