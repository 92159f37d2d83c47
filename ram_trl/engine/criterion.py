"""
When an entry counts as changed: the mask m_t of an agent, and the exact search for the `top` threshold.

`top` needs the k-th largest |τ| of a whole agent without holding or gathering it. The bit patterns of non-negative
fp32 numbers sort like the numbers, so counting suffices: a sample of every chunk tells a narrow range of patterns that
the k-th largest should lie in; one pass counts the entries above it and the patterns within it. Should the sample have
misled, a histogram of everything names the range for certain. Counts add up over chunks and ranks, so every layout
finds the same threshold, ties included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ram_trl.config import MergeConfig
from ram_trl.engine.elementwise import bits, differ, masked, thin

UPPER_BINS = 1 << 15
WIDEST = 16
"""Bins of the upper histogram that are searched at once."""


def active(
    theta: Tensor, base: Tensor, tau: Tensor, config: MergeConfig, threshold: float, base_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """
    m_t on a chunk, where the criterion counts the agent's entry as changed; and τ there, +0 elsewhere.

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
        `tuple[Tensor, Tensor]`: bool and float32, of the same length.
    """
    mask = differing(theta, base, config, base_dtype)
    return thin(tau, threshold) if mask is None else (mask, masked(tau, bits(mask)))


def differing(theta: Tensor, base: Tensor, config: MergeConfig, base_dtype: torch.dtype) -> Tensor | None:
    """m_t (bool) of criteria that compare weights, in whatever dtype they come; `None` if |τ| > threshold decides."""
    if config.ulp:
        half = torch.float16 if base_dtype == torch.float16 else torch.bfloat16
        return differ(theta.to(half).to(torch.float32), base.to(half).to(torch.float32))
    if config.top_fraction is None and config.fixed_epsilon == 0:
        return differ(theta.to(torch.float32).view(torch.int32), base.to(torch.float32).view(torch.int32))
    return None


def wanted(fraction: float, entries: int) -> int:
    """k of the `top` criterion: round(fraction · entries), at least 1."""
    return max(1, round(fraction * entries))


@dataclass(frozen=True)
class Bracket:
    """
    Bit patterns among which the k-th largest |τ| is looked for.

    Args:
        start, stop (`int`):
            `start` ≤ pattern < `stop`; never 0, the pattern of an entry that did not change.
    """

    start: int
    stop: int


def bracket(histogram: Tensor, k: int, entries: int) -> Bracket:
    """
    Where the k-th largest of so many entries lies, from the upper histogram of some or all of them.

    Seen all, it is certain; seen some, it is likely, and `kth_pattern` tells.
    """
    seen = int(histogram.sum())
    rank = max(1, round(k * seen / entries))
    middle = low = high = _kth_bin(histogram, rank)
    if seen < entries:
        # Four standard errors, and 2 % for a sample that is not quite like the rest.
        margin = 4 * rank**0.5 + 0.02 * rank
        high = min(_kth_bin(histogram, max(1, round(rank - margin))), middle + WIDEST // 2)
        low = max(_kth_bin(histogram, min(seen, round(rank + margin))), middle - WIDEST // 2)
    return Bracket(max(1, low << 16), (high + 1) << 16)


def kth_pattern(bracket: Bracket, rank: int, within: Tensor) -> int | None:
    """
    The bit pattern of the k-th largest |τ|, if the bracket holds it.

    Args:
        bracket (`Bracket`):
            What was searched.
        rank (`int`):
            k less the number of entries above the bracket.
        within (`Tensor`, int64):
            How many entries have each pattern of the bracket.
    """
    if 1 <= rank <= int(within.sum()):
        return bracket.start + _kth_bin(within, rank)
    # Below the smallest pattern there are only entries that did not change.
    return 0 if rank >= 1 and bracket.start == 1 else None


def strict_threshold(pattern: int) -> float:
    """The fp32 number just below the one with these bits: |τ| ≥ it is |τ| > the result; 0 keeps every τ ≠ 0."""
    return float(np.array(max(0, pattern - 1), np.int32).view(np.float32))


def _kth_bin(histogram: Tensor, k: int) -> int:
    """The bin that holds the k-th largest item, k from 1."""
    from_top = histogram.flip(0).cumsum(0)
    return len(histogram) - 1 - int(torch.searchsorted(from_top, k))
