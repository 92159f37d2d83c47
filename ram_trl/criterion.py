"""
When an entry counts as changed: the mask m_t of an agent, and the exact search for the `top` threshold.

`top` needs the k-th largest |τ| of a whole agent without holding or gathering it. The bit patterns of non-negative
fp32 numbers sort like the numbers, so two passes of counting suffice: one over the upper 16 bits, which names the bin
the k-th largest lies in, and one over the lower 16 bits of the entries in that bin. Counts add up over chunks and
ranks, so every layout finds the same threshold, ties included.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ram_trl.config import MergeConfig

UPPER_BINS = 1 << 15
LOWER_BINS = 1 << 16


def active_mask(
    theta: Tensor, base: Tensor, tau: Tensor, config: MergeConfig, threshold: float, base_dtype: torch.dtype
) -> Tensor:
    """
    m_t on a chunk: where the criterion counts the agent's entry as changed.

    Args:
        theta (`Tensor`, float32):
            The agent's weights.
        base (`Tensor`, float32):
            The weights it is compared with.
        tau (`Tensor`, float32):
            theta − base.
        config (`MergeConfig`):
            Names the criterion.
        threshold (`float`):
            Strict lower bound on |τ| of `epsilon` and `top`.
        base_dtype (`torch.dtype`):
            How the base stores the tensor; tells `ulp` which 16 bits to round to.

    Returns:
        `Tensor`: bool, of the same length.
    """
    if config.ulp:
        half = torch.float16 if base_dtype == torch.float16 else torch.bfloat16
        return theta.to(half) != base.to(half)
    if config.top_fraction is None and config.fixed_epsilon == 0:
        return theta.view(torch.int32) != base.view(torch.int32)
    return tau.abs() > threshold


def wanted(fraction: float, entries: int) -> int:
    """k of the `top` criterion: round(fraction · entries), at least 1."""
    return max(1, round(fraction * entries))


def upper_histogram(tau: Tensor) -> Tensor:
    """How many |τ| have each value of the upper 16 bits of their fp32 pattern; int64, shape (2¹⁵,)."""
    return torch.bincount(_pattern(tau) >> 16, minlength=UPPER_BINS)


def lower_histogram(tau: Tensor, upper: int) -> Tensor:
    """The same over the lower 16 bits of the entries whose upper bits are `upper`; int64, shape (2¹⁶,)."""
    pattern = _pattern(tau)
    return torch.bincount(pattern[(pattern >> 16) == upper] & 0xFFFF, minlength=LOWER_BINS)


def kth_bin(histogram: Tensor, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest item (k from 1), and its rank among the items of that bin."""
    from_top = histogram.flip(0).cumsum(0)
    position = int(torch.searchsorted(from_top, k))
    above = int(from_top[position - 1]) if position else 0
    return len(histogram) - 1 - position, k - above


def strict_threshold(upper: int, lower: int) -> float:
    """The fp32 number just below the one with these bits: |τ| ≥ it is |τ| > the result; 0 keeps every τ ≠ 0."""
    below = max(0, (upper << 16 | lower) - 1)
    return float(np.array(below, np.int32).view(np.float32))


def _pattern(tau: Tensor) -> Tensor:
    return tau.abs().view(torch.int32)
