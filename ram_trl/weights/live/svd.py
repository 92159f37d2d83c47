"""
`svd`: an adapter in training as the best fit of what the base lacks, layer by layer.

The ranks of a job share the layers out, one fit each, and then share the factors, so that all hold the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ram_trl.engine.low_rank import Fit, fit
from ram_trl.team import Team

NOISE = 1e-6
"""Directions whose singular value is smaller, relative to the largest, are left free."""


class BestFit:
    """
    Fits the layers of an adapter and adds up what they miss.

    Args:
        team (`Team`):
            The ranks of the job.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._turn = 0
        self._whole = self._missed = 0.0
        """Squares, of what this rank was the one to count."""

    def factors(self, lacking: Tensor, a: Tensor, b: Tensor, kind: str | None, scale: float) -> tuple[Tensor, Tensor]:
        """
        The factors of a layer. Collective: all ranks, with the same values.

        Args:
            lacking (`Tensor`, float32, shape (rows, columns)):
                What the layer's weight is to differ from the base's by.
            a (`Tensor`), b (`Tensor`):
                The factors as they are.
            kind (`str`, *optional*):
                The kind of module, as `Anatomy` has it.
            scale (`float`):
                What peft multiplies B·A with.

        Returns:
            `tuple[Tensor, Tensor]`: A and B, flat.
        """
        owner = self._turn % self._team.world
        self._turn += 1
        mine = self._team.rank == owner
        found = self._team.together(partial(_fitted, lacking, len(a)) if mine else lambda: None)
        if found is not None:
            self._whole += found.norm**2
            self._missed += (found.norm * found.error) ** 2
        made = (torch.zeros_like(a), torch.zeros_like(b)) if found is None else _as_factors(found, a, b, kind, scale)
        shared = [self._team.reduce(values, "sum").reshape(-1) for values in made]
        return shared[0], shared[1]

    def miss(self, lacking: Tensor) -> None:
        """Counts what no adapter holds; of a tensor that several ranks hold whole, one of them calls this."""
        square = float(lacking.double().square().sum())
        self._whole += square
        self._missed += square

    def error(self) -> float:
        """The share of all that was to be held that is missed. Collective."""
        sums = self._team.reduce(torch.tensor([self._whole, self._missed], dtype=torch.float64), "sum")
        return float((sums[1] / sums[0]).sqrt()) if sums[0] > 0 else 0.0


def _fitted(lacking: Tensor, rank: int) -> Fit:
    return fit(lacking, min(rank, *lacking.shape))


def _as_factors(found: Fit, a: Tensor, b: Tensor, kind: str | None, scale: float) -> tuple[Tensor, Tensor]:
    """
    A and B whose product is the fit, as peft keeps them. Directions that the fit leaves free change nothing and can be
    learnt: one factor is zero there and the other stays.
    """
    a, b = a.clone(), b.clone()
    flipped = kind in ("conv1d", "embedding")
    rows, columns = (found.left.T, found.right.T) if flipped else (found.right, found.left)
    (a if kind == "embedding" else b).zero_()
    values = columns.square().sum(0)  # the singular values
    kept = int((values > NOISE * values.max()).sum()) if found.rank else 0
    a[:kept], b[:, :kept] = rows[:kept], columns[:, :kept] / scale
    return a, b
