"""
Sweeps, comparisons and selections over flat tensors, several times faster on the CPU than torch's own.

On the CPU sweeps are compiled (`compiled.py`), and a choice between two numbers is made on their bits, with masks that
have all bits set or none: plain integer arithmetic, which is vectorized everywhere, and exact. On a GPU it is torch.
All ways give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ram_trl import compiled

WORD = 64
"""Entries whose bits are counted at once."""


def on_cpu(tensor: Tensor) -> bool:
    """Whether numpy and compiled code can work on it."""
    return tensor.device.type == "cpu"


def thin(tau: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Where |τ| > threshold, bool; and τ there, +0 elsewhere. All in float32."""
    if not on_cpu(tau):
        thinned = torch.hardshrink(tau, threshold)
        return thinned != 0, thinned
    thinned, mask = torch.empty_like(tau), torch.empty_like(tau, dtype=torch.bool)
    compiled.thin(tau.numpy(), np.float32(threshold), thinned.numpy(), mask.numpy())
    return mask, thinned


def differ(left: Tensor, right: Tensor) -> Tensor:
    """Where two tensors of a dtype that numpy knows are not equal; bool."""
    if not on_cpu(left):
        return left != right
    return torch.from_numpy(left.numpy() != right.numpy())


def bits(where: Tensor) -> Tensor:
    """A bool tensor as int32 with all bits set where it is true, and none elsewhere."""
    return where.to(torch.int32).neg_()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` (float32) where the mask's bits are set, +0 elsewhere."""
    return (values.view(torch.int32) & mask).view(torch.float32)


def at_least(count: Tensor, number: int) -> Tensor:
    """A mask, as bits, of where a count (uint8) reaches a number."""
    if not on_cpu(count):
        return bits(count >= number)
    return bits(torch.from_numpy(count.numpy() >= number))


def select(mask: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """`values` where the mask's bits are set, `others` elsewhere; float32, to the bit."""
    other_bits = others.view(torch.int32)
    return ((values.view(torch.int32) ^ other_bits).bitwise_and_(mask).bitwise_xor_(other_bits)).view(torch.float32)


def largest(values: Tensor) -> float:
    """The largest |value|, or NaN if there is one; 0 for no values."""
    if not values.numel():
        return 0.0
    if not on_cpu(values):
        return float(values.abs().max())
    held = values.numpy()
    return float(np.maximum(held.max(), -held.min()))


def divided(values: Tensor, by: float) -> Tensor:
    """values / by in float32, in place; on CUDA torch would multiply by the reciprocal of a plain number."""
    return values.div_(torch.tensor(by, dtype=torch.float32, device=values.device))


def how_many(where: Tensor) -> int:
    """Number of true entries of a bool tensor."""
    if not on_cpu(where):
        return int(torch.count_nonzero(where))
    return int(np.count_nonzero(where.numpy()))


@dataclass(frozen=True)
class Survey:
    """
    An agent's update on a chunk in numbers.

    Args:
        largest (`float`):
            The largest |τ|, or NaN if there is one.
        square, square_active (`float`):
            Sum of τ², and of those that are active.
        active, up, down (`ndarray[uint64]`):
            Active entries, those with τ > 0, and those with τ < 0, a bit each, padded with zeros.
    """

    largest: float
    square: float
    square_active: float
    active: NDArray[np.uint64]
    up: NDArray[np.uint64]
    down: NDArray[np.uint64]


def survey(tau: Tensor, thinned: Tensor, mask: Tensor) -> Survey:
    """Looks at τ (float32), the same with +0 where it is not active, and where it is active (bool)."""
    entries = tau.numel()
    masks = np.empty((3, -(-entries // WORD) * WORD), np.bool_)
    masks[:, entries:] = False
    if not on_cpu(tau):
        for row, where in zip(masks, (mask, thinned > 0, thinned < 0), strict=True):
            row[:entries] = where.cpu().numpy()
        peak = float(tau.abs().max()) if entries else 0.0
        square, square_active = (float(values.double().square().sum()) for values in (tau, thinned))
    else:
        pattern, square, square_active = compiled.survey(tau.numpy(), thinned.numpy(), mask.numpy(), masks)
        peak = float(np.int32(pattern).view(np.float32))
    return Survey(peak, square, square_active, *np.packbits(masks, axis=-1).view(np.uint64))


def gather(
    base: Tensor,
    tau: Tensor,
    mask: Tensor,
    theta: Tensor,
    coefficient: float,
    total: Tensor,
    count: Tensor,
    single: Tensor,
) -> None:
    """
    Takes in an agent: τ into `total`; where active, 1 into `count` (uint8) and base + coefficient · τ into `single`.

    With coefficient 1 the latter is `theta` itself: base + (θ − base) differs from θ for a third of all fp32 pairs.
    The product is rounded before the sum (no FMA), so that every path gives the same bits.
    """
    if not on_cpu(base):
        total.add_(tau)
        count.add_(mask)
        single.copy_(torch.where(mask, theta if coefficient == 1.0 else base + tau * coefficient, single))
        return
    tensors = (base, tau, mask, theta, total, count, single)
    compiled.gather(*(tensor.numpy() for tensor in tensors), np.float32(coefficient))


def mean_where_shared(base: Tensor, total: Tensor, count: Tensor, single: Tensor) -> Tensor:
    """base + total / count where `count` is 2 or more, `single` elsewhere."""
    if not on_cpu(base):
        return torch.where(count >= 2, total / count + base, single)
    compiled.mean_where_shared(*(tensor.numpy() for tensor in (base, total, count, single)))
    return single


def split(tau: Tensor, start: int, stop: int) -> tuple[int, NDArray[np.int32]]:
    """How many |τ| have a bit pattern of `stop` or above; and the patterns from `start` to there, less `start`."""
    within = np.empty(tau.numel() + 1, np.int32)
    above, found = compiled.split(tau.cpu().numpy(), np.int32(start), np.int32(stop), within)
    return above, within[:found]
