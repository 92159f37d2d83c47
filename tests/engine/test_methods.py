"""The merge rules: against the reference to the bit, against the paper, against the programs that came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.ram import ram_merge, ramplus_tl_merge

from ram_trl import MergeConfig, merge_state_dicts
from ram_trl.engine.counting import make_plan
from ram_trl.engine.merging import merge_spans
from ram_trl.engine.workers import Workers
from ram_trl.methods.dare import dropped
from ram_trl.weights import Span
from ram_trl.weights.memory import StateDict
from tests import reference
from tests.reference import PROPERTY, Family, assert_same_bits, families, merges, normal_family, run_ranks

METHODS: list[dict[str, Any]] = [
    {"method": "ram", "epsilon": 1e-5, "r": 0.0},
    {"method": "ram"},
    {"method": "ram", "top": 0.3, "rho": "tensor", "r": 0.1, "alpha": 0.2},
    {"method": "ram", "ulp": True},
    {"method": "average"},
    {"method": "task_arithmetic"},
    {"method": "task_arithmetic", "scale": 0.7},
    {"method": "ties"},
    {"method": "ties", "scale": 1.3},
    {"method": "dare", "drop": 0.3, "scale": 0.7, "seed": 5},
]
SHAPES = {"embed": (31, 17), "layers.0.w": (13, 29), "layers.0.norm": (29,), "head": (7, 41)}
THREE_AGENTS = {"tool": 0.5, "code": 0.1, "memory": 0.6}
FP32_ROUNDING = 2.0**-24


def merged(family: Family, **knobs: Any) -> dict[str, torch.Tensor]:
    return merge_state_dicts(family.base, family.agents, MergeConfig(**knobs), threads=1)[0]


def one_tensor(base: list[float], **agents: list[float]) -> Family:
    """Models of a single tensor `w`."""
    return Family({"w": torch.tensor(base)}, {name: {"w": torch.tensor(values)} for name, values in agents.items()})


def changes(**agents: list[float]) -> Family:
    """Models of a single tensor `w` whose base is zero, so that weights are task vectors."""
    return one_tensor([0.0] * len(next(iter(agents.values()))), **agents)


# --- against the reference -------------------------------------------------------------------------------------------


@PROPERTY
@given(merges())
def test_every_rule_equals_the_reference_to_the_bit(case: tuple[Family, dict[str, Any]]):
    family, knobs = case
    assert_same_bits(merged(family, **knobs), reference.merge(family.base, family.agents, **knobs))


@pytest.mark.parametrize("knobs", METHODS, ids=lambda knobs: " ".join(f"{k}={v}" for k, v in knobs.items()))
@pytest.mark.parametrize("dtype", reference.FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_weights_of_ordinary_size_equal_the_reference_to_the_bit(knobs: dict[str, Any], dtype: torch.dtype):
    family = normal_family(3, {"w": (9, 31), "v": (77,)}, THREE_AGENTS, dtype=dtype)
    knobs = knobs | {"weights": {"code": 0.6}}
    assert_same_bits(merged(family, **knobs), reference.merge(family.base, family.agents, **knobs))


def test_tensors_of_different_dtypes_are_merged_each_in_its_own():
    shapes = {"w": (50,), "v": (40,), "u": (30,)}
    kinds = dict(zip(shapes, reference.FLOATS, strict=True))
    family = normal_family(4, shapes, THREE_AGENTS)
    family.base = {name: tensor.to(kinds[name]) for name, tensor in family.base.items()}
    for agent in ("tool", "code"):
        family.agents[agent] = {name: tensor.to(kinds[name]) for name, tensor in family.agents[agent].items()}
    for knobs in METHODS:
        assert_same_bits(merged(family, **knobs), reference.merge(family.base, family.agents, **knobs))


# --- RAM, in words ---------------------------------------------------------------------------------------------------


def test_untouched_entry_is_the_base():
    family = changes(tool=[0.0, 1.0], code=[5e-6, 1.0])
    assert merged(family, epsilon=1e-5)["w"].tolist() == [0.0, 1.0]


def test_unique_entry_keeps_full_update():
    generator = torch.Generator().manual_seed(0)
    base, theta = torch.randn(2, 999, generator=generator)
    assert (base + (theta - base) != theta).any()
    family = Family({"w": base}, {"tool": {"w": theta}, "code": {"w": base}})
    assert_same_bits(merged(family, epsilon=0, r=0), {"w": theta})


def test_shared_entry_is_the_mean_over_the_agents_that_changed_it():
    family = changes(tool=[0.5, 3.0], code=[0.25, -1.0], memory=[0.0, 1.0])
    assert merged(family, epsilon=1e-5)["w"].tolist() == [0.375, 1.0]


def test_unique_entries_are_rescaled_by_lambda_and_shared_ones_are_not():
    # tool: 1 shared, 2 unique, ρ = 0.5, λ = 1 + 0.25 · 0.5; code: 1 shared, 1 unique, λ = 1.25
    family = changes(tool=[1.0, 1.0, 1.0, 0.0], code=[3.0, 0.0, 0.0, 1.0])
    assert merged(family, epsilon=1e-5, r=0.25)["w"].tolist() == [2.0, 1.125, 1.125, 1.25]


def test_rho_above_alpha_is_clipped():
    # 3 shared, 1 unique: ρ = 3
    family = changes(tool=[1.0, 1.0, 1.0, 1.0], code=[1.0, 1.0, 1.0, 0.0])
    assert merged(family, epsilon=1e-5, r=0.5, alpha=2.0)["w"][3] == 2.0
    assert merged(family, epsilon=1e-5, r=0.5, alpha=8.0)["w"][3] == 2.5


def test_rho_is_counted_over_the_whole_model():
    family = Family(
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        {
            "tool": {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([1.0, 1.0])},
            "code": {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0, 1.0])},
        },
    )
    assert merged(family, epsilon=1e-5, r=0.25, alpha=9.0)["b"].tolist() == [1.75, 1.0]
    assert merged(family, epsilon=1e-5, r=0.25, alpha=9.0, rho="tensor")["b"].tolist() == [1.25, 1.0]


def test_an_agent_without_unique_entries_has_lambda_one():
    family = changes(tool=[1.0, 1.0], code=[3.0, 0.0])
    result, report = merge_state_dicts(family.base, family.agents, MergeConfig(epsilon=1e-5, r=0.5))
    assert report.agents["code"].unique == 0
    assert report.agents["code"].rho is None
    assert report.agents["code"].lambda_ == 1.0
    assert result["w"].tolist() == [2.0, 1.5]


def test_an_agent_that_changed_nothing_has_lambda_one():
    family = changes(tool=[1.0, 1.0], code=[0.0, 0.0])
    result, report = merge_state_dicts(family.base, family.agents, MergeConfig(epsilon=1e-5, r=0.5))
    assert [agent.lambda_ for agent in report.agents.values()] == [1.0, 1.0]
    assert result["w"].tolist() == [1.0, 1.0]


def test_tied_weights_are_counted_once():
    # Counted twice, the tied tensor would make ρ of tool 4 / 1; it is 2 / 1.
    embed = torch.zeros(2)
    base = {"embed": embed, "head": embed, "w": torch.zeros(1)}
    shared, unique = torch.ones(2), torch.ones(1)
    tool = {"embed": shared, "head": shared, "w": unique}
    code = {"embed": shared, "head": shared, "w": torch.zeros(1)}
    config = MergeConfig(epsilon=1e-5, r=0.25, alpha=9.0)
    result, report = merge_state_dicts(base, {"tool": tool, "code": code}, config)
    assert (report.agents["tool"].entries, report.agents["tool"].shared) == (3, 2)
    assert result["w"].tolist() == [1.5]


def test_tied_weights_are_counted_once_by_the_top_criterion():
    embed = torch.zeros(4)
    moved = torch.tensor([1.0, 2.0, 3.0, 4.0])
    family = Family(
        {"embed": embed, "head": embed, "w": torch.zeros(4)},
        {"tool": {"embed": moved, "head": moved, "w": torch.tensor([5.0, 6.0, 7.0, 8.0])}},
    )
    # A quarter of 8 entries; of 12 it would be 3.
    result = merged(family, top=0.25)
    assert result["w"].tolist() == [0.0, 0.0, 7.0, 8.0]
    assert result["embed"].tolist() == [0.0] * 4


# --- average and task arithmetic, in words ---------------------------------------------------------------------------


def test_average_divides_by_all_agents():
    family = changes(tool=[3.0, 0.0], code=[0.0, 0.0], memory=[3.0, 6.0])
    assert merged(family, method="average")["w"].tolist() == [2.0, 2.0]


def test_task_arithmetic_adds_what_all_agents_changed():
    family = changes(tool=[1.0, 0.0], code=[2.0, 4.0])
    assert merged(family, method="task_arithmetic")["w"].tolist() == [3.0, 4.0]
    assert merged(family, method="task_arithmetic", scale=0.5)["w"].tolist() == [1.5, 2.0]


# --- against the paper and the programs before us --------------------------------------------------------------------


def assert_equal_up_to_fp32_rounding(found: dict[str, torch.Tensor], expected: dict[str, np.ndarray], family: Family):
    """Every entry is within a few roundings of the largest number it is made of."""
    for name, values in expected.items():
        largest = np.max([np.abs(reference.numbers(m[name])) for m in [family.base, *family.agents.values()]], axis=0)
        off = np.abs(reference.numbers(found[name]).astype(np.float64) - values)
        assert (off <= 8 * FP32_ROUNDING * largest).all(), name


AGENT_SETS = [
    pytest.param({"tool": 0.5}, id="one agent"),
    pytest.param({"tool": 0.3, "code": 0.05}, id="sparse"),
    pytest.param({"tool": 0.46, "code": 0.03, "memory": 0.54}, id="densities of the paper"),
    pytest.param({"tool": 0.9, "code": 0.9, "memory": 0.8, "chat": 0.95}, id="rho beyond alpha"),
    pytest.param({"tool": 1.0, "code": 0.4}, id="an agent without unique entries"),
]
PROGRAMS: dict[str, Callable[[int, int], float]] = {
    "paper": reference.paper_lambda,
    "released": reference.released_lambda,
}


@pytest.mark.parametrize("preset", ["paper", "released"])
@pytest.mark.parametrize("agents", AGENT_SETS)
def test_preset_is_the_published_formula(preset: str, agents: dict[str, float]):
    family = normal_family(7, SHAPES, agents)
    result, report = merge_state_dicts(family.base, family.agents, MergeConfig.preset(preset))
    expected, lambdas = reference.paper(family.base, family.agents, PROGRAMS[preset])
    assert_equal_up_to_fp32_rounding(result, expected, family)
    assert {name: agent.lambda_ for name, agent in report.agents.items()} == pytest.approx(lambdas, rel=1e-7)


@pytest.mark.parametrize(("rho", "expected"), [(14.9, 1.2), (1.45, 1.145), (1.1, 1.11)])
def test_lambda_of_the_experts_of_the_paper(rho: float, expected: float):
    unique, shared = 20, round(20 * rho)
    family = changes(tool=[1.0] * (shared + unique), code=[1.0] * shared + [0.0] * unique)
    result, report = merge_state_dicts(family.base, family.agents, MergeConfig.preset("paper"))
    assert report.agents["tool"].lambda_ == pytest.approx(expected, rel=1e-7)
    assert result["w"][-1].item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("agents", AGENT_SETS)
@pytest.mark.parametrize(
    ("program", "config"),
    [
        pytest.param(ram_merge, MergeConfig(epsilon=1e-5, r=0), id="ram"),
        pytest.param(ramplus_tl_merge, MergeConfig.preset("mergekit"), id="ramplus_tl"),
    ],
)
def test_mergekit_gives_the_same_tensors(program: Any, config: MergeConfig, agents: dict[str, float]):
    family = normal_family(8, SHAPES, agents)
    ours, _ = merge_state_dicts(family.base, family.agents, config)
    for name, before in family.base.items():
        inputs = [before, *(family.agents[agent][name] for agent in sorted(family.agents))]
        theirs = program.merge_group(TensorGroup.from_tensors(inputs, base_index=0))
        assert (ours[name] - theirs).norm() <= 1e-7 * theirs.norm(), name
        assert not torch.equal(ours[name], before)


# --- TIES ------------------------------------------------------------------------------------------------------------


def ties_of_the_paper(family: Family, density: float, scale: float) -> dict[str, np.ndarray]:
    """arXiv 2306.01708, Algorithm 1, whole tensors in float64."""
    tau = [reference.task_vector(family.base, agent) for agent in family.agents.values()]
    trimmed = []
    for vector in tau:
        size = np.sort(np.abs(np.concatenate([vector[name] for name in vector])))
        kept = size[len(size) - round(density * len(size)) :]
        trimmed.append({name: np.where(np.abs(t) >= kept[0], t, 0).astype(np.float64) for name, t in vector.items()})
    result = {}
    for name, before in family.base.items():
        stacked = np.stack([vector[name] for vector in trimmed])
        elected = np.sign(stacked.sum(0))
        agrees = (np.sign(stacked) == elected) & (stacked != 0)
        mean = (stacked * agrees).sum(0) / np.maximum(agrees.sum(0), 1)
        result[name] = reference.numbers(before) + scale * mean
    return result


@pytest.mark.parametrize("agents", AGENT_SETS)
@pytest.mark.parametrize("scale", [1.0, 0.6])
def test_ties_is_trim_elect_and_disjoint_mean(agents: dict[str, float], scale: float):
    family = normal_family(9, SHAPES, agents)
    found = merged(family, method="ties", scale=scale)
    assert_equal_up_to_fp32_rounding(found, ties_of_the_paper(family, 0.2, scale), family)


def test_ties_leaves_out_the_agents_of_the_losing_sign():
    family = changes(tool=[3.0, 1.0], code=[1.0, 1.0], memory=[-2.0, -1.0])
    assert merged(family, method="ties", epsilon=1e-5)["w"].tolist() == [2.0, 1.0]


def test_ties_leaves_the_base_where_the_signs_balance():
    family = one_tensor([0.5], tool=[0.75], code=[0.25])
    assert merged(family, method="ties", epsilon=1e-5)["w"].tolist() == [0.5]


# --- DARE ------------------------------------------------------------------------------------------------------------

FIVE_SIGMA = 5.0


def kept_by_dare(agent: str, tensor: str, seed: int = 0, drop: float = 0.5, entries: int = 40_000) -> torch.Tensor:
    """Which of an agent's entries survive, read off a merge of ones into zeros."""
    config = MergeConfig(method="dare", drop=drop, seed=seed)
    base, theta = {tensor: torch.zeros(entries)}, {tensor: torch.ones(entries)}
    return merge_state_dicts(base, {agent: theta}, config)[0][tensor] != 0


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_dare_keeps_the_share_it_should_everywhere(drop: float):
    kept = kept_by_dare("tool", "w", drop=drop)
    for part in [kept, kept[::2], kept[1::2], *kept.chunk(8)]:
        allowed = FIVE_SIGMA * (drop * (1 - drop) / len(part)) ** 0.5
        assert part.double().mean().item() == pytest.approx(1 - drop, abs=allowed)


def test_dare_is_unbiased_entry_by_entry():
    seeds, drop = 300, 0.5
    family = normal_family(2, {"w": (500,)}, {"tool": 1.0})
    tau = family.agents["tool"]["w"] - family.base["w"]
    results = [merged(family, method="dare", drop=drop, seed=seed)["w"] - family.base["w"] for seed in range(seeds)]
    ratio = torch.stack(results).double().mean(0) / tau
    allowed = FIVE_SIGMA * (drop / (1 - drop) / seeds) ** 0.5
    assert (ratio - 1).abs().max().item() < allowed
    assert ratio.mean().item() == pytest.approx(1, abs=allowed / len(tau) ** 0.5)


def test_dare_divides_survivors_by_the_probability_to_survive():
    kept = merged(changes(tool=[1.0] * 64), method="dare", drop=0.75)["w"]
    assert set(kept.tolist()) == {0.0, 4.0}


def test_dare_masks_of_two_agents_two_tensors_and_two_seeds_are_independent():
    one = kept_by_dare("tool", "w")
    others = [kept_by_dare("code", "w"), kept_by_dare("tool", "v"), kept_by_dare("tool", "w", seed=1)]
    for other in others:
        agreement = (one == other).double().mean().item()
        assert agreement == pytest.approx(0.5, abs=FIVE_SIGMA * 0.5 / len(one) ** 0.5)


def test_dare_mask_does_not_repeat_beyond_32_bits_of_index():
    near = [dropped("tool", "w", start, torch.zeros(999), 0.5, 0) for start in (0, 2**32, 2**33)]
    assert not torch.equal(near[0], near[1])
    assert not torch.equal(near[1], near[2])
    across = dropped("tool", "w", 2**32 - 6, torch.zeros(12), 0.5, 0).tolist()
    assert across == [reference.dropped("tool", "w", 2**32 - 6 + i, 0.5, 0) for i in range(12)]


def test_dare_mask_is_the_same_for_every_chunk_size():
    family = normal_family(5, {"w": (61, 7), "v": (50,)}, THREE_AGENTS)
    config = MergeConfig(method="dare", seed=3)
    whole, _ = merge_state_dicts(family.base, family.agents, config)
    for chunk in (1, 10, 64, 426):
        assert_same_bits(merge_state_dicts(family.base, family.agents, config, chunk=chunk)[0], whole)


@PROPERTY
@given(families(dtypes=[torch.float32]), st.data())
def test_dare_mask_is_the_same_for_every_shard(family: Family, data: st.DataObject):
    owned = data.draw(reference.shards(family.base))
    config = MergeConfig(method="dare", seed=3)
    base, agents = StateDict(family.base), {name: StateDict(agent) for name, agent in family.agents.items()}
    expected = merged(family, method="dare", seed=3)
    with Workers(1) as workers:

        def work(rank: int, reduce: reference.RankReduce) -> int:
            spans = [Span(*span) for span in owned[rank]]
            plan = make_plan(base, agents, config, workers, spans=spans, reduce=reduce)
            return sum(merge_spans(base, agents, plan, compare, workers, spans=spans))

        def compare(span: Span, values: torch.Tensor) -> int:
            whole = expected[span.name].view(-1)
            assert_same_bits({span.name: values}, {span.name: whole[span.start : span.stop]})
            return len(span)

        compared = sum(run_ranks(len(owned), work))
    assert compared == sum(family.base[name].numel() for name in reference.trained(family.base))


def test_dare_that_drops_nothing_is_task_arithmetic():
    family = normal_family(6, SHAPES, THREE_AGENTS)
    assert_same_bits(merged(family, method="dare", drop=0), merged(family, method="task_arithmetic"))


# --- weights of agents -----------------------------------------------------------------------------------------------


def test_weight_of_minus_one_negates_the_task_vector_exactly():
    family = normal_family(1, {"w": (999,)}, {"tool": 0.7})
    base, theta = family.base["w"], family.agents["tool"]["w"]
    assert_same_bits(merged(family, epsilon=0, weights={"tool": -1}), {"w": base - (theta - base)})


def test_weights_of_minus_one_negate_a_shared_update_exactly():
    family = normal_family(1, {"w": (999,)}, {"tool": 1.0, "code": 1.0})
    base, tool, code = family.base["w"], family.agents["tool"]["w"], family.agents["code"]["w"]
    mean = ((code - base) + (tool - base)) / 2
    assert_same_bits(merged(family, epsilon=0), {"w": base + mean})
    assert_same_bits(merged(family, epsilon=0, weights={"tool": -1, "code": -1}), {"w": base - mean})


def test_weight_of_a_half_halves_the_update_of_that_agent_alone():
    family = changes(tool=[1.0, 0.0, 1.0], code=[0.0, 1.0, 2.0])
    assert merged(family, epsilon=1e-5, r=0, weights={"tool": 0.5})["w"].tolist() == [0.5, 1.0, 1.25]


def test_weight_is_applied_after_the_criterion():
    family = changes(tool=[5e-3, 5e-4])
    assert merged(family, epsilon=1e-3, weights={"tool": 0.125})["w"].tolist() == pytest.approx([6.25e-4, 0])
    assert merged(family, epsilon=1e-3, weights={"tool": 4.0})["w"].tolist() == pytest.approx([2e-2, 0])


def test_weight_and_lambda_multiply():
    # tool: 1 shared, 1 unique, λ = 1.25
    family = changes(tool=[1.0, 1.0], code=[1.0, 0.0])
    assert merged(family, epsilon=1e-5, r=0.25, weights={"tool": 2.0})["w"].tolist() == [1.5, 2.5]
