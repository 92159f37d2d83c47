"""Reinforced Agent Merging, RAM and RAM+ (arXiv 2601.13572, Eq. 1-7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ram_trl.elementwise import at_least, has_negative_zero, select
from ram_trl.methods.chunk import Chunk, combine


def ram(chunk: Chunk, lambdas: Sequence[float]) -> Tensor:
    """
    Mean over the agents that changed an entry; an entry that one agent alone changed keeps its change, times λ.

    Args:
        chunk (`Chunk`):
            The entries to merge.
        lambdas (`Sequence[float]`):
            λ_t of every agent in the chunk's order; 1 is RAM, above 1 RAM+.

    Returns:
        `Tensor`: the merged entries, float32.
    """
    if 1.0 not in lambdas:
        return _all_rescaled(chunk, lambdas)
    total, count, single = combine(chunk.base, chunk.updates, lambdas)
    mean = total.div_(count.to(torch.float32)).add_(chunk.base)
    return select(at_least(count, 2), mean, single)


def _all_rescaled(chunk: Chunk, lambdas: Sequence[float]) -> Tensor:
    """The same in fewer operations, which takes that λ > 1: no agent's weights are taken over as they are."""
    total = torch.zeros_like(chunk.base)
    rescaled = torch.zeros_like(chunk.base)
    count = torch.zeros_like(chunk.base, dtype=torch.uint8)
    for update, coefficient in zip(chunk.updates, lambdas, strict=True):
        total += update.tau
        rescaled += update.tau * coefficient  # where one agent alone is active, the others add 0
        count += update.active.view(torch.uint8)
    merged = select(at_least(count, 2), total.div_(count.to(torch.float32)), rescaled).add_(chunk.base)
    return select(at_least(count, 1), merged, chunk.base) if has_negative_zero(chunk.base) else merged
