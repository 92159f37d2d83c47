"""The account of a merge: every number against brute force, every warning where it belongs and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ram_trl import MergeConfig, MergeReport, merge_state_dicts
from ram_trl.engine.counting import make_plan
from ram_trl.engine.workers import Workers
from ram_trl.telling.report import PartReport, make_report
from ram_trl.weights.memory import StateDict
from tests import reference
from tests.reference import PROPERTY, Family, merges, normal_family

SHAPES = {"w": (41, 7), "v": (97,), "u": (1,)}
KNOBS: list[dict[str, Any]] = [
    {},
    {"epsilon": 1e-5, "r": 0.1, "alpha": 2.0},
    {"epsilon": 0.005},
    {"top": 0.4, "rho": "tensor"},
    {"ulp": True, "weights": {"code": -0.5}},
    {"method": "average"},
    {"method": "ties", "scale": 0.7},
    {"method": "dare", "drop": 0.3, "epsilon": 1e-5},
]


def reported(family: Family, **knobs: Any) -> MergeReport:
    return merge_state_dicts(family.base, family.agents, MergeConfig(**knobs), threads=1)[1]


def changes(**agents: list[float]) -> Family:
    """Models of a single tensor `w` whose base is zero, so that weights are task vectors."""
    base = {"w": torch.zeros(len(next(iter(agents.values()))))}
    return Family(base, {name: {"w": torch.tensor(values)} for name, values in agents.items()})


class BruteForce:
    """Masks and task vectors of a model or some of its tensors, an fp64 array per agent, and what is counted there."""

    def __init__(self, family: Family, names: Sequence[str] = (), **knobs: Any) -> None:
        self.names = names or reference.trained(family.base)
        self.agents = sorted(family.agents)
        self.by_tensor = reference.masks(family.base, family.agents, **knobs)
        tau = {a: reference.task_vector(family.base, family.agents[a]) for a in self.agents}
        self.mask = {a: np.concatenate([self.by_tensor[a][name] for name in self.names]) for a in self.agents}
        self.tau = {a: np.concatenate([tau[a][name] for name in self.names]).astype(np.float64) for a in self.agents}
        self.many = sum(self.mask[a].astype(int) for a in self.agents)
        self.entries = len(self.many)

    def shared(self, agent: str) -> int:
        return int((self.mask[agent] & (self.many >= 2)).sum())

    def unique(self, agent: str) -> int:
        return int((self.mask[agent] & (self.many == 1)).sum())

    def sign_conflict(self) -> float | None:
        both_signs = 0
        for i in np.flatnonzero(self.many >= 2):
            signs = {np.sign(self.tau[agent][i]) for agent in self.agents if self.mask[agent][i]}
            both_signs += {-1.0, 1.0} <= signs
        return both_signs / int((self.many >= 2).sum()) if (self.many >= 2).any() else None

    def mean_lambda(self, agent: str, r: float, alpha: float, per_tensor: bool) -> float:
        """λ of the agent, averaged over its unique entries."""
        lambdas = []
        for name in self.names:
            over = [name] if per_tensor else self.names
            lambda_ = reference.rescale(*reference.overlap(self.by_tensor, over)[agent], r, alpha)
            lambdas += [float(lambda_)] * reference.overlap(self.by_tensor, [name])[agent][1]
        return float(np.mean(lambdas)) if lambdas else 1.0


def assert_counts_are_brute_force(report: MergeReport | PartReport, truth: BruteForce) -> None:
    assert list(report.agents) == truth.agents
    assert report.touched == int((truth.many >= 1).sum())
    assert report.shared == int((truth.many >= 2).sum())
    assert report.sign_conflict == truth.sign_conflict()
    for name, agent in report.agents.items():
        shared, unique = truth.shared(name), truth.unique(name)
        assert (agent.entries, agent.active) == (truth.entries, int(truth.mask[name].sum()))
        assert (agent.shared, agent.unique) == (shared, unique)
        assert agent.density == agent.active / truth.entries
        assert agent.rho == (shared / unique if unique else None)
        assert agent.largest == np.abs(truth.tau[name]).max()
    assert [pair.agents for pair in report.pairs] == list(combinations(truth.agents, 2))
    for pair in report.pairs:
        one, other = pair.agents
        both = truth.mask[one] & truth.mask[other]
        either = truth.mask[one] | truth.mask[other]
        same_sign = both & (truth.tau[one] * truth.tau[other] > 0)
        chance = [truth.mask[agent].mean() for agent in pair.agents]
        chance_of_either = 1 - (1 - chance[0]) * (1 - chance[1])
        assert pair.both == int(both.sum())
        assert pair.jaccard == (both.sum() / either.sum() if either.any() else 0)
        assert pair.jaccard_by_chance == pytest.approx(
            chance[0] * chance[1] / chance_of_either if chance_of_either else 0
        )
        assert pair.sign_agreement == (same_sign.sum() / both.sum() if both.any() else None)


@PROPERTY
@given(merges())
def test_counts_are_those_of_brute_force(case: tuple[Family, dict[str, Any]]):
    family, knobs = case
    with np.errstate(under="ignore"):
        assert_counts_are_brute_force(reported(family, **knobs), BruteForce(family, **knobs))


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: " ".join(f"{k}={v}" for k, v in knobs.items()) or "default")
@settings(PROPERTY, max_examples=25)
@given(data=st.data())
def test_every_number_is_that_of_brute_force(knobs: dict[str, Any], data: st.DataObject):
    densities = st.sampled_from([0.0, 0.05, 0.5, 1.0])
    agents = {"tool": data.draw(densities), "code": data.draw(densities), "memory": 0.3}
    dtype = data.draw(st.sampled_from(reference.FLOATS))
    family = normal_family(data.draw(st.integers(0, 99)), SHAPES, agents, dtype=dtype)
    report, truth = reported(family, **knobs), BruteForce(family, **knobs)
    assert_counts_are_brute_force(report, truth)
    assert report.config == MergeConfig(**knobs)
    assert report.criterion == report.config.criterion
    assert report.base_dtypes == [str(dtype).removeprefix("torch.")]
    for name, agent in report.agents.items():
        tau, mask = truth.tau[name], truth.mask[name]
        square = float((tau**2).sum())
        assert agent.norm == pytest.approx(square**0.5, rel=1e-5, abs=0)
        assert agent.kept == pytest.approx(float((tau[mask] ** 2).sum()) / square if square else 1.0, rel=1e-5)
        assert agent.weight == knobs.get("weights", {}).get(name, 1.0)
        assert agent.dtypes == report.base_dtypes
        if knobs.get("ulp"):
            assert agent.threshold is None
        else:
            assert ((np.abs(tau) > agent.threshold) == mask).all()
        if report.config.method == "ram":
            per_tensor = report.config.rho == "tensor"
            lambda_ = truth.mean_lambda(name, report.config.r, report.config.alpha, per_tensor)
            assert agent.lambda_ == pytest.approx(lambda_, rel=1e-12)
        else:
            assert agent.lambda_ is None


def test_dtypes_are_those_the_weights_are_stored_in():
    family = changes(tool=[1.0, 2.0], code=[2.0, 1.0])
    family.base |= {"v": torch.zeros(2, dtype=torch.bfloat16), "positions": torch.arange(2)}
    for agent in family.agents.values():
        agent |= {"v": torch.zeros(2, dtype=torch.float16), "positions": torch.arange(2)}
    report = reported(family)
    assert report.base_dtypes == ["bfloat16", "float32"]
    assert report.agents["code"].dtypes == ["float16", "float32"]


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1.0, 1e12, 1e25])
def test_the_norm_is_right_for_updates_of_any_size(size: float):
    report = reported(changes(tool=[3 * size, -4 * size, 0.0]), top=0.5)
    assert report.agents["tool"].norm == pytest.approx(5 * size, rel=1e-6, abs=0)
    assert report.agents["tool"].kept == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1.0, 1e12, 1e25])
def test_the_share_that_is_kept_is_right_for_updates_of_any_size(size: float):
    report = reported(changes(tool=[3 * size, -4 * size, 0.0]), top=0.3)
    assert report.agents["tool"].kept == pytest.approx(16 / 25, rel=1e-6, abs=0)


def test_a_merge_of_one_agent_has_no_pairs_and_no_conflict():
    report = reported(changes(tool=[1.0, 2.0, 0.0]), epsilon=1e-5)
    assert report.pairs == []
    assert report.sign_conflict is None
    assert (report.touched, report.shared) == (2, 0)


# --- parts -----------------------------------------------------------------------------------------------------------

PARTS = {
    "model.embed_tokens.weight": (23, 5),
    "model.layers.0.self_attn.q_proj.weight": (5, 5),
    "model.layers.0.mlp.experts.0.up_proj.weight": (9, 5),
    "model.layers.0.mlp.experts.1.up_proj.weight": (9, 5),
    "model.layers.0.input_layernorm.weight": (5,),
    "model.layers.10.self_attn.q_proj.weight": (5, 5),
    "model.layers.10.input_layernorm.weight": (5,),
    "model.layers.2.mlp.up_proj.weight": (9, 5),
    "model.norm.weight": (5,),
}
EMBED, Q0, E00, E01, N0, Q10, N10, M2, NORM = PARTS
BY_KIND = {
    "embeddings": [EMBED], "attention q": [Q0, Q10], "mlp up": [M2], "expert up": [E00, E01], "norms": [N0, N10, NORM],
}  # fmt: skip
BY_LAYER = {"0": [Q0, E00, E01, N0], "2": [M2], "10": [Q10, N10]}


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: " ".join(f"{k}={v}" for k, v in knobs.items()) or "default")
def test_every_number_of_a_part_is_that_of_brute_force(knobs: dict[str, Any]):
    family = normal_family(3, PARTS, {"tool": 0.5, "code": 0.05, "memory": 0.3})
    report = reported(family, **knobs)
    assert list(report.kinds) == list(BY_KIND)
    assert list(report.layers) == list(BY_LAYER)
    for part, names in [*zip(report.kinds.values(), BY_KIND.values(), strict=True),
                        *zip(report.layers.values(), BY_LAYER.values(), strict=True)]:  # fmt: skip
        truth = BruteForce(family, sorted(names), **knobs)
        assert part.entries == truth.entries
        assert_counts_are_brute_force(part, truth)
        for name, agent in part.agents.items():
            tau, mask = truth.tau[name], truth.mask[name]
            square = float((tau**2).sum())
            assert agent.norm == pytest.approx(square**0.5, rel=1e-5, abs=0)
            assert agent.kept == pytest.approx(float((tau[mask] ** 2).sum()) / square if square else 1.0, rel=1e-5)
            if report.config.rho == "tensor":
                lambda_ = truth.mean_lambda(name, report.config.r, report.config.alpha, per_tensor=True)
                assert agent.lambda_ == pytest.approx(lambda_, rel=1e-12)
            else:
                assert agent.lambda_ == report.agents[name].lambda_


def test_kinds_add_up_to_the_model():
    report = reported(normal_family(3, PARTS, {"tool": 0.5, "code": 0.05}))
    for name, agent in report.agents.items():
        parts = [part.agents[name] for part in report.kinds.values()]
        assert sum(part.entries for part in parts) == agent.entries
        assert sum(part.active for part in parts) == agent.active
        assert sum(part.norm**2 for part in parts) == pytest.approx(agent.norm**2)


def test_the_density_map_is_that_of_brute_force():
    family = normal_family(3, PARTS, {"tool": 0.5, "code": 0.05})
    report = reported(family)
    for name in report.agents:
        assert list(report.density_map[name]) == ["attention q", "mlp up", "expert up", "norms"]
        for kind, densities in report.density_map[name].items():
            for (_, in_layer), density in zip(BY_LAYER.items(), densities, strict=True):
                here = sorted(set(in_layer) & set(BY_KIND[kind]))
                assert density == (BruteForce(family, here).mask[name].mean() if here else None)


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: " ".join(f"{k}={v}" for k, v in knobs.items()) or "default")
def test_a_report_comes_back_from_its_json(knobs: dict[str, Any]):
    report = reported(normal_family(3, PARTS, {"tool": 0.5, "code": 0.05, "memory": 0.0}), **knobs)
    again = MergeReport(**json.loads(report.to_json()))
    assert again.to_json() == report.to_json()
    assert list(again.layers) == list(BY_LAYER)
    assert again.layers["10"].agents["code"] == report.layers["10"].agents["code"]


def test_a_report_without_detail_has_the_same_numbers_and_warnings_and_no_parts():
    family = normal_family(3, PARTS, {"tool": 0.5, "code": 0.0})
    base, agents = StateDict(family.base), {name: StateDict(tensors) for name, tensors in family.agents.items()}
    with Workers(1) as workers:
        plan = make_plan(base, agents, MergeConfig(), workers)
    short, full = make_report(base, agents, plan, in_detail=False), make_report(base, agents, plan)
    detail = ("kinds", "layers", "density_map", "advice")
    assert short.warnings
    assert short.advice is None
    assert full.model_dump(exclude=detail) == short.model_dump(exclude=detail)
    assert (short.kinds, short.layers, short.density_map) == ({}, {}, {})
    assert MergeReport(**json.loads(short.to_json())).to_json() == short.to_json()


# --- warnings --------------------------------------------------------------------------------------------------------


def only_warning(report: MergeReport) -> str:
    assert len(report.warnings) == 1
    return report.warnings[0]


@pytest.mark.parametrize("method", ["ram", "average", "task_arithmetic", "ties", "dare"])
@pytest.mark.parametrize("criterion", [{}, {"epsilon": 1e-5}, {"top": 0.1}, {"ulp": True}])
@pytest.mark.parametrize("dtype", reference.FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_healthy_merge_has_no_warning(method: str, criterion: dict[str, Any], dtype: torch.dtype):
    family = normal_family(1, SHAPES, {"tool": 0.4, "code": 0.2, "memory": 0.5}, dtype=dtype)
    assert reported(family, method=method, **criterion).warnings == []


def test_an_agent_alone_has_no_warning():
    assert reported(changes(tool=[1.0, 0.0, 2.0])).warnings == []


def test_a_base_of_another_precision_than_the_agents_has_no_warning():
    family = normal_family(1, SHAPES, {"tool": 0.4, "code": 0.2})
    family.base = {name: tensor.bfloat16() for name, tensor in family.base.items()}
    family.agents = {
        agent: {name: family.base[name].float() + step for name, step in zip(SHAPES, steps, strict=True)}
        for agent, steps in {"tool": (0.1, 0.0, 0.0), "code": (0.0, 0.1, 0.1)}.items()
    }
    assert reported(family, epsilon=1e-5).warnings == []


def test_nothing_active_is_told_with_the_agent_its_largest_update_and_epsilon():
    warning = only_warning(reported(changes(tool=[1.0, 0.0, 2.0], code=[3e-6, -4e-6, 0.0]), epsilon=1e-5))
    for words in ("'code'", "no active entry", "4e-06", "1e-05"):
        assert words in warning


def test_nothing_active_under_ulp_is_told_with_the_agent_and_its_largest_update():
    base = {"w": torch.ones(3)}
    agents = {"tool": {"w": torch.tensor([1.0, 2.0, 1.0])}, "code": {"w": torch.ones(3) + 2.0**-12}}
    _, report = merge_state_dicts(base, agents, MergeConfig(ulp=True))
    warning = only_warning(report)
    for words in ("'code'", "no active entry", "0.000244", "16 bits"):
        assert words in warning


def test_an_update_that_lies_mostly_below_epsilon_is_told():
    # Squared norm: 1 above, 3 · 0.64 below
    family = changes(tool=[0.8, -0.8, 0.8, 1.0], code=[0.0, 1.0, 0.0, 0.0])
    warning = only_warning(reported(family, epsilon=0.9))
    for words in ("'tool'", "66%", "0.9"):
        assert words in warning


def test_an_update_that_lies_half_above_epsilon_is_not_told():
    # Squared norm: 1 above, 0.98 below
    family = changes(tool=[0.7, -0.7, 0.0, 1.0], code=[0.0, 1.0, 0.0, 0.0])
    assert reported(family, epsilon=0.9).warnings == []


def test_a_small_top_is_a_choice_and_not_told():
    report = reported(changes(tool=[0.8, -0.8, 0.8, 1.0], code=[0.0, 1.0, 0.0, 0.0]), top=0.25)
    assert report.agents["tool"].kept < 0.5
    assert report.warnings == []


def overlapping(shared: int, unique_each: int) -> Family:
    """Two agents that share `shared` entries and have `unique_each` of their own."""
    alone, nothing = [1.0] * unique_each, [0.0] * unique_each
    return changes(tool=[1.0] * shared + alone + nothing, code=[1.0] * shared + nothing + alone)


def test_more_than_95_percent_shared_is_told_with_the_agents():
    warning = only_warning(reported(overlapping(shared=96, unique_each=2), epsilon=1e-5))
    for words in ("'tool'", "'code'", "96.0%", "averaging"):
        assert words in warning


def test_95_percent_shared_is_not_told():
    family = overlapping(shared=190, unique_each=5)
    assert reported(family, epsilon=1e-5).warnings == []


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties", "dare"])
def test_shared_entries_are_no_matter_to_other_rules(method: str):
    assert reported(overlapping(shared=100, unique_each=0), method=method, epsilon=1e-5).warnings == []


def test_an_agent_without_unique_entries_is_told():
    family = changes(tool=[1.0, 1.0, 1.0, 1.0], code=[0.0, 2.0, 2.0, 0.0])
    warning = only_warning(reported(family, epsilon=1e-5))
    for words in ("'code'", "no unique entry", "2"):
        assert words in warning


@pytest.mark.parametrize("method", ["ram", "average", "task_arithmetic", "ties", "dare"])
def test_an_agent_identical_to_the_base_is_told(method: str):
    family = changes(tool=[1.0, 0.0, 1.0], code=[0.0, 0.0, 0.0])
    warning = only_warning(reported(family, method=method))
    for words in ("'code'", "identical to the base"):
        assert words in warning


def test_agents_of_different_precision_are_told():
    family = normal_family(1, SHAPES, {"tool": 0.4, "code": 0.2}, dtype=torch.bfloat16)
    family.agents["tool"] = {name: tensor.float() for name, tensor in family.agents["tool"].items()}
    warning = only_warning(reported(family))
    for words in ("'tool' in float32", "'code' in bfloat16"):
        assert words in warning


def test_warnings_of_several_agents_come_together():
    family = changes(tool=[1.0, 0.0, 2.0, 0.0], code=[3e-6, 0.0, 0.0, 0.0], memory=[0.0, 0.0, 0.0, 0.0])
    warnings = reported(family, epsilon=1e-5).warnings
    assert [("'code'" in warning, "'memory'" in warning) for warning in warnings] == [(True, False), (False, True)]
