"""Bad input: everything that is wrong is told at once, by agent and tensor, with what was found and expected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ram_trl import MergeConfig, MergeInputError, Problem, merge_state_dicts

Model = dict[str, Tensor]


@pytest.fixture
def base() -> Model:
    return {
        "embed": torch.zeros(6, 4),
        "head": torch.zeros(6, 4),
        "norm": torch.ones(4),
        "half": torch.zeros(3, dtype=torch.float16),
        "positions": torch.arange(3),
    }


@pytest.fixture
def tool(base: Model) -> Model:
    """An agent with which nothing is wrong."""
    return {name: tensor + 1 if tensor.is_floating_point() else tensor.clone() for name, tensor in base.items()}


@pytest.fixture
def code(tool: Model) -> Model:
    """Another one."""
    return {name: tensor.clone() for name, tensor in tool.items()}


def refused(base: Model, agents: Mapping[str, Model], **knobs: Any) -> MergeInputError:
    """The error of a merge that cannot be done."""
    with pytest.raises(MergeInputError) as error:
        merge_state_dicts(base, agents, MergeConfig(**knobs))
    return error.value


def only_problem(error: MergeInputError) -> Problem:
    assert len(error.problems) == 1
    assert str(error).startswith("cannot merge, 1 problem; nothing was written:\n")
    return error.problems[0]


def assert_told(problem: Problem, where: str, tensor: str | None, *words: str) -> None:
    assert (problem.where, problem.tensor) == (where, tensor)
    for word in (where, *([f"'{tensor}'"] if tensor else []), *words):
        assert word in str(problem)


# --- one at a time ---------------------------------------------------------------------------------------------------


def test_good_input_is_merged(base: Model, tool: Model, code: Model):
    merged, _ = merge_state_dicts(base, {"tool": tool, "code": code}, MergeConfig(epsilon=0))
    assert merged["norm"].tolist() == [2.0] * 4


def test_a_missing_tensor_is_told_with_its_shape(base: Model, tool: Model):
    del tool["head"]
    assert_told(only_problem(refused(base, {"tool": tool})), "agent 'tool'", "head", "missing", "[6, 4]")


def test_an_extra_tensor_is_told_with_its_shape(base: Model, tool: Model):
    tool["value_head"] = torch.zeros(4, 1)
    problem = only_problem(refused(base, {"tool": tool}))
    assert_told(problem, "agent 'tool'", "value_head", "not in the base", "[4, 1]")


def test_another_shape_is_told_with_both(base: Model, tool: Model):
    tool["norm"] = torch.ones(5)
    assert_told(only_problem(refused(base, {"tool": tool})), "agent 'tool'", "norm", "[5]", "[4]")


def test_a_transposed_matrix_is_not_merged_by_its_size(base: Model, tool: Model):
    tool["embed"] = tool["embed"].t()
    assert_told(only_problem(refused(base, {"tool": tool})), "agent 'tool'", "embed", "[4, 6]", "[6, 4]")


def test_a_resized_vocabulary_is_told_as_such(base: Model, tool: Model):
    tool["embed"] = torch.zeros(8, 4)
    problem = only_problem(refused(base, {"tool": tool}))
    assert_told(problem, "agent 'tool'", "embed", "8 rows against 6", "vocabulary")


def test_an_empty_tensor_is_told_with_its_shape(base: Model, tool: Model):
    base["norm"], tool["norm"] = torch.ones(0), torch.ones(0)
    assert_told(only_problem(refused(base, {"tool": tool})), "agent 'tool'", "norm", "[0]", "sharded")


def test_an_agent_that_is_empty_where_the_base_is_not_is_told(base: Model, tool: Model):
    tool["norm"] = torch.ones(0)
    assert_told(only_problem(refused(base, {"tool": tool})), "agent 'tool'", "norm", "[0]", "[4]")


def test_an_agent_that_untied_tied_weights_is_told(base: Model, tool: Model):
    base["head"] = base["embed"]
    tool["head"] = tool["embed"] * 2
    problem = only_problem(refused(base, {"tool": tool}))
    assert_told(problem, "agent 'tool'", "head", "tied to 'embed' in the base", "tie_word_embeddings")


def test_an_agent_that_untied_one_entry_in_a_large_tensor_is_told():
    embed = torch.zeros(3, 700_001)
    agent = {"embed": torch.zeros_like(embed), "head": torch.zeros_like(embed)}
    agent["head"][2, -1] = 1.0
    problem = only_problem(refused({"embed": embed, "head": embed}, {"tool": agent}))
    assert_told(problem, "agent 'tool'", "head", "tied to 'embed' in the base")


def test_an_agent_that_tied_untied_weights_is_told(base: Model, tool: Model):
    tool["head"] = tool["embed"]
    problem = only_problem(refused(base, {"tool": tool}))
    assert_told(problem, "agent 'tool'", "head", "tied to 'embed' here", "tie_word_embeddings")


@pytest.mark.parametrize(
    ("in_base", "in_agent"),
    [
        pytest.param(torch.arange(3), torch.tensor([0, 1, 3]), id="whole numbers"),
        pytest.param(torch.tensor([True, False]), torch.tensor([True, True]), id="bools"),
        pytest.param(torch.ones(2).double(), torch.tensor([1.0, 1.5]).double(), id="float64"),
    ],
)
def test_a_buffer_that_differs_is_told_with_its_dtype(base: Model, tool: Model, in_base: Tensor, in_agent: Tensor):
    base["positions"], tool["positions"] = in_base, in_agent
    problem = only_problem(refused(base, {"tool": tool}))
    assert_told(problem, "agent 'tool'", "positions", "differs", str(in_base.dtype))


@pytest.mark.parametrize(
    ("in_base", "in_agent"),
    [
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.float32),
        (torch.uint8, torch.float16),
        (torch.int64, torch.int32),
    ],
)
def test_dtypes_that_cannot_be_merged_are_told_both(
    base: Model, tool: Model, in_base: torch.dtype, in_agent: torch.dtype
):
    base["norm"], tool["norm"] = torch.ones(4, dtype=in_base), torch.ones(4, dtype=in_agent)
    problem = only_problem(refused(base, {"tool": tool}))
    assert_told(problem, "agent 'tool'", "norm", str(in_base), str(in_agent))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_in_an_agent_is_told_with_count_and_place(base: Model, tool: Model, value: float):
    tool["embed"].view(-1)[[7, 11]] = value
    problem = only_problem(refused(base, {"tool": tool}))
    assert_told(problem, "agent 'tool'", "embed", "2 NaN or Inf", "flat index 7")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_in_the_base_is_told_as_the_base_s(base: Model, tool: Model, code: Model, value: float):
    base["embed"][2, 3] = value
    problem = only_problem(refused(base, {"tool": tool, "code": code}))
    assert_told(problem, "base", "embed", "1 NaN or Inf", "flat index 11")


def test_infinities_that_cancel_are_told_of_base_and_agent(base: Model, tool: Model):
    base["norm"][1] = tool["norm"][1] = torch.inf
    problems = refused(base, {"tool": tool}).problems
    assert [(problem.where, problem.tensor) for problem in problems] == [("base", "norm"), ("agent 'tool'", "norm")]


@pytest.mark.parametrize("knobs", [{}, {"epsilon": 0}, {"epsilon": 1e-5}, {"ulp": True}, {"method": "average"}])
def test_nan_is_found_under_every_criterion(base: Model, tool: Model, code: Model, knobs: dict[str, Any]):
    code["half"][1] = torch.nan
    problem = only_problem(refused(base, {"tool": tool, "code": code}, **knobs))
    assert_told(problem, "agent 'code'", "half", "flat index 1")


def test_the_place_of_a_nan_is_right_in_a_tensor_of_many_chunks():
    theta = torch.ones(300_007)
    theta[200_003] = torch.nan
    problem = only_problem(refused({"w": torch.zeros(300_007)}, {"tool": {"w": theta}}))
    assert_told(problem, "agent 'tool'", "w", "1 NaN or Inf", "flat index 200003")


def test_a_task_vector_beyond_fp32_is_told():
    base, agent = {"w": torch.tensor([3e38, 0.0])}, {"w": torch.tensor([-3e38, 0.0])}
    assert_told(only_problem(refused(base, {"tool": agent})), "agent 'tool'", "w", "overflows fp32")


def test_a_merged_value_beyond_fp16_is_told_with_the_value_and_the_limit():
    base = {"w": torch.zeros(3, dtype=torch.float16)}
    agents = {name: {"w": torch.tensor([0.0, 60000.0, 0.0], dtype=torch.float16)} for name in ("tool", "code")}
    problem = only_problem(refused(base, agents, method="task_arithmetic"))
    assert_told(problem, "output", "w", "120000", "65504", "float16")


def test_a_merged_value_just_within_fp16_is_stored():
    base = {"w": torch.zeros(1, dtype=torch.float16)}
    agents = {name: {"w": torch.tensor([32752.0], dtype=torch.float16)} for name in ("tool", "code")}
    merged, _ = merge_state_dicts(base, agents, MergeConfig(method="task_arithmetic"))
    assert merged["w"].item() == 65504


@pytest.mark.parametrize("name", ["", "../tool", "a b", ".hidden", "-x", "tool/1", "tool\n", "früh"])
def test_a_bad_agent_name_is_told(base: Model, tool: Model, name: str):
    assert_told(
        only_problem(refused(base, {name: tool})), f"agent '{name}'", None, "letters, digits, '.', '_' and '-'"
    )


@pytest.mark.parametrize("name", ["tool", "Tool-2", "9", "a.b_c-d"])
def test_a_good_agent_name_is_taken(base: Model, tool: Model, name: str):
    assert list(merge_state_dicts(base, {name: tool})[1].agents) == [name]


def test_no_agents_are_told(base: Model):
    assert_told(only_problem(refused(base, {})), "config", None, "no agents")


def test_a_weight_for_an_unknown_agent_is_told_with_the_known_ones(base: Model, tool: Model, code: Model):
    problem = only_problem(refused(base, {"tool": tool, "code": code}, weights={"toll": 0.5, "code": 2.0}))
    assert_told(problem, "config", None, "'toll'", "code, tool")


# --- all at once -----------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_told_in_one_error(base: Model, tool: Model, code: Model):
    base["tied"] = base["norm"]
    tool["tied"], code["tied"] = tool["norm"], torch.full((4,), 9.0)
    del tool["head"]
    tool["extra"] = torch.zeros(2)
    tool["embed"] = torch.zeros(6, 5)
    code["half"] = torch.zeros(3, dtype=torch.int8)
    code["positions"] = torch.arange(1, 4)
    code["norm"] = torch.ones(0)
    error = refused(base, {"tool": tool, "code": code, "no/name": dict(base)}, weights={"toll": 0.5})
    assert {(problem.where, problem.tensor, problem.kind) for problem in error.problems} == {
        ("config", None, ""),
        ("agent 'no/name'", None, ""),
        ("agent 'tool'", "head", "missing tensor"),
        ("agent 'tool'", "extra", "extra tensor"),
        ("agent 'tool'", "embed", "shape"),
        ("agent 'code'", "tied", "tied"),
        ("agent 'code'", "half", "dtype"),
        ("agent 'code'", "positions", "buffer"),
        ("agent 'code'", "norm", "shape"),
    }
    assert str(error).startswith("cannot merge, 9 problems; nothing was written:\n")
    for problem in error.problems:
        assert f"\n- {problem.where}: {problem.what}" in str(error)


def test_all_that_is_not_finite_is_told_in_one_error(base: Model, tool: Model, code: Model):
    base["norm"][0] = torch.nan
    tool["embed"][0, 0] = torch.inf
    tool["half"][2] = torch.nan
    code["embed"][5, 3] = -torch.inf
    error = refused(base, {"tool": tool, "code": code})
    assert {(problem.where, problem.tensor) for problem in error.problems} == {
        ("base", "norm"),
        ("agent 'tool'", "embed"),
        ("agent 'tool'", "half"),
        ("agent 'code'", "embed"),
    }
    assert len(error.problems) == 4


def test_many_problems_of_one_kind_are_counted_and_the_first_shown():
    base = {f"layers.{i:02}": torch.zeros(1) for i in range(12)}
    error = refused(base, {"tool": {"layers.03": torch.zeros(1)}, "code": {"layers.05": torch.zeros(1)}})
    assert len(error.problems) == 22
    for agent in ("tool", "code"):
        assert len(re.findall(f"agent '{agent}': 'layers", str(error))) == 8
        assert f"agent '{agent}': … and 3 more of the kind 'missing tensor'" in str(error)


def test_the_error_is_a_value_error(base: Model):
    assert isinstance(refused(base, {}), ValueError)
