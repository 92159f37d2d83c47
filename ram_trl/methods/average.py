"""Plain averaging of the agents (model soups, arXiv 2203.05482)."""

from __future__ import annotations

from torch import Tensor

from ram_trl.engine.elementwise import at_least, divided, select
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
    sums = combine(chunk.base, chunk.changes, [1.0] * chunk.agents)
    if chunk.agents == 1:
        return sums.single
    return select(at_least(sums.count, 1), divided(sums.total, chunk.agents).add_(chunk.base), chunk.base)
