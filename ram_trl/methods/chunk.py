"""What a merge rule sees: one flat fp32 chunk of one tensor, with the update of every agent on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ram_trl.elementwise import gather


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
    total, count, single = torch.zeros_like(base), torch.zeros_like(base, dtype=torch.uint8), base.clone()
    for update, coefficient in zip(updates, coefficients, strict=True):
        gather(base, update.tau, update.active, update.theta, coefficient, total, count, single)
    return total, count, single
