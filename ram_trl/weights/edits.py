"""
What an adapter does to one stored tensor, for any flat range of it: W → θ, in float32.

Products are computed in row blocks whose place and shape depend on the tensor alone, because the last bit of a matrix
product depends on the shapes it is computed in. So every chunk size, thread count and shard layout gives the same θ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 1 << 15
"""Entries of a row block, at most, unless a row is longer: small beside a chunk, so that little is computed twice."""


class Edit(Protocol):
    """A change of one tensor."""

    def apply(self, start: int, stop: int, weights: Tensor) -> Tensor:
        """θ on a flat range, given W there: both 1-D, float32. `weights` may be overwritten."""

    def same(self, other: Edit) -> bool:
        """Whether the other edit does the same, bit for bit."""


class LowRank:
    """
    θ = W + ΔW with ΔW = left · right, for one matrix or a stack of them.

    Args:
        left (`Tensor`, float32, shape (experts, rows, rank)):
            Column factors, scaled.
        right (`Tensor`, float32, shape (experts, rank, columns)):
            Row factors.
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left = left.contiguous()
        self.right = right.contiguous()
        self.rows, self.columns = left.shape[1], right.shape[2]
        self._block_rows = max(1, BLOCK // self.columns)

    def delta(self, start: int, stop: int) -> Tensor:
        """ΔW on a flat range, 1-D, float32."""
        first, row, last = -1, start // self.columns, (stop - 1) // self.columns
        blocks = []
        while row <= last:
            expert, inside = divmod(row, self.rows)
            low = inside - inside % self._block_rows
            high = min(low + self._block_rows, self.rows)
            if first < 0:
                first = (expert * self.rows + low) * self.columns
            blocks.append((self.left[expert, low:high] @ self.right[expert]).view(-1))
            row = expert * self.rows + high
        whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return whole[start - first : stop - first]

    def apply(self, start: int, stop: int, weights: Tensor) -> Tensor:
        return weights.add_(self.delta(start, stop))

    def same(self, other: Edit) -> bool:
        return (
            isinstance(other, LowRank) and torch.equal(self.left, other.left) and torch.equal(self.right, other.right)
        )


class Dora:
    """
    θ = m · (W + ΔW) / ‖W + ΔW‖ by rows or by columns (DoRA, arXiv 2402.09353), with the clean base's W.

    Args:
        low_rank (`LowRank`):
            ΔW.
        magnitude (`Tensor`, float32, 1-D):
            m: one per row or column.
        by_row (`bool`):
            Whether norms are those of rows.
        read (`Callable[[int, int], Tensor]`):
            W on a flat range, 1-D, float32; the result is not written to.
    """

    def __init__(self, low_rank: LowRank, magnitude: Tensor, by_row: bool, read: Callable[[int, int], Tensor]) -> None:
        self.low_rank = low_rank
        self.magnitude = magnitude
        self._by_row = by_row
        self._read = read
        self._factor: Tensor | None = None
        self._lock = threading.Lock()

    def apply(self, start: int, stop: int, weights: Tensor) -> Tensor:
        factor = self._factors()
        index = torch.arange(start, stop)
        columns = self.low_rank.columns
        index = index // columns if self._by_row else index % columns
        return self.low_rank.apply(start, stop, weights).mul_(factor[index])

    def same(self, other: Edit) -> bool:
        return (
            isinstance(other, Dora)
            and torch.equal(self.magnitude, other.magnitude)
            and self.low_rank.same(other.low_rank)
        )

    def _factors(self) -> Tensor:
        with self._lock:
            if self._factor is None:
                self._factor = (self.magnitude.double() / self._squares().sqrt()).float()
            return self._factor

    def _squares(self) -> Tensor:
        """Squared norms, float64, summed over row blocks in order."""
        rows, columns = self.low_rank.rows, self.low_rank.columns
        step = max(1, BLOCK // columns)
        squares = torch.zeros(rows if self._by_row else columns, dtype=torch.float64)
        for low in range(0, rows, step):
            high = min(low + step, rows)
            start, stop = low * columns, high * columns
            block = self.low_rank.apply(start, stop, self._read(start, stop).clone()).view(high - low, columns)
            wide = block.double().square_()
            if self._by_row:
                squares[low:high] = wide.sum(1)
            else:
                squares += wide.sum(0)
        return squares


@dataclass(frozen=True)
class Replace:
    """
    θ is given: a module that was trained whole.

    Args:
        values (`Tensor`, 1-D):
            θ, flat, in the dtype it was saved in.
    """

    values: Tensor

    def apply(self, start: int, stop: int, weights: Tensor) -> Tensor:
        return self.values[start:stop].to(torch.float32, copy=True)

    def same(self, other: Edit) -> bool:
        return isinstance(other, Replace) and torch.equal(self.values, other.values)


@dataclass(frozen=True)
class ReplaceRows:
    """
    Some rows of θ are given: single tokens that were trained.

    Args:
        rows (`Tensor`, int64, shape (k,)):
            Which rows, ascending.
        values (`Tensor`, float32, shape (k, columns)):
            θ there.
    """

    rows: Tensor
    values: Tensor

    def apply(self, start: int, stop: int, weights: Tensor) -> Tensor:
        columns = self.values.shape[1]
        first, last = start // columns, (stop - 1) // columns
        inside = ((self.rows >= first) & (self.rows <= last)).nonzero().view(-1).tolist()
        for place in inside:
            begin = int(self.rows[place]) * columns
            low, high = max(begin, start), min(begin + columns, stop)
            weights[low - start : high - start] = self.values[place, low - begin : high - begin]
        return weights

    def same(self, other: Edit) -> bool:
        return (
            isinstance(other, ReplaceRows)
            and torch.equal(self.rows, other.rows)
            and torch.equal(self.values, other.values)
        )


@dataclass(frozen=True)
class Shift:
    """
    θ = W + shift: the bias of a low-rank layer.

    Args:
        values (`Tensor`, float32, 1-D):
            The shift, scaled.
    """

    values: Tensor

    def apply(self, start: int, stop: int, weights: Tensor) -> Tensor:
        return weights.add_(self.values[start:stop])

    def same(self, other: Edit) -> bool:
        return isinstance(other, Shift) and torch.equal(self.values, other.values)
