"""
The numbers of a merge: what was counted, and what follows from it before any weight is merged.

Everything here is small and exact: counts are integers, and λ is rounded to fp32 once, so that ranks, jobs and the
report agree to the bit on what is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from ram_trl.config import MergeConfig

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """
    What N agents changed in some entries; additive over entries, except `largest`, which is a maximum.

    Args:
        entries (`int`):
            Entries looked at.
        both (`ndarray[int64]`, shape (N, N)):
            `both[i, j]`: entries active in agents i and j; on the diagonal, active in i.
        agree (`ndarray[int64]`, shape (N, N)):
            Of those, how many have task vectors of the same sign.
        shared (`ndarray[int64]`, shape (N,)):
            Entries active in agent i and in at least one other.
        touched (`int`):
            Entries active in at least one agent.
        touched_by_many (`int`):
            Entries active in at least two.
        conflicting (`int`):
            Of those, how many have task vectors of both signs.
        largest (`ndarray[float64]`, shape (N,)):
            Largest |τ| of each agent, active or not.
        square (`ndarray[float64]`, shape (N,)):
            Sum of τ² of each agent.
        square_active (`ndarray[float64]`, shape (N,)):
            Sum of τ² over its active entries.
    """

    entries: int
    both: IntArray
    agree: IntArray
    shared: IntArray
    touched: int
    touched_by_many: int
    conflicting: int
    largest: FloatArray
    square: FloatArray
    square_active: FloatArray

    @property
    def active(self) -> IntArray:
        """Active entries of each agent, shape (N,)."""
        return np.diagonal(self.both)

    @property
    def unique(self) -> IntArray:
        """Entries active in that agent alone, shape (N,)."""
        return self.active - self.shared

    @classmethod
    def zero(cls, agents: int) -> Counts:
        """The counts of no entries."""
        square, vector = np.zeros((agents, agents), np.int64), np.zeros(agents, np.int64)
        real = np.zeros(agents)
        return cls(0, square, square, vector, 0, 0, 0, real, real, real)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.entries + other.entries,
            self.both + other.both,
            self.agree + other.agree,
            self.shared + other.shared,
            self.touched + other.touched,
            self.touched_by_many + other.touched_by_many,
            self.conflicting + other.conflicting,
            np.maximum(self.largest, other.largest),  # np.maximum keeps a NaN
            self.square + other.square,
            self.square_active + other.square_active,
        )


def rho(shared: int, unique: int) -> float | None:
    """ρ_t = shared_t / unique_t (arXiv 2601.13572, Eq. 1-7); `None` when the agent has no unique entry."""
    return shared / unique if unique else None


def rescale(shared: int, unique: int, r: float, alpha: float) -> float:
    """
    λ_t = 1 + r · clip(ρ_t, 0, α) (arXiv 2601.13572, Eq. 1-7), rounded to fp32; 1 when the agent has no unique entry.
    """
    ratio = rho(shared, unique)
    return 1.0 if ratio is None else float(np.float32(1 + r * min(ratio, alpha)))


@dataclass(frozen=True)
class Plan:
    """
    A merge, decided: which entries are active and by how much unique ones are rescaled.

    Args:
        config (`MergeConfig`):
            The knobs.
        agents (`tuple[str, ...]`):
            Names, sorted; the order of all arrays here and of every sum.
        thresholds (`tuple[float, ...]`):
            Per agent, an entry is active iff |τ| is above it (unused by `ulp`, and by `epsilon=0`).
        counts (`Mapping[str, Counts]`):
            Per tensor, over the whole model (all ranks).
    """

    config: MergeConfig
    agents: tuple[str, ...]
    thresholds: tuple[float, ...]
    counts: Mapping[str, Counts]
    total: Counts = field(init=False)

    def __post_init__(self) -> None:
        total = reduce(Counts.__add__, self.counts.values(), Counts.zero(len(self.agents)))
        object.__setattr__(self, "total", total)

    def lambdas(self, name: str) -> tuple[float, ...]:
        """λ of every agent for tensor `name`: the same for all tensors unless ρ is counted per tensor."""
        if self.config.method != "ram":
            return (1.0,) * len(self.agents)
        counts = self.total if self.config.rho == "global" else self.counts[name]
        return tuple(
            rescale(int(shared), int(unique), self.config.r, self.config.alpha)
            for shared, unique in zip(counts.shared, counts.unique, strict=True)
        )
