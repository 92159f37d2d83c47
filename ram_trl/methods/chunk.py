"""What a merge rule sees: one flat fp32 chunk of one tensor, with the update of every agent on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ram_trl.elementwise import bits


@dataclass(frozen=True)
class Update:
    """
    One agent's update on a chunk; all three tensors are flat and of the chunk's length.

    Args:
        agent (`str`):
            Name of the agent.
        tau (`Tensor`, float32):
            Task vector times the agent's weight where active, 0 elsewhere.
        active (`Tensor`, bool):
            The agent's mask m_t: where its criterion counts the entry as changed.
        theta (`Tensor`, float32):
            base + tau; the agent's own weights, to the bit, where its weight is 1. Read where active only.
    """

    agent: str
    tau: Tensor
    active: Tensor
    theta: Tensor

    def on(self, base: Tensor, coefficient: float) -> Tensor:
        """
        `base + coefficient · tau`, float32.

        With coefficient 1 it is `theta` itself: base + (θ − base) differs from θ for a third of all fp32 pairs. The
        product is rounded before the sum (no FMA), so that every path gives the same bits.
        """
        return self.theta if coefficient == 1.0 else base + self.tau * coefficient


@dataclass(frozen=True)
class Chunk:
    """
    Entries `start … start + len(base)` of the flattened tensor `name`.

    Args:
        name (`str`):
            Name of the tensor.
        start (`int`):
            Flat index of the first entry.
        base (`Tensor`, float32):
            The base's weights.
        updates (`Iterable[Update]`):
            One per agent, in sorted order of agent names: the order of every sum. To be gone through once: each is
            made when it is its turn, and the cache has room for few.
        agents (`int`):
            How many there are, at most 255.
    """

    name: str
    start: int
    base: Tensor
    updates: Iterable[Update]
    agents: int


def combine(base: Tensor, updates: Iterable[Update], coefficients: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """
    The three ingredients of a rule, in one sweep over the agents.

    Returns:
        `tuple[Tensor, Tensor, Tensor]`: `total`, the sum of τ over the active agents; `count`, how many are active
        (uint8); `single`, which is base + coefficient · τ where exactly one agent is active and the base where none
        is (undefined where several are).
    """
    base_bits = base.view(torch.int32)
    total = torch.zeros_like(base)
    count = torch.zeros_like(base, dtype=torch.uint8)
    flips = torch.zeros_like(base_bits)
    for update, coefficient in zip(updates, coefficients, strict=True):
        total += update.tau
        count += update.active.view(torch.uint8)
        flips ^= (update.on(base, coefficient).view(torch.int32) ^ base_bits).bitwise_and_(bits(update.active))
    return total, count, flips.bitwise_xor_(base_bits).view(torch.float32)
