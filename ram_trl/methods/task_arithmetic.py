"""Task arithmetic: the scaled sum of task vectors (arXiv 2212.04089)."""

from __future__ import annotations

from torch import Tensor

from ram_trl.elementwise import at_least, select
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
    total, count, single = combine(chunk.base, chunk.updates, [scale] * chunk.agents)
    return select(at_least(count, 2), total.mul_(scale).add_(chunk.base), single)
