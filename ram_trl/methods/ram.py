"""Reinforced Agent Merging, RAM and RAM+ (arXiv 2601.13572, Eq. 1-7)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ram_trl.engine.elementwise import mean_where_shared
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
    sums = combine(chunk.base, chunk.changes, lambdas)
    return mean_where_shared(chunk.base, sums.total, sums.count, sums.single)
