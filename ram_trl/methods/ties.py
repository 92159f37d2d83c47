"""TIES: trim, elect a sign, mean over the agents that agree with it (arXiv 2306.01708)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ram_trl.engine.elementwise import at_least, bits, differ, masked, select
from ram_trl.methods.chunk import Chunk, combine


def ties(chunk: Chunk, scale: float) -> Tensor:
    """
    base + scale · (mean of the τ whose sign is that of Σ τ).

    The trim of the paper is the criterion (`top=0.2` unless another is given), so τ arrives here trimmed.

    Args:
        chunk (`Chunk`):
            The entries to merge.
        scale (`float`):
            Factor on the mean.

    Returns:
        `Tensor`: the merged entries, float32.
    """
    updates = [change.update(chunk.base) for change in chunk.changes]
    total = torch.zeros_like(chunk.base)
    for update in updates:
        total += update.tau
    elected = total.sign_()
    agreeing = []
    for update in updates:
        agrees = update.active & ~differ(update.tau.sign(), elected)
        agreeing.append(dataclasses.replace(update, active=agrees, tau=masked(update.tau, bits(agrees))))
    sums = combine(chunk.base, agreeing, [scale] * len(agreeing))
    mean = sums.total.div_(sums.count.to(torch.float32)).mul_(scale).add_(chunk.base)
    return select(at_least(sums.count, 2), mean, sums.single)
