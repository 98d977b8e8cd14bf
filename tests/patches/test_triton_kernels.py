"""Triton's kernels against float64, on a GPU: no worse than torch's ops one by one.

Without one, but with Triton, they run under its interpreter (TRITON_INTERPRET=1) on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from accel.patches.norms import _plain, _zero_centred
from accel.patches.rotary import turned

pytest.importorskip("triton")
from accel.patches import launches
from accel.patches import triton_kernels as kernels

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [(32, 8, 128), (4, 2, 96), (7, 1, 64), (12, 12, 40), (7, 1, 128), (12, 4, 96)]
"""Of queries, of keys, and how wide they are."""
TOKENS = [1, 2, 17, 65] if INTERPRETED else [1, 2, 17, 64, 333, 2049]
TINY = 4 * torch.finfo(torch.float32).eps
"""Roundings of float32, in which both compute."""
ACTIVATIONS: dict[bool, Callable[[torch.Tensor], torch.Tensor]] = {
    False: functional.silu,
    True: lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.fixture
def place() -> torch.device:
    """Where the kernels run."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cpu" if INTERPRETED else "cuda:0")


@pytest.fixture
def cuda(place: torch.device) -> torch.device:
    """A GPU, for what the interpreter has not."""
    if INTERPRETED:
        pytest.skip("only a GPU can show it")
    return place


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: Any) -> torch.dtype:
    """A precision that the kernels take."""
    if INTERPRETED and request.param == torch.bfloat16:
        pytest.skip("the interpreter does not round bf16")
    found: torch.dtype = request.param
    return found


def drawn(*shape: int, place: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw).to(place, dtype)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """As attention has them: tokens before heads in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    """As a projection of queries, keys and values in one leaves them."""
    _, heads, tokens, dim = x.shape
    whole = x.new_zeros(1, tokens, heads * dim + 24)
    part = whole[..., 8 : 8 + heads * dim]
    part.copy_(x.transpose(1, 2).reshape(1, tokens, -1))
    return part.view(1, tokens, heads, dim).transpose(1, 2)


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    """Beginning one element behind an address that a wide load could have."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS = {"transposed": _transposed, "contiguous": torch.clone, "sliced": _sliced}
LAYOUTS["unaligned"] = _unaligned


def check_turn(
    heads: tuple[int, int, int],
    tokens: int,
    place: torch.device,
    dtype: torch.dtype,
    layout: Callable[[torch.Tensor], torch.Tensor] = _transposed,
) -> None:
    """Compares both tensors with float64 and with the fallback."""
    dim = heads[-1]
    given = [layout(drawn(1, n, tokens, dim, place=place, dtype=dtype)) for n in heads[:2]]
    angles = drawn(1, tokens, dim, place=place, dtype=torch.float32) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if layout is _unaligned:
        cos, sin = layout(cos), layout(sin)
    kept = [x.clone() for x in (*given, cos, sin)]
    found = kernels.turn(*given, cos, sin)
    for x, ours in zip(given, found, strict=True):
        exact = turned(x.double(), cos.double(), sin.double())
        own = turned(x, cos, sin)
        assert (ours.shape, ours.dtype, ours.stride(-1)) == (own.shape, dtype, 1)
        assert error(ours, exact) <= error(own, exact) * 1.05 + TINY, (tokens, heads)
    assert all(map(torch.equal, kept, (*given, cos, sin)))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_are_turned_no_worse_than_op_by_op(
    heads: tuple[int, int, int], dtype: torch.dtype, place: torch.device
) -> None:
    for tokens in TOKENS:
        check_turn(heads, tokens, place, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_turned_wherever_they_lie(
    layout: str, dtype: torch.dtype, place: torch.device
) -> None:
    for tokens in TOKENS[:4]:
        check_turn((4, 2, 40), tokens, place, dtype, LAYOUTS[layout])


def test_halves_need_not_share_an_angle(place: torch.device) -> None:
    """Nothing says that the second half of a cosine repeats the first."""
    q, k = (drawn(1, n, 3, 8, place=place, dtype=torch.float32) for n in (4, 2))
    cos, sin = (drawn(1, 3, 8, place=place, dtype=torch.float32, seed=n) for n in (5, 6))
    found = kernels.turn(q, k, cos, sin)
    for x, ours in zip((q, k), found, strict=True):
        torch.testing.assert_close(ours, turned(x, cos, sin))


def test_heads_that_lie_far_apart_are_found(place: torch.device) -> None:
    """Beyond what 32 bits count."""
    far = 2**28
    if place.type == "cuda" and torch.cuda.mem_get_info(place)[0] < 2**34:
        pytest.skip("needs 16 GiB")
    memory = torch.empty(15 * far + 8, dtype=torch.float16, device=place)
    q = memory.as_strided((1, 16, 1, 8), (16 * far, far, 8, 1))
    q.copy_(drawn(1, 16, 1, 8, place=place, dtype=torch.float16))
    k = drawn(1, 8, 1, 8, place=place, dtype=torch.float16)
    cos, sin = (drawn(1, 1, 8, place=place, dtype=torch.float16, seed=n) for n in (5, 6))
    found, _ = kernels.turn(q, k, cos, sin)
    torch.testing.assert_close(found, turned(q.clone(), cos, sin), rtol=0, atol=1e-2)
    del memory, q
    torch.cuda.empty_cache()


def check_gate(gated: torch.Tensor, by: torch.Tensor, tanh: bool) -> None:
    """Compares the product with float64 and with torch's two ops."""
    activation = ACTIVATIONS[tanh]
    kept = gated.clone(), by.clone()
    ours, own = kernels.gate(gated, by, tanh), activation(gated) * by
    exact = activation(gated.double()) * by.double()
    assert (ours.shape, ours.dtype) == (own.shape, own.dtype)
    assert error(ours, exact) <= error(own, exact) * 1.05 + TINY, gated.shape
    assert torch.equal(kept[0], gated) and torch.equal(kept[1], by)
    assert kernels.gate(gated, by, tanh, out=gated) is gated
    assert error(gated, exact) <= error(own, exact) * 1.05 + TINY and torch.equal(kept[1], by)


@pytest.mark.parametrize("tanh", ACTIVATIONS, ids=["silu", "tanh"])
def test_products_are_no_worse_than_op_by_op(
    tanh: bool, dtype: torch.dtype, place: torch.device
) -> None:
    for tokens in TOKENS:
        for width in (48, 1000, 1024, 2731):
            gated, by = (
                drawn(1, tokens, width, place=place, dtype=dtype, seed=n) * 2 for n in (1, 2)
            )
            check_gate(gated, by, tanh)


@pytest.mark.parametrize("tanh", ACTIVATIONS, ids=["silu", "tanh"])
@pytest.mark.parametrize("unaligned", [(True, True), (True, False), (False, True)])
def test_products_are_right_wherever_they_lie(
    tanh: bool, unaligned: tuple[bool, bool], dtype: torch.dtype, place: torch.device
) -> None:
    gated, by = (
        (_unaligned if moved else torch.clone)(drawn(1, 3, 1024, place=place, dtype=dtype, seed=n))
        for n, moved in enumerate(unaligned)
    )
    check_gate(gated, by, tanh)


@pytest.mark.parametrize("count", [1, 1023, 1025])
def test_a_product_ends_where_its_tensor_does(
    count: int, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind it in memory stays what it is."""
    gated, by = (drawn(count, place=place, dtype=torch.float32, seed=n) for n in (1, 2))
    room = torch.full((4 * kernels.WIDTH,), 7.0, device=place)
    monkeypatch.setattr(torch, "empty_like", lambda x: room[: x.numel()])
    kernels.gate(gated, by, False)
    monkeypatch.undo()
    torch.testing.assert_close(room[:count], functional.silu(gated) * by)
    assert (room[count:] == 7).all()


@pytest.mark.parametrize("tanh", ACTIVATIONS, ids=["silu", "tanh"])
def test_what_is_not_finite_is_as_torch_has_it(
    tanh: bool, dtype: torch.dtype, place: torch.device
) -> None:
    """Minus infinity times a sigmoid of zero is nothing in particular."""
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 3e4, -3e4])
    gated, by = (
        x.flatten().to(place, dtype) for x in torch.meshgrid(values, values, indexing="ij")
    )
    ours, own = kernels.gate(gated, by, tanh), ACTIVATIONS[tanh](gated) * by
    told = ~own.isnan()
    torch.testing.assert_close(ours[told], own[told])
    assert ours[gated.isnan() | by.isnan()].isnan().all()
    assert ours[own.isnan() & ~gated.isneginf()].isnan().all()


def check_norm(rows: torch.Tensor, weight: torch.Tensor, centred: bool, eps: float = 1e-6) -> None:
    """Compares rows with float64, with torch's function and with a model's two roundings."""
    kept, size = (rows.clone(), weight.clone()), weight.shape
    exact = functional.rms_norm(rows.double(), size, weight.double() + centred, eps)
    once = (_zero_centred if centred else _plain)(rows, weight, eps)
    normed = functional.rms_norm(rows.float(), size, None, eps).to(rows.dtype)
    ours, twice = kernels.norm(rows, weight, eps, centred), (weight + centred) * normed
    assert (ours.shape, ours.dtype) == (rows.shape, rows.dtype)
    for own in (once, twice):
        assert error(ours, exact) <= error(own, exact) * 1.05 + TINY, (rows.shape, centred)
    assert torch.equal(kept[0], rows) and torch.equal(kept[1], weight)


@pytest.fixture(params=[False, True], ids=["plain", "centred"])
def centred(request: Any) -> bool:
    """Whether a weight says by how much to leave one."""
    return bool(request.param)


@pytest.mark.parametrize("width", [64, 96, 128, 1000, 2560, 4096, 16384])
def test_norms_are_no_worse_than_torchs_or_a_models(
    width: int, centred: bool, dtype: torch.dtype, place: torch.device
) -> None:
    for tokens in TOKENS:
        rows = drawn(1, tokens, width, place=place, dtype=dtype) * 2
        check_norm(rows, drawn(width, place=place, dtype=dtype), centred)


@pytest.mark.parametrize("unaligned", [(True, True), (True, False), (False, True)])
def test_norms_are_right_wherever_they_lie(
    unaligned: tuple[bool, bool], centred: bool, dtype: torch.dtype, place: torch.device
) -> None:
    given = (
        (_unaligned if moved else torch.clone)(drawn(*shape, place=place, dtype=dtype))
        for shape, moved in zip(((1, 3, 4, 128), (128,)), unaligned, strict=True)
    )
    check_norm(*given, centred)


def test_rows_near_zero_depend_on_the_epsilon(centred: bool, place: torch.device) -> None:
    *rows, weight = drawn(6, 96, place=place, dtype=torch.float32)
    for epsilon in (1e-6, 0.25, 1, 16):
        check_norm(torch.stack(rows) * 1e-3, weight, centred, epsilon)
        nothing = kernels.norm(torch.zeros(5, 96, device=place), weight, epsilon, centred)
        assert (nothing == 0).all()


@pytest.mark.parametrize("rows", [1, 15, 17])
@pytest.mark.parametrize("width", [96, 2560])
def test_a_norm_ends_where_its_tensor_does(
    width: int, rows: int, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind it in memory stays what it is, and does not count."""
    x, weight = drawn(2, rows, width, place=place, dtype=torch.float32)
    room = torch.full((rows * width + 4 * kernels.HELD,), 7.0, device=place)
    monkeypatch.setattr(torch, "empty_like", lambda x: room[: x.numel()].view(x.shape))
    kernels.norm(x, weight[0], 1e-6, False)
    monkeypatch.undo()
    wanted = functional.rms_norm(x, (width,), weight[0], 1e-6)
    torch.testing.assert_close(room[: x.numel()].view(x.shape), wanted)
    assert (room[x.numel() :] == 7).all()


def test_norms_of_what_is_not_finite_are_as_torch_has_them(
    centred: bool, dtype: torch.dtype, place: torch.device
) -> None:
    inf, nan = float("inf"), float("nan")
    rows, weight = (drawn(*shape, place=place, dtype=dtype) for shape in ((7, 40), (40,)))
    rows[:5, 3] = torch.tensor([nan, inf, -inf, torch.finfo(dtype).max, -0.0])
    rows[6] = inf
    for at in (None, nan, inf, -inf):
        weight[5] = 1.0 if at is None else at
        own = (_zero_centred if centred else _plain)(rows, weight, 1e-6)
        ours = kernels.norm(rows, weight, 1e-6, centred)
        torch.testing.assert_close(ours, own, equal_nan=True)


def test_rows_that_lie_far_away_are_found(cuda: torch.device) -> None:
    """Beyond what 32 bits count."""
    if torch.cuda.mem_get_info(cuda)[0] < 2**34:
        pytest.skip("needs 16 GiB")
    last, weight = drawn(6, 4096, place=cuda, dtype=torch.float16).split([5, 1])
    rows = torch.zeros(2**31 // 4096 + 3, 4096, dtype=torch.float16, device=cuda)
    rows[-5:], weight = last, weight[0]
    found = kernels.norm(rows, weight, 1e-6, False)
    torch.testing.assert_close(found[-5:], functional.rms_norm(last, (4096,), weight, 1e-6))
    assert (found[:-5] == 0).all()
    del rows, found
    torch.cuda.empty_cache()


def test_no_tokens_are_no_work(place: torch.device) -> None:
    q, k = (torch.empty(1, n, 0, 8, device=place) for n in (4, 2))
    angles = torch.empty(1, 0, 8, device=place)
    assert [x.shape for x in kernels.turn(q, k, angles, angles)] == [q.shape, k.shape]
    assert kernels.gate(angles, angles, False).shape == angles.shape
    for nothing in (angles, angles.transpose(1, 2)):  # no rows, and empty ones
        weight = torch.ones(nothing.shape[-1], device=place)
        assert kernels.norm(nothing, weight, 1e-6, False).shape == nothing.shape


def test_captured_they_compute_anew_in_every_replay(dtype: torch.dtype, cuda: torch.device) -> None:
    def given(seed: int) -> list[torch.Tensor]:
        q, k = (drawn(1, 17, n, 64, place=cuda, dtype=dtype, seed=seed) for n in (8, 2))
        cos, sin = (drawn(1, 17, 64, place=cuda, dtype=dtype, seed=seed + n) for n in (1, 2))
        return [q.transpose(1, 2), k.transpose(1, 2), cos, sin]

    def run(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, ...]:
        turns = kernels.turn(q, k, cos, sin)
        norms = (kernels.norm(cos, sin[0, 0], 1e-6, centred) for centred in (False, True))
        return *turns, *norms, *(kernels.gate(cos, sin, tanh) for tanh in (False, True))

    static = given(0)
    run(*static)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = run(*static)
    for seed in (100, 200):
        for into, new in zip(static, given(seed), strict=True):
            into.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, outs, run(*given(seed))))


def test_on_another_gpu_they_run_there(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        for place in (other, cuda, other):
            check_turn((8, 2, 64), 17, place, torch.bfloat16)
            gated, by = drawn(2, 1, 5, 1000, place=place, dtype=torch.bfloat16)
            check_norm(gated, by[0, 0].clone(), False)
            check_gate(gated, by, False)
        assert torch.cuda.current_device() == 0


def test_of_tensors_without_memory_shapes_are_told() -> None:
    q, k, angles = (
        torch.empty(shape, device="meta") for shape in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8))
    )
    turned_q, turned_k = kernels.turn(q, k, angles, angles)
    assert (turned_q.shape, turned_k.shape) == (q.shape, k.shape)
    assert kernels.gate(q, q, tanh=False).shape == q.shape
    assert kernels.gate(q, q, tanh=False, out=q) is q
    assert kernels.norm(q, q[0, 0, 0], 1e-6, True).shape == q.shape


def test_later_launches_go_past_triton_and_compute_the_same(
    dtype: torch.dtype, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for other kinds of arguments."""

    def check(tokens: int) -> None:
        rows = drawn(1, tokens, 96, place=cuda, dtype=dtype, seed=tokens)
        check_turn((4, 2, 96), tokens, cuda, dtype)
        check_norm(rows, drawn(96, place=cuda, dtype=dtype), False)
        check_gate(rows, drawn(1, tokens, 96, place=cuda, dtype=dtype), False)

    monkeypatch.setattr(launches, "_compiled", {})
    for tokens in (17, 32):
        check(tokens)
    for kernel in (kernels._turn, kernels._norm, kernels._gate):
        monkeypatch.setattr(kernel, "run", mock.Mock(side_effect=RuntimeError("Triton's way")))
    for tokens in (19, 17, 48, 1027):
        check(tokens)
    odd = _unaligned(drawn(3, 96, place=cuda, dtype=dtype))
    for rows in (odd, odd.double()):
        with pytest.raises(RuntimeError, match="Triton's way"):
            kernels.norm(rows, rows[0].clone(), 1e-6, False)
