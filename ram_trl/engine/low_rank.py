"""
The best fit of a matrix by one of low rank: exactly from factors, or by a randomized SVD (arXiv 0909.4061).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

OVERSAMPLING = 10
POWER_STEPS = 4
SEED = 0
FINE_ERROR = 1e-3
"""Below this, an error cannot be told from rounding in float32 norms, and the SVD is computed whole, in float64."""

LARGE_ERROR = 0.5
"""An adapter that misses more than this share of what it is to hold is warned about."""


@dataclass(frozen=True)
class Fit:
    """
    left · right, close to a matrix.

    Args:
        left (`Tensor`, float32, shape (rows, rank)), right (`Tensor`, float32, shape (rank, columns)):
            The factors; the singular values are shared between them.
        norm (`float`):
            Frobenius norm of the matrix.
        error (`float`):
            Frobenius norm of the difference, relative to `norm`; 0 for a zero matrix.
    """

    left: Tensor
    right: Tensor
    norm: float
    error: float

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def padded(self, rank: int) -> Fit:
        """The same product with factors of a higher rank, the rest zero."""
        more = rank - self.rank
        return Fit(pad(self.left, (0, more)), pad(self.right, (0, 0, 0, more)), self.norm, self.error)


def fit_product(left: Tensor, right: Tensor, rank: int | None = None, max_error: float | None = None) -> Fit:
    """
    The best fit of left · right, from QR decompositions of the factors: the product is never made.

    Args:
        left (`Tensor`, shape (rows, k)), right (`Tensor`, shape (k, columns)):
            The factors.
        rank (`int`, *optional*):
            Largest rank of the fit.
        max_error (`float`, *optional*):
            Take the smallest rank whose relative error is no larger; `rank` is not looked at.

    Returns:
        `Fit`: exact up to float32 if the rank of the product is no larger than `rank`.
    """
    outer, upper = torch.linalg.qr(left.double())
    inner, lower = torch.linalg.qr(right.double().T)
    u, values, v = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    kept = _kept(values, float(values.square().sum().sqrt()), rank, max_error)
    return _made(outer @ u, values, v @ inner.T, kept, float(values.square().sum().sqrt()))


def fit(matrix: Tensor, rank: int | None = None, max_error: float | None = None) -> Fit:
    """
    The best fit of a matrix.

    Args:
        matrix (`Tensor`, float32, shape (rows, columns)):
            The matrix.
        rank (`int`, *optional*), max_error (`float`, *optional*):
            As for `fit_product`.

    Returns:
        `Fit`: its error is measured, not estimated.
    """
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
    limit = min(matrix.shape)
    if norm == 0:
        return _made(matrix[:, :0].double(), matrix.new_zeros(0).double(), matrix[:0].double(), 0, norm)
    wanted = 16 if rank is None or max_error is not None else rank
    while True:
        size = wanted + wanted // 2 + OVERSAMPLING
        if 3 * size > limit or (max_error is not None and max_error < FINE_ERROR):
            u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
            return _made(u, values, v, _kept(values, norm, rank, max_error), norm)
        u, values, v = _sketch(matrix, size)
        if max_error is None or _tail(values[:wanted], norm) <= max_error:
            break
        wanted *= 2
    found = _made(u, values, v, _kept(values[:wanted], norm, rank, max_error), norm)
    residual = float(torch.linalg.vector_norm(matrix - found.left @ found.right, dtype=torch.float64))
    return Fit(found.left, found.right, norm, residual / norm)


def _sketch(matrix: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular triplets, by subspace iteration from a fixed random start."""
    generator = torch.Generator().manual_seed(SEED)
    start = torch.randn(matrix.shape[1], size, generator=generator)
    basis = torch.linalg.qr(matrix @ start)[0]
    for _ in range(POWER_STEPS):
        basis = torch.linalg.qr(matrix.T @ basis)[0]
        basis = torch.linalg.qr(matrix @ basis)[0]
    u, values, v = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis.double() @ u.double(), values.double(), v.double()


def _tail(values: Tensor, norm: float) -> float:
    """Relative error of keeping these singular values."""
    return float((1 - (values / norm).square().sum()).clamp(min=0).sqrt()) if norm else 0.0


def _kept(values: Tensor, norm: float, rank: int | None, max_error: float | None) -> int:
    if max_error is None:
        return len(values) if rank is None else min(rank, len(values))
    if norm == 0:
        return 0
    # What is left out is summed from the smallest value on: 1 minus the rest would lose it.
    missed = (norm**2 - values.square().sum()).clamp(min=0) if len(values) else torch.tensor(norm**2)
    missed = torch.where(missed < 1e-12 * norm**2, 0.0, missed)
    tails = torch.cat([values.square().flip(0).cumsum(0).flip(0), values.new_zeros(1)]) + missed
    fits = (tails.sqrt() / norm <= max_error).nonzero()
    return int(fits[0]) if len(fits) else len(values)


def _made(u: Tensor, values: Tensor, v: Tensor, kept: int, norm: float) -> Fit:
    root = values[:kept].sqrt()
    left, right = u[:, :kept] * root, root[:, None] * v[:kept]
    error = float(values[kept:].square().sum().sqrt()) / norm if norm else 0.0
    return Fit(left.float().contiguous(), right.float().contiguous(), norm, error)
