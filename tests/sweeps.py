"""Numbers to try sweeps over flat tensors on, and how what runs on a GPU is tried without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ram_trl.engine import elementwise
from ram_trl.methods import change

Result = TypeVar("Result")

POSITIVE = [0.0, 1.0, 1e-5, 1e-40, 1e-45, 3.4e38, float("inf"), float("nan")]
SPECIAL = [*POSITIVE, *(-number for number in POSITIVE)]
NUMBERS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))


def row(length: int) -> st.SearchStrategy[Tensor]:
    numbers = st.lists(NUMBERS, min_size=length, max_size=length)
    return numbers.map(lambda held: torch.tensor(held, dtype=torch.float32))


def tensors(count: int) -> st.SearchStrategy[tuple[Tensor, ...]]:
    """Float32 tensors of one length, from none to more than a block of the compiled sweeps."""
    lengths = st.sampled_from([0, 1, 2, 63, 64, 65, 130])
    return lengths.flatmap(lambda length: st.tuples(*[row(length)] * count))


def finite(values: Tensor) -> Tensor:
    """NaN and Inf are refused before anything is merged."""
    return torch.nan_to_num(values, nan=2.0, posinf=3.0, neginf=-3.0)


def both(work: Callable[[], Result]) -> tuple[Result, Result]:
    """What `work` returns on the CPU, and when tensors are taken to lie elsewhere."""
    here = work()
    with pytest.MonkeyPatch.context() as patch:
        for module in (elementwise, change):
            patch.setattr(module, "on_cpu", lambda tensor: False)
        return here, work()


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())  # Inf − Inf, where sums of finite weights overflow
    found, expected = (torch.where(values.isnan(), 0.0, values) for values in (found, expected))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
