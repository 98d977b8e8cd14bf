"""Float32 copies of low-precision weights: what the optimizer moves, and their running mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LONGEST_GRADIENT = 1.0
"""Norm to which gradients are shortened."""


class Masters:
    """Masters of `weights`, started from the equally shaped `originals`.

    `rate` and `keep` (the share of the old in the running mean) are tensors on the weights' device:
    `set` changes them without a new capture of the graph that `step` is in.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], originals: Sequence[torch.Tensor], decay: float
    ) -> None:
        self.weights = list(weights)
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        device = self.masters[0].device
        # Not from the rounded weights, but in their memory layout.
        torch._foreach_copy_(self.masters, [weight.detach().to(device) for weight in originals])
        self.means = [master.clone() for master in self.masters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.decay = decay
        self.rate = torch.zeros((), device=device)
        self.keep = torch.ones((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=self.rate,
            betas=(0.9, 0.99),
            weight_decay=0.01,
            fused=True,
            capturable=device.type == "cuda",
        )

    def set(self, number: int, rate: float) -> None:
        """Prepares step `number`; the running mean forgets faster in the first ones."""
        self.rate.fill_(rate)
        self.keep.fill_(min(self.decay, (number + 1) / (number + 10)))

    def forget_gradients(self) -> None:
        """Call before a backward pass."""
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """One update from the weights' gradients; the gradients' norm."""
        torch._foreach_copy_(_gradients(self.masters), _gradients(self.weights))
        norm = torch.nn.utils.clip_grad_norm_(self.masters, LONGEST_GRADIENT)
        # The fused optimizer skips the update itself, without a word to the host.
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        torch._foreach_mul_(self.means, self.keep)
        torch._foreach_add_(self.means, torch._foreach_mul(self.masters, 1 - self.keep))
        return norm

    @torch.no_grad()
    def write_means(self, targets: Sequence[torch.Tensor]) -> None:
        """Puts the running means into `targets`."""
        torch._foreach_copy_(list(targets), self.means)


def _gradients(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of weights, all of which took part in the loss."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert len(gradients) == len(weights)
    return gradients
