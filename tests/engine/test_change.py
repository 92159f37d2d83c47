"""Compiled sweeps on the CPU and torch, as on a GPU, give the same bits, special numbers included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ram_trl import MergeConfig
from ram_trl.engine.criterion import Bracket
from ram_trl.engine.elementwise import mean_where_shared
from ram_trl.methods.change import Change, Sums
from tests.reference import PROPERTY
from tests.sweeps import assert_same_bits, both, finite, tensors

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
CRITERIA = st.sampled_from(
    [
        MergeConfig(epsilon=1e-5),
        MergeConfig(epsilon=0.5, weights={"tool": 0.7}),
        MergeConfig(epsilon=0.0),
        MergeConfig(ulp=True, weights={"tool": -1.0}),
    ]
)


def changed(stored: Tensor, reference: Tensor, config: MergeConfig) -> Change:
    return Change("tool", stored, reference, config, config.fixed_epsilon, torch.bfloat16)


@PROPERTY
@given(rows=tensors(2), dtype=DTYPES, config=CRITERIA)
def test_survey(rows, dtype, config):
    stored, reference = rows[0].to(dtype), rows[1]
    one, other = both(lambda: changed(stored, reference, config).survey())
    update = changed(stored, reference, MergeConfig(epsilon=config.epsilon, ulp=config.ulp)).update(reference)
    tau = stored.float() - reference
    assert np.array_equal(one.largest, float(tau.abs().max()) if len(tau) else 0.0, equal_nan=True)
    assert np.array_equal(one.largest, other.largest, equal_nan=True)
    if not tau.isfinite().all():
        return  # refused for what `largest` is
    for found in (one, other):
        assert found.square == pytest.approx(float((tau.double() ** 2).sum()), rel=1e-12)
        assert found.square_active == pytest.approx(float((tau[update.active].double() ** 2).sum()), rel=1e-12)
        up, down = update.active & (tau > 0), update.active & (tau < 0)
        for words, where in ((found.active, update.active), (found.up, up), (found.down, down)):
            bits = np.unpackbits(words.view(np.uint8))
            assert bits[: len(where)].tolist() == where.int().tolist()
            assert not bits[len(where) :].any()


@PROPERTY
@given(rows=tensors(4), dtype=DTYPES, config=CRITERIA, own=st.booleans(), scale=st.sampled_from([1.0, 1.2, -1.0]))
def test_sums_and_means(rows, dtype, config, own, scale):
    base, reference, *agents = (finite(held) for held in rows)

    def work() -> tuple[Tensor, ...]:
        sums = Sums.none(base)
        for theta in agents:
            stored = finite(theta.to(dtype))
            changed(stored, base if own else reference, config).add_to(sums, base, float(np.float32(scale)))
        total, count = sums.total.clone(), sums.count.float()
        return mean_where_shared(base, sums.total, sums.count, sums.single), total, count

    for left, right in zip(*both(work), strict=True):
        assert_same_bits(left, right)


@PROPERTY
@given(rows=tensors(2), dtype=DTYPES, start=st.sampled_from([1, 0x3F800000]), width=st.sampled_from([1, 0x800000]))
def test_bit_patterns(rows, dtype, start, width):
    stored, reference = finite(rows[0].to(dtype)), finite(rows[1])
    here = changed(stored, reference, MergeConfig())
    patterns = [int(p) for p in (stored.float() - reference).abs().view(torch.int32)]
    for above, within in both(lambda: here.split(Bracket(start, start + width))):
        assert above == sum(p >= start + width for p in patterns)
        assert within.tolist() == [p - start for p in patterns if start <= p < start + width]

    def tallied() -> Tensor:
        counts = torch.ones(1 << 15, dtype=torch.int64)
        here.tally_upper(counts)
        return counts

    for counts in both(tallied):
        assert (counts - 1).tolist() == np.bincount([p >> 16 for p in patterns], minlength=1 << 15).tolist()


@pytest.mark.parametrize("length", [2047, 2048, 2049, 5000])
def test_several_blocks_are_surveyed_as_one(length):
    stored, base = torch.randn(2, length, generator=torch.Generator().manual_seed(0))
    found = changed(stored, base, MergeConfig(epsilon=0.5)).survey()
    tau = stored - base
    assert found.largest == float(tau.abs().max())
    assert found.square == pytest.approx(float((tau.double() ** 2).sum()), rel=1e-12)
    assert int(np.bitwise_count(found.active).sum()) == int((tau.abs() > 0.5).sum())
    assert int(np.bitwise_count(found.down).sum()) == int((tau < -0.5).sum())


def test_nan_is_seen_behind_inf():
    stored, base = torch.tensor([1.0, float("nan"), float("inf")]), torch.zeros(3)
    assert np.isnan(changed(stored, base, MergeConfig(epsilon=0.1)).survey().largest)
