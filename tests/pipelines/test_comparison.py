import pytest
import torch
from PIL import Image

from accel.pipelines.comparison import compare, pixel_variance, same_bits
from accel.pipelines.generation import Take

GRADIENT = Image.linear_gradient("L").convert("RGB")


def _take(image: Image.Image = GRADIENT, latents: torch.Tensor | None = None) -> Take:
    return Take([image], torch.arange(4.0) if latents is None else latents)


def test_equal_takes_are_equal() -> None:
    comparison = compare(_take(), _take())
    assert comparison.equal and comparison.proves_something
    assert comparison.largest_latent_difference == 0.0


def test_one_pixel_is_a_difference() -> None:
    other = GRADIENT.copy()
    other.putpixel((3, 3), (1, 2, 3))
    assert not compare(_take(), _take(other)).equal


def test_one_bit_of_a_latent_is_a_difference() -> None:
    other = torch.arange(4.0)
    other[2] = torch.nextafter(other[2], torch.tensor(9.0))
    comparison = compare(_take(), _take(latents=other))
    assert comparison.pictures_equal
    assert comparison.latents_equal is False
    assert not comparison.equal
    assert comparison.largest_latent_difference == pytest.approx(2.4e-7, rel=0.1)


def test_flat_pictures_and_nan_prove_nothing() -> None:
    flat = Image.new("RGB", (8, 8), (5, 6, 7))
    assert pixel_variance(_take(flat)) == 0
    assert not compare(_take(flat), _take(flat)).proves_something
    nan = torch.full((4,), torch.nan)
    comparison = compare(_take(latents=nan), _take(latents=nan))
    assert comparison.equal
    assert not comparison.proves_something


def test_without_latents_pictures_decide() -> None:
    comparison = compare(Take([GRADIENT]), Take([GRADIENT]))
    assert comparison.latents_equal is None
    assert comparison.equal and comparison.proves_something


def test_bits_are_compared_not_values() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.zeros(2, 3).T, torch.zeros(3, 2))
    assert same_bits(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16))
