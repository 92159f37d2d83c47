"""An agent's weights on a chunk, beside what they are compared with: counted, summed, or worked out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ram_trl.config import MergeConfig
from ram_trl.engine import compiled, criterion
from ram_trl.engine.elementwise import on_cpu

WORD = 64
"""Entries whose bits are counted at once."""


@dataclass(frozen=True)
class Survey:
    """
    What an agent changed on a chunk, in numbers.

    Args:
        largest (`float`):
            The largest |τ|, or NaN if there is one.
        square, square_active (`float`):
            Sum of τ², and that of active entries.
        active, up, down (`ndarray[uint64]`):
            Where entries are active, active with τ > 0, and active with τ < 0: a bit each, padded with zeros.
    """

    largest: float
    square: float
    square_active: float
    active: NDArray[np.uint64]
    up: NDArray[np.uint64]
    down: NDArray[np.uint64]


@dataclass(frozen=True)
class Sums:
    """
    What has been summed up on a chunk so far.

    Args:
        total (`Tensor`, float32):
            The sum of τ over the active agents.
        count (`Tensor`, uint8):
            How many are active.
        single (`Tensor`, float32):
            base + coefficient · τ where exactly one agent is active and the base where none is; undefined where
            several are.
    """

    total: Tensor
    count: Tensor
    single: Tensor

    @classmethod
    def none(cls, base: Tensor) -> Sums:
        """Of no agents."""
        return cls(torch.zeros_like(base), torch.zeros_like(base, dtype=torch.uint8), base.clone())


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

    def add_to(self, sums: Sums, base: Tensor, coefficient: float) -> None:
        """As [`Change.add_to`]."""
        sums.total.add_(self.tau)
        sums.count.add_(self.active)
        alone = self.theta if coefficient == 1.0 else base + self.tau * coefficient
        sums.single.copy_(torch.where(self.active, alone, sums.single))


@dataclass(frozen=True)
class Change:
    """
    One agent's weights on a chunk; what it changed is not worked out yet.

    On the CPU it never is as a whole: compiled sweeps read the weights as they are stored. On a GPU it is torch, to
    the same bits.

    Args:
        agent (`str`):
            Name of the agent.
        stored (`Tensor`, float32, bfloat16 or float16):
            Its weights.
        reference (`Tensor`, float32):
            What its task vector is measured against; the same object as the chunk's base where that is it.
        config (`MergeConfig`), threshold (`float`), base_dtype (`torch.dtype`):
            Its criterion, as [`ram_trl.engine.criterion.active`] takes it.
    """

    agent: str
    stored: Tensor
    reference: Tensor
    config: MergeConfig
    threshold: float
    base_dtype: torch.dtype

    def survey(self) -> Survey:
        """What is counted before a merge; `config.weight` is not in it."""
        entries = self.stored.numel()
        masks = np.empty((3, -(-entries // WORD) * WORD), np.bool_)
        masks[:, entries:] = False
        if on_cpu(self.stored):
            arrays = self._array(), self.reference.numpy(), np.float32(self.threshold), self._mask()
            pattern, square, square_active = compiled.survey(*arrays, masks)
            peak = float(np.int32(pattern).view(np.float32))
        else:
            theta = self.stored.to(torch.float32)
            tau = theta - self.reference
            mask, thinned = self._active(theta, tau)
            for row, where in zip(masks, (mask, thinned > 0, thinned < 0), strict=True):
                row[:entries] = where.cpu().numpy()
            peak = float(tau.abs().max()) if entries else 0.0
            square, square_active = (float(values.double().square().sum()) for values in (tau, thinned))
        return Survey(peak, square, square_active, *np.packbits(masks, axis=-1).view(np.uint64))

    def update(self, base: Tensor) -> Update:
        """What it changed, worked out; `base` is the chunk's."""
        theta = self.stored.to(torch.float32)
        active, tau = self._active(theta, theta - self.reference)
        weight = self.config.weight(self.agent)
        if weight != 1:
            tau = tau * weight
        return Update(self.agent, tau, active, theta if self._is_own(base) else base + tau)

    def add_to(self, sums: Sums, base: Tensor, coefficient: float) -> None:
        """
        Adds it to the sums; what it alone would make of an entry is base + coefficient · τ.

        With coefficient 1 that is θ itself: base + (θ − base) differs from θ for a third of all fp32 pairs. The
        product is rounded before the sum (no FMA), so that every path gives the same bits.
        """
        if not on_cpu(self.stored):
            self.update(base).add_to(sums, base, coefficient)
            return
        weight, as_it_is = self.config.weight(self.agent), coefficient == 1.0 and self._is_own(base)
        compiled.gather(
            *(self._array(), self.reference.numpy(), base.numpy(), np.float32(self.threshold), self._mask()),
            *(np.float32(weight), np.float32(coefficient), as_it_is),
            *(sums.total.numpy(), sums.count.numpy(), sums.single.numpy()),
        )

    def tally_upper(self, counts: Tensor) -> None:
        """Adds how many |τ| have each value of the upper 16 bits of their fp32 pattern: int64, shape (2¹⁵,), CPU."""
        compiled.tally_upper(*self._on_cpu(), counts.numpy())

    def split(self, bracket: criterion.Bracket) -> tuple[int, NDArray[np.int32]]:
        """How many |τ| lie above the bracket, and the bit patterns of those within it, less its start."""
        within = np.empty(self.stored.numel() + 1, np.int32)
        bounds = np.int32(bracket.start), np.int32(bracket.stop)
        above, found = compiled.split(*self._on_cpu(), *bounds, within)
        return above, within[:found]

    def _is_own(self, base: Tensor) -> bool:
        """Whether base + τ is meant to be the agent's own weights."""
        return self.reference is base and self.config.weight(self.agent) == 1

    def _active(self, theta: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        return criterion.active(theta, self.reference, tau, self.config, self.threshold, self.base_dtype)

    def _array(self) -> NDArray[np.generic]:
        if self.stored.dtype == torch.bfloat16:
            return self.stored.view(torch.uint16).numpy()
        return self.stored.to(torch.float32).numpy()

    def _mask(self) -> NDArray[np.bool_] | None:
        mask = criterion.differing(self.stored, self.reference, self.config, self.base_dtype)
        return None if mask is None else mask.numpy()

    def _on_cpu(self) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
        if on_cpu(self.stored):
            return self._array(), self.reference.numpy()
        return self.stored.to(torch.float32).cpu().numpy(), self.reference.cpu().numpy()
