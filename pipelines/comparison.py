"""Whether two takes are the same: latents and PNG bytes, bit for bit, of pictures that vary.

A flat or non-finite picture is equal to its like for the wrong reason, so it proves nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.pipelines.generation import Take
from accel.pipelines.picture import png_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Comparison:
    """One take against another. `latents_equal` is None where a pipeline shows no latents;
    `largest_latent_difference` is absolute, and not a number where one side is not."""

    pictures_equal: bool
    latents_equal: bool | None
    largest_latent_difference: float | None
    pixel_variance: float
    finite: bool

    @property
    def proves_something(self) -> bool:
        """Whether the pictures vary and the latents are finite."""
        return self.pixel_variance > 0 and self.finite

    @property
    def equal(self) -> bool:
        """Whether latents and pictures are the same, bit for bit."""
        return self.pictures_equal and self.latents_equal is not False


def compare(reference: Take, other: Take) -> Comparison:
    """Compares `other` with `reference`; both hold latents if the pipeline shows them."""
    pictures = [[png_bytes(image) for image in take.images] for take in (reference, other)]
    equal, difference, finite = None, None, True
    first, second = reference.latents, other.latents
    if first is not None and second is not None:
        equal = same_bits(first, second)
        finite = bool(first.isfinite().all() and second.isfinite().all())
        if first.shape == second.shape:
            difference = float((first.cpu().double() - second.cpu().double()).abs().max())
    variance = min(pixel_variance(reference), pixel_variance(other))
    return Comparison(pictures[0] == pictures[1], equal, difference, variance, finite)


def pixel_variance(take: Take) -> float:
    """The variance of a take's pixels, the mean over channels; of several pictures the smallest."""
    from PIL import ImageStat

    variances = [ImageStat.Stat(image).var for image in take.images]
    return float(min(sum(channels) / len(channels) for channels in variances))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equality of shape, dtype and every bit: NaN equals the same NaN, 0.0 is not -0.0."""
    import torch

    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    bytes_of = [t.detach().cpu().contiguous().view(torch.uint8) for t in (first, second)]
    return torch.equal(*bytes_of)
