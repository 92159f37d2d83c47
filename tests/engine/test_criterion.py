"""Which entries count as changed: `top` against a sort, `epsilon` and `ulp` against their definitions."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ram_trl import MergeConfig
from ram_trl.engine import counting
from ram_trl.engine.counting import make_plan
from ram_trl.engine.criterion import active as masked_by
from ram_trl.engine.workers import Workers
from ram_trl.weights import Span
from ram_trl.weights.memory import StateDict
from tests import reference
from tests.reference import PROPERTY, Family, families, run_ranks

LARGEST = torch.finfo(torch.float32).max
FRACTIONS = st.one_of(st.sampled_from([1e-12, 1e-3, 0.2, 0.5, 0.999, 1.0]), st.floats(1e-6, 1.0))
TASK_VECTORS = st.one_of(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.0, -0.5]), min_size=1, max_size=40),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    # Numbers whose upper 16 bits agree: the second pass decides.
    st.lists(st.integers(0, 40).map(lambda i: float(np.nextafter(1, 2, dtype=np.float32)) + i * 2.0**-23), min_size=1),
)


def active(base: Tensor, theta: Tensor, chunk: int = 16, **criterion: Any) -> list[bool]:
    """The mask of a single tensor, thresholds found by the engine."""
    config = MergeConfig(**criterion)
    with Workers(1) as workers:
        plan = make_plan(StateDict({"w": base}), {"tool": StateDict({"w": theta})}, config, workers, chunk=chunk)
    before, after = base.float(), theta.float()
    mask, thinned = masked_by(after, before, after - before, config, plan.thresholds[0], base.dtype)
    assert torch.equal(thinned, torch.where(mask, after - before, 0.0))
    assert plan.total.active.tolist() == [int(mask.sum())]
    return mask.tolist()


def active_among(tau: list[float], chunk: int = 16, **criterion: Any) -> list[bool]:
    """The mask of a task vector: base zero."""
    return active(torch.zeros(len(tau)), torch.tensor(tau), chunk, **criterion)


# --- top -------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(TASK_VECTORS, FRACTIONS)
def test_top_is_a_sort_with_ties_included(tau: list[float], fraction: float):
    sizes = sorted((abs(t) for t in tau), reverse=True)
    kth = sizes[max(1, round(fraction * len(tau))) - 1]
    assert active_among(tau, top=fraction) == [abs(t) >= kth and t != 0 for t in tau]


@PROPERTY
@given(families(), FRACTIONS)
def test_top_is_a_sort_over_all_tensors_of_the_agent(family: Family, fraction: float):
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    with Workers(1) as workers:
        plan = make_plan(base, agents, MergeConfig(top=fraction), workers)
    for name in reference.trained(family.base):
        expected = [reference.mask(family.base, family.agents[a], top=fraction)[name].sum() for a in plan.agents]
        assert plan.counts[name].active.tolist() == expected


@PROPERTY
@given(TASK_VECTORS, FRACTIONS, st.integers(1, 3), st.integers(4, 9))
def test_top_is_a_sort_however_misleading_the_sample(tau: list[float], fraction: float, sample: int, chunk: int):
    """The first entries of each chunk say little about the rest here."""
    sizes = sorted((abs(t) for t in tau), reverse=True)
    kth = sizes[max(1, round(fraction * len(tau))) - 1]
    with mock.patch.object(counting, "SAMPLE", sample):
        assert active_among(tau, chunk, top=fraction) == [abs(t) >= kth and t != 0 for t in tau]


@pytest.mark.parametrize("where", [0, 40])
@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.9])
def test_top_is_a_sort_where_the_sample_is_of_another_size_altogether(fraction: float, where: int):
    generator = torch.Generator().manual_seed(0)
    tau = torch.randn(100, generator=generator)
    tau[where : where + 8] *= 1e20
    kth = tau.abs().sort(descending=True).values[round(fraction * 100) - 1]
    with mock.patch.object(counting, "SAMPLE", 8):
        assert active_among(tau.tolist(), 100, top=fraction) == (tau.abs() >= kth).tolist()


@pytest.mark.parametrize("fraction", [1e-9, 0.2, 1.0])
def test_top_takes_all_when_all_are_equal(fraction: float):
    assert active_among([0.5, -0.5, 0.5], top=fraction) == [True] * 3


@pytest.mark.parametrize("fraction", [1e-9, 0.2, 1.0])
def test_top_takes_none_when_nothing_changed(fraction: float):
    assert active_among([0.0, -0.0, 0.0], top=fraction) == [False] * 3


@pytest.mark.parametrize("fraction", [1e-9, 1.0])
@pytest.mark.parametrize("tau", [1.0, -LARGEST, 2.0**-149])
def test_top_takes_the_only_entry(fraction: float, tau: float):
    assert active_among([tau], top=fraction) == [True]


def test_top_takes_no_entry_that_did_not_change_even_where_the_kth_largest_is_zero():
    assert active_among([0.0, 3.0, 0.0, -0.0, 1.0], top=0.8) == [False, True, False, False, True]


def test_top_takes_the_very_largest_however_small_the_fraction():
    assert active_among([1.0, -3.0, 2.0], top=1e-12) == [False, True, False]


def test_top_tells_neighbouring_fp32_numbers_apart():
    above = 1 + 2.0**-23
    assert active_among([1.0, above, -1.0, -above], top=0.5) == [False, True, False, True]


def test_top_separates_the_largest_fp32_numbers():
    below = float(np.nextafter(np.float32(LARGEST), np.float32(0)))
    assert active_among([LARGEST, below], top=0.5) == [True, False]


def test_top_ranks_every_agent_by_its_own_updates():
    base = StateDict({"w": torch.zeros(4)})
    agents = {
        "loud": StateDict({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}),
        "quiet": StateDict({"w": torch.tensor([4e-6, 3e-6, 2e-6, 1e-6])}),
    }
    with Workers(1) as workers:
        plan = make_plan(base, agents, MergeConfig(top=0.5), workers)
    assert plan.total.active.tolist() == [2, 2]
    assert plan.total.both.tolist() == [[2, 0], [0, 2]]


@PROPERTY
@given(families(), FRACTIONS, st.integers(1, 20), st.data())
def test_thresholds_are_the_same_for_every_shard(family: Family, fraction: float, chunk: int, data: st.DataObject):
    owned = data.draw(reference.shards(family.base))
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    config = MergeConfig(top=fraction)
    with Workers(1) as workers:
        expected = make_plan(base, agents, config, workers).thresholds

        def work(rank: int, reduce: reference.RankReduce) -> tuple[float, ...]:
            spans = [Span(*span) for span in owned[rank]]
            return make_plan(base, agents, config, workers, spans=spans, reduce=reduce, chunk=chunk).thresholds

        assert run_ranks(len(owned), work) == [expected] * len(owned)


# --- epsilon ---------------------------------------------------------------------------------------------------------


def test_epsilon_is_a_strict_bound_on_the_size_of_the_update():
    epsilon = 2.0**-10
    above = epsilon * (1 + 2.0**-23)
    assert active_among([epsilon, -epsilon, above, -above], epsilon=epsilon) == [False, False, True, True]


def test_epsilon_is_compared_in_fp32():
    # fp32(1e-5) lies below 1e-5; an update of that very size is not above it.
    rounded = float(np.float32(1e-5))
    assert rounded < 1e-5
    above = float(np.nextafter(np.float32(1e-5), np.float32(1)))
    assert active_among([rounded, above], epsilon=1e-5) == [False, True]


@PROPERTY
@given(TASK_VECTORS, st.sampled_from([1e-5, 0.5, 1.0, 2.0**-149, 1e30]))
def test_epsilon_agrees_with_its_definition(tau: list[float], epsilon: float):
    assert active_among(tau, epsilon=epsilon) == [abs(t) > float(np.float32(epsilon)) for t in tau]


def test_epsilon_zero_is_any_change_of_bits():
    base = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0])
    theta = torch.tensor([0.0, -0.0, 1.0, 1 + 2.0**-23, 2.0**-149])
    assert active(base, theta, epsilon=0) == [False, True, False, True, True]


# --- ulp -------------------------------------------------------------------------------------------------------------


def test_ulp_of_a_bf16_base_is_any_change_that_survives_rounding_to_bf16():
    base = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    # Half a step of bf16 above 1 is 2⁻⁸; ties go to even, which is 1.
    theta = torch.tensor([1.0, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-7])
    assert active(base, theta, ulp=True) == [False, False, True, True]


def test_ulp_of_an_fp16_base_is_any_change_that_survives_rounding_to_fp16():
    base = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float16)
    theta = torch.tensor([1.0, 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-20, 1 + 2.0**-10])
    assert active(base, theta, ulp=True) == [False, False, True, True]


def test_ulp_of_an_fp32_base_rounds_both_to_bf16():
    base = torch.tensor([1 + 2.0**-9, 1 + 2.0**-8, 1.0])
    theta = torch.tensor([1.0, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-10])
    assert active(base, theta, ulp=True) == [False, True, False]


@PROPERTY
@given(families())
def test_ulp_agrees_with_rounding_both(family: Family):
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    with Workers(1) as workers:
        plan = make_plan(base, agents, MergeConfig(ulp=True), workers)
    for name in reference.trained(family.base):
        half = torch.float16 if family.base[name].dtype == torch.float16 else torch.bfloat16
        before = family.base[name].float().to(half)
        expected = [int((family.agents[a][name].float().to(half) != before).sum()) for a in plan.agents]
        assert plan.counts[name].active.tolist() == expected
