"""Plain averaging of the agents (model soups, arXiv 2203.05482)."""

from __future__ import annotations

import torch
from torch import Tensor

from ram_trl.methods.chunk import Chunk, combine


def average(chunk: Chunk) -> Tensor:
    """
    base + (Σ τ) / N over all N agents, whether they changed the entry or not.

    Args:
        chunk (`Chunk`):
            The entries to merge.

    Returns:
        `Tensor`: the merged entries, float32.
    """
    agents = len(chunk.updates)
    total, count, single = combine(chunk.base, chunk.updates, [1.0] * agents)
    if agents == 1:
        return single
    return torch.where(count >= 1, chunk.base + total / agents, chunk.base)
