"""Advice on a criterion: what is recommended where, why, and that it does not contradict the warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from ram_trl import MergeConfig, MergeReport, merge_state_dicts
from ram_trl.telling.advice import Advice, advise
from tests.reference import PROPERTY, Family, merges

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def reported(
    agents: Mapping[str, list[float]], base: Tensor | None = None, dtype: torch.dtype = FP32, **knobs: Any
) -> MergeReport:
    """The report of a merge of one tensor; `agents` are task vectors."""
    if base is None:
        base = torch.zeros(len(next(iter(agents.values()))), dtype=dtype)
    models = {name: {"w": (base.float() + torch.tensor(tau)).to(dtype)} for name, tau in agents.items()}
    return merge_state_dicts({"w": base}, models, MergeConfig(**knobs))[1]


def advised(*arguments: Any, **knobs: Any) -> Advice:
    advice = reported(*arguments, **knobs).advice
    assert advice is not None
    return advice


def apart(size: float = 1.0) -> dict[str, list[float]]:
    """Two agents that mostly changed different entries."""
    return {"tool": [size, size, 0, 0, 0, 0, size, 0, 0, 0], "code": [size, 0, 0, 0, size, size, 0, 0, 0, 0]}


def same(size: float = 1.0) -> dict[str, list[float]]:
    """Two agents that changed the same entries, by different amounts."""
    return {"tool": [size * (i + 1) for i in range(10)], "code": [-size * (10 - i) for i in range(10)]}


@pytest.mark.parametrize("criterion", [{}, {"top": 0.3}, {"epsilon": 1e-5}, {"epsilon": 0}, {"ulp": True}])
def test_a_criterion_that_tells_agents_apart_is_kept(criterion: dict[str, Any]):
    report = reported(apart(), **criterion)
    assert report.advice is not None
    assert report.advice.in_force
    assert report.advice.criterion == report.criterion
    assert "80% of the active entries are unique" in report.advice.reason


def test_one_that_is_kept_but_is_not_top_is_told_to_be_compared_with_it():
    assert "compare it with `top 0.2`" in advised(apart(), epsilon=1e-5).reason
    assert "compare it" not in advised(apart()).reason


@pytest.mark.parametrize("tiny", [3e-6, 1e-9])
def test_top_where_nothing_is_above_epsilon(tiny: float):
    advice = advised({"tool": apart()["tool"], "code": apart(tiny)["code"]}, epsilon=1e-5)
    assert (advice.criterion, advice.option, advice.in_force) == ("top 0.2", "--top 0.2", False)
    for words in ("'code'", f"{tiny:.3g}", "1e-05", "probe again"):
        assert words in advice.reason, words


def test_top_where_most_of_an_update_is_below_epsilon():
    advice = advised({"tool": [0.8, -0.8, 0.8, 1.0], "code": [0.0, 1.0, 0.0, 0.0]}, epsilon=0.9)
    assert (advice.criterion, advice.in_force) == ("top 0.2", False)
    for words in ("keeps 34%", "'tool'"):
        assert words in advice.reason, words


def test_top_where_epsilon_keeps_everything_and_all_is_shared():
    advice = advised(same(), epsilon=1e-5)
    assert (advice.criterion, advice.in_force) == ("top 0.2", False)
    assert "100.0% of the active entries are shared" in advice.reason
    assert any("λ applies to nothing" in sentence for sentence in advice.effect)


def test_a_smaller_top_where_top_leaves_everything_shared_down_to_what_was_measured():
    equal = {"tool": [float(i) for i in range(100)], "code": [-float(i) for i in range(100)]}
    found = [advised(equal, top=top) for top in (0.5, 0.2, 0.15, 0.1, 0.05)]
    assert [advice.criterion for advice in found] == ["top 0.2", "top 0.1", "top 0.1", "top 0.1", "top 0.05"]
    assert [advice.in_force for advice in found] == [False, False, False, True, True]
    for advice in found[3:]:
        assert "task_arithmetic" in advice.reason


def test_the_warning_under_top_does_not_ask_for_top():
    (warning,) = reported(same(), top=1).warnings
    assert "use a smaller `top`" in warning


def test_top_where_all_of_an_agent_lies_within_another():
    agents = {"tool": [1.0, 1.0, 1.0, 0.5, 0.5, 0], "code": [0.0, 2.0, 2.0, 0, 0, 0]}
    advice = advised(agents, epsilon=1e-5)
    assert advice.criterion == "top 0.2"
    assert "every active entry of agent 'code'" in advice.reason


def test_a_tiny_top_that_drops_most_is_told_to_be_larger():
    wide = {"tool": [1.0] * 50 + [0.0] * 50, "code": [0.0] * 50 + [1.0 + i / 1000 for i in range(50)]}
    advice = advised(wide, top=0.01)
    assert advice.criterion == "top 0.2"
    assert "'code'" in advice.reason
    assert "'tool'" not in advice.reason, "its entries tie, so that all of them are active"
    assert advised(wide, top=0.1).in_force, "that is what was measured"


def test_ulp_where_the_base_is_in_float32_and_agents_are_not():
    base = torch.linspace(0.1, 1.0, 10)
    models = {name: {"w": (base + torch.tensor(tau)).bfloat16()} for name, tau in apart().items()}
    for knobs in ({}, {"epsilon": 1e-5}, {"method": "average"}):
        advice = merge_state_dicts({"w": base}, models, MergeConfig(**knobs))[1].advice
        assert (advice.criterion, advice.option) == ("ulp", "--ulp")
        assert "agents 'code', 'tool' in 16 bits" in advice.reason
    followed = merge_state_dicts({"w": base}, models, MergeConfig(ulp=True))[1].advice
    assert followed.in_force


def test_changes_too_small_for_16_bits_ask_for_a_generalist_in_float32():
    base = torch.ones(10, dtype=BF16)
    models = {name: {"w": base.float() + torch.tensor(tau)} for name, tau in apart(1e-4).items()}
    report = merge_state_dicts({"w": base}, models, MergeConfig(ulp=True))[1]
    assert report.advice.criterion == "top 0.2"
    assert "`--dtype float32`" in report.advice.reason
    assert ["use `top`, and `--dtype float32`" in warning for warning in report.warnings] == [True, True]


def test_where_no_agent_changed_no_criterion_helps():
    assert "no agent differs" in advised({"tool": [0.0, 0.0], "code": [0.0, 0.0]}).reason


def test_a_single_agent_is_kept_whole():
    for knobs in ({}, {"epsilon": 1e-5}, {"ulp": True}):
        assert advised({"tool": [1.0, 2.0, 0.0, 1e-9, 3.0]}, **knobs).criterion == "epsilon 0"
    assert advised({"tool": [1.0, 2.0]}, epsilon=0).in_force


@pytest.mark.parametrize(
    ("method", "criterion"), [("average", "epsilon 0"), ("dare", "epsilon 0"), ("ties", "top 0.2")]
)
def test_other_methods_keep_theirs_unless_it_drops_the_update(method: str, criterion: str):
    assert advised(same(), method=method).in_force
    assert advised(apart(), method=method, epsilon=1e-5).in_force
    assert advised(same(1e-7), method=method, epsilon=1e-5).criterion == criterion
    assert (
        advised({"tool": [0.8, -0.8, 0.8, 1.0], "code": [1.0] * 4}, method=method, epsilon=0.9).criterion == criterion
    )


def test_the_effect_is_told_per_agent_and_for_all():
    code, tool, *rest = advised({"tool": [3.0, -4.0, 0.0, 0.0], "code": [0.0, 1.0, 0.0, 0.0]}, top=0.25).effect
    counted = "1 of 4 entries (25.0%) are active; the other 3, dropped or never changed, hold"
    assert code == f"agent 'code': {counted} less than 0.1% of the squared norm of its update"
    assert tool == f"agent 'tool': {counted} 36.0% of the squared norm of its update"
    assert rest == [
        "1 entries are active in any agent: 100.0% shared, 0.0% unique",
        "every active entry is shared: RAM takes means only, and λ applies to nothing",
    ]
    nothing = advised(apart(1e-7), epsilon=1e-5).effect
    assert nothing[-1] == "nothing is active in any agent: the generalist equals the base"


# --- notes -----------------------------------------------------------------------------------------------------------


def note(advice: Advice, words: str) -> str:
    (found,) = (sentence for sentence in advice.notes if words in sentence)
    return found


def test_every_advice_says_what_it_rests_on():
    for advice in (advised(apart()), advised(same(), epsilon=1e-5), advised(apart(), method="average")):
        assert "small models only" in advice.notes[-1]


@pytest.mark.parametrize(
    ("dtype", "epsilon", "exponent"),
    [(BF16, 1e-5, -9), (BF16, 1e-4, -6), (BF16, 2.0**-20, -12), (FP16, 1e-5, -6), (FP16, 2.0**-15, -4)],
)
def test_the_weights_whose_ulp_exceeds_epsilon_are_those_that_are_told(dtype, epsilon: float, exponent: int):
    edge = torch.tensor([2.0**exponent, 2.0 ** (exponent - 1)], dtype=dtype)
    step = torch.nextafter(edge, torch.full_like(edge, 9)).float() - edge.float()
    assert (step > epsilon).tolist() == [True, False], "the truth, by torch"
    large, small = (float(size) for size in step)
    base = torch.cat([edge, edge[:1].expand(8)])
    agents = {"tool": [large, small, large, *[0] * 7], "code": [*[0] * 4, large, large, *[0] * 4]}
    advice = advised(agents, base=base, dtype=dtype, epsilon=epsilon)
    assert f"|w| ≥ 2^{exponent} = {2.0**exponent:.3g}" in note(advice, "one ulp of its weight")


def test_weights_whose_ulp_exceeds_epsilon_are_no_matter_where_nothing_is_dropped():
    for knobs in ({"epsilon": 1e-5}, {}, {"ulp": True}):
        advice = advised(apart(), base=torch.ones(10, dtype=BF16), dtype=BF16, **knobs)
        assert not any("one ulp of its weight" in sentence for sentence in advice.notes)


@pytest.mark.parametrize(("r", "most"), [(0.2, 2), (0.1, 4), (0.02, 24)])
def test_the_changes_that_lambda_leaves_alone_are_those_that_are_told(r: float, most: int):
    """λ = 1 + r, on changes of 1, 2, … ulp, saved in bfloat16."""
    base = torch.full((40,), 1.0, dtype=BF16)
    ulps = torch.arange(40) / 128.0
    shared = {"tool": [*ulps.tolist(), *[1.0] * 60, *[0.0] * 20], "code": [*[0.0] * 40, *[1.0] * 60, *[2.0] * 20]}
    base = torch.cat([base, torch.ones(80, dtype=BF16)])
    models = {name: {"w": (base.float() + torch.tensor(tau)).bfloat16()} for name, tau in shared.items()}
    merged, report = merge_state_dicts({"w": base}, models, MergeConfig(epsilon=1e-5, r=r))
    assert report.agents["tool"].lambda_ == pytest.approx(1 + r)
    same = (merged["w"][:40] == models["tool"]["w"][:40]).tolist()
    assert same[: most + 2] == [True] * (most + 1) + [False], "the truth, by merging"
    assert f" {most} ulp (agent 'tool', λ = {1 + r:.4g})" in note(report.advice, "λ does nothing")


def test_lambda_is_no_matter_where_the_generalist_is_stored_in_float32_or_nothing_is_rescaled():
    for advice in (advised(apart(), epsilon=1e-5), advised(apart(), dtype=BF16, r=0), advised(same(), dtype=BF16)):
        assert not any("λ does nothing" in sentence for sentence in advice.notes)


def test_an_agent_that_changed_less_than_top_is_told():
    advice = advised({"tool": [1.0, 2.0, 3.0, 4.0, 5.0, 0, 0, 0, 0, 0], "code": [0] * 9 + [1.0]}, top=0.3)
    assert "agent 'code' changed 10.00% of its entries" in note(advice, "fewer than top 0.3 asks for")


def test_agents_in_more_precision_than_the_generalist_are_told_what_rounds_away():
    base = torch.ones(10, dtype=BF16)
    models = {name: {"w": base.float() + torch.tensor(tau)} for name, tau in apart().items()}
    advice = merge_state_dicts({"w": base}, models, MergeConfig())[1].advice
    assert "|w|/256" in note(advice, "agents 'code', 'tool' in float32")
    assert (torch.tensor([1 + 1 / 260, 1 + 1 / 250]).bfloat16() == 1).tolist() == [True, False], "the truth, by torch"


# --- for any merge ---------------------------------------------------------------------------------------------------


@PROPERTY
@given(merges())
def test_advice_is_a_function_of_the_report_and_its_option_is_the_criterion(case: tuple[Family, dict[str, Any]]):
    family, knobs = case
    report = merge_state_dicts(family.base, family.agents, MergeConfig(**knobs), threads=1)[1]
    advice = report.advice
    assert advice == advise(MergeReport.model_validate_json(report.to_json()))
    option, _, value = advice.option.removeprefix("--").partition(" ")
    chosen = MergeConfig(**{"method": report.config.method, option: float(value) if value else True})
    assert chosen.criterion == advice.criterion
    assert advice.in_force == (advice.criterion == report.criterion)
    asked = " ".join(warning for warning in report.warnings if "use `ulp`" not in warning)
    if "use `top`" in asked and len(report.agents) > 1 and not any("use `ulp`" in w for w in report.warnings):
        assert not advice.in_force, "a warning that asks for another criterion is not met by advice to keep this one"
