"""Task arithmetic: the scaled sum of task vectors (arXiv 2212.04089)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ram_trl.engine.elementwise import at_least, select
from ram_trl.methods.change import Change, Update
from ram_trl.methods.chunk import Chunk, combine


def task_arithmetic(chunk: Chunk, scale: float) -> Tensor:
    """
    base + scale · Σ τ.

    Args:
        chunk (`Chunk`):
            The entries to merge.
        scale (`float`):
            Factor on the sum.

    Returns:
        `Tensor`: the merged entries, float32.
    """
    return scaled_sum(chunk.base, chunk.changes, chunk.agents, scale)


def scaled_sum(base: Tensor, changes: Iterable[Change | Update], agents: int, scale: float) -> Tensor:
    """base + scale · Σ τ over so many agents."""
    sums = combine(base, changes, [scale] * agents)
    return select(at_least(sums.count, 2), sums.total.mul_(scale).add_(base), sums.single)
