"""Low-rank fits: the best there is, with an error that is measured."""

from __future__ import annotations

import pytest
import torch

from ram_trl.engine.low_rank import Fit, fit, fit_product


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decaying(rows: int, columns: int, rate: float) -> torch.Tensor:
    """A matrix whose singular values fall by a factor each."""
    u, v = (torch.linalg.qr(random(n, min(rows, columns), seed=n).double())[0] for n in (rows, columns))
    return (u * rate ** torch.arange(min(rows, columns)) @ v.T).float()


def best(matrix: torch.Tensor, rank: int) -> float:
    """Relative error of the best fit (Eckart-Young), in float64."""
    values = torch.linalg.svdvals(matrix.double())
    return float(values[rank:].norm() / values.norm())


def error(found: Fit, matrix: torch.Tensor) -> float:
    return float((found.left.double() @ found.right.double() - matrix.double()).norm() / matrix.double().norm())


def test_product_of_fitting_rank_is_exact():
    left, right = random(60, 7), random(7, 45)
    found = fit_product(left, right, rank=7)
    assert error(found, left.double() @ right.double()) < 2e-7
    assert found.error < 1e-12
    assert error(fit_product(left, right, rank=30), left.double() @ right.double()) < 2e-7


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_product_of_higher_rank_gets_the_best_fit(rank):
    left, right = random(60, 7), random(7, 45)
    found = fit_product(left, right, rank)
    assert found.rank == rank
    assert found.error == pytest.approx(best(left @ right, rank), rel=1e-5)
    assert error(found, left.double() @ right.double()) == pytest.approx(found.error, rel=1e-5)


@pytest.mark.parametrize(("shape", "rate"), [((200, 300), 0.9), ((300, 200), 0.97), ((70, 90), 0.5)])
@pytest.mark.parametrize("rank", [1, 8, 20])
def test_matrix_gets_nearly_the_best_fit(shape, rate, rank):
    matrix = decaying(*shape, rate)
    found = fit(matrix, rank)
    assert found.rank == rank
    assert error(found, matrix) == pytest.approx(found.error, abs=1e-6)
    assert found.error <= 1.001 * best(matrix, rank) + 1e-6


def test_matrix_without_structure_gets_nearly_the_best_fit():
    matrix = random(300, 400)
    assert fit(matrix, 20).error <= 1.003 * best(matrix, 20)


@pytest.mark.parametrize("bound", [0.5, 0.1, 0.01, 1e-4, 0.0])
def test_error_bound_is_kept_by_the_smallest_rank(bound):
    matrix = decaying(150, 200, 0.9)
    found = fit(matrix, max_error=bound)
    assert found.error <= bound + 1e-6
    assert found.rank <= 1 or best(matrix, found.rank - 1) > bound * 0.99
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    of_product = fit_product(u * values, v, max_error=bound)
    assert of_product.error <= bound
    assert of_product.rank == 150 or best(matrix, of_product.rank) <= bound + 1e-7


def test_zero_matrix_has_rank_zero():
    for found in (fit(torch.zeros(5, 4), 3), fit(torch.zeros(5, 4), max_error=0.1)):
        assert (found.rank, found.norm, found.error) == (0, 0, 0)
        assert torch.equal(found.padded(2).left @ found.padded(2).right, torch.zeros(5, 4))


def test_fit_does_not_depend_on_the_global_seed():
    matrix = random(100, 120)
    torch.manual_seed(1)
    one = fit(matrix, 5)
    torch.manual_seed(2)
    two = fit(matrix, 5)
    assert torch.equal(one.left, two.left)
    assert torch.equal(one.right, two.right)
