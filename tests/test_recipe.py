"""Recipes: what may be written, what is said about mistakes, and how functions beside them are found."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ram_trl.config import MergeConfig
from ram_trl.recipe import (
    RECIPES,
    ContinualRow,
    ContinualSection,
    FactorRow,
    MergeRow,
    Recipe,
    load_function,
    load_recipe,
)
from ram_trl.training.callback import RAMCallback

SMALL: dict[str, Any] = {
    "base": {"make": "tasks/base.py:make", "args": {"steps": 100, "rate": 1}},
    "agents": [
        {"name": "tool", "task": "tasks/tool.py:tool", "args": {"max_steps": 60, "beta": 0}},
        {"name": "code", "task": "tasks/code.py:code", "trainer": "grpo"},
    ],
    "scoring": {"dev": 40, "test": 50},
    "merge": {"name": "ram+"},
    "compare": [{"name": "ties", "method": "ties", "tune": {"scale": [0.5, 1]}}],
    "fast": {"base": {"steps": 3}, "trainer": {"max_steps": 2}, "scoring": {"test": 5}},
}


ADAPTED = [agent | {"peft": {"r": 2}} for agent in SMALL["agents"]]
CONTINUAL: dict[str, Any] = {"merge_every": 6, "rows": [{"name": "on"}, {"name": "off", "carry": False}]}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(copy.deepcopy(SMALL) | changes))
    return path


def test_the_shipped_recipe_holds_the_promised_rows() -> None:
    recipe = load_recipe(RECIPES / "demo.yaml")
    assert [agent.name for agent in recipe.agents] == ["tool", "code", "mem"]
    rows = {row.name: row for row in recipe.rows}
    assert list(rows) == ["average", "task_arithmetic@1.0", "task_arithmetic@0.7", "ties", "dare", "ram@1e-5", "ram+"]
    assert rows["ram+"].config == MergeConfig()
    assert rows["ram@1e-5"].config == MergeConfig(epsilon=1e-5, r=0)
    assert {name for name, row in rows.items() if row.tune} == {"ties", "dare"}
    assert all(set(rows[name].tune) == {"scale"} for name in ("ties", "dare"))


def test_the_shipped_recipe_merges_continually_in_ten_equal_rounds_at_a_constant_rate() -> None:
    recipe = load_recipe(RECIPES / "demo.yaml")
    assert recipe.runs == [ContinualRow(name="continual"), ContinualRow(name="continual-drop", carry=False)]
    assert recipe.continual is not None
    for agent in recipe.agents:
        assert agent.args["max_steps"] == 10 * recipe.continual.merge_every
        assert agent.args["lr_scheduler_type"] == "constant"
    quick = recipe.quick()
    assert quick.continual is not None
    assert quick.agents[0].args["max_steps"] == 2 * quick.continual.merge_every


def test_the_shipped_lora_recipe_is_the_demo_with_adapters() -> None:
    recipe, plain = load_recipe(RECIPES / "lora.yaml"), load_recipe(RECIPES / "demo.yaml")
    assert (recipe.base, recipe.scoring, recipe.fast) == (plain.base, plain.scoring, plain.fast)
    assert [(agent.name, agent.task) for agent in recipe.agents] == [
        (agent.name, agent.task) for agent in plain.agents
    ]
    assert all(agent.peft for agent in recipe.agents)
    assert recipe.merge.config == MergeConfig()
    rows = ["ab-average", "peft-linear", "average", "task_arithmetic", "ties", "ram", "ram+"]
    assert [row.name for row in recipe.one_shot] == rows
    assert [row.name for row in recipe.one_shot if row.tune] == ["peft-linear", "task_arithmetic", "ties"]
    assert [row.lora for row in recipe.runs] == ["fold", "svd"]
    assert recipe.continual is not None
    for agent in recipe.agents:
        assert agent.args["max_steps"] == 10 * recipe.continual.merge_every
        assert agent.args["lr_scheduler_type"] == "constant"


def test_a_merge_of_factors_has_a_weight_or_several_to_try() -> None:
    assert FactorRow(name="x").candidates() == [({}, 1.0)]
    assert FactorRow(name="x", weight="mean").candidates() == [({}, "mean")]
    tuned = FactorRow(name="x", tune={"weight": [0.5, 1]})
    assert tuned.candidates() == [({"weight": 0.5}, 0.5), ({"weight": 1.0}, 1.0)]


def test_fast_changes_single_values_and_nothing_else(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path))
    quick = recipe.quick()
    assert quick.base.args == {"steps": 3, "rate": 1}
    assert [agent.args for agent in quick.agents] == [{"max_steps": 2, "beta": 0}, {"max_steps": 2}]
    assert (quick.scoring.dev, quick.scoring.test) == (40, 5)
    assert quick.rows == recipe.rows
    assert recipe.base.args == {"steps": 100, "rate": 1}


def test_a_recipe_needs_no_continual_section(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path))
    assert recipe.continual is None
    assert recipe.runs == []
    assert recipe.quick().continual is None


def test_fast_changes_how_often_agents_merge(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, continual=CONTINUAL, fast={"continual": {"merge_every": 2}}))
    assert recipe.quick().continual == ContinualSection(**(CONTINUAL | {"merge_every": 2}))
    assert recipe.continual == ContinualSection(**CONTINUAL)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_what_a_recipe_says_of_merging_reaches_the_callback(tmp_path: Path) -> None:
    told = {"merge_every": 3, "carry": False, "wait": 2, "moments": "reset", "lora": "svd", "export_rank": 8}
    section = ContinualSection(**told)
    config = RAMCallback(tmp_path / "hub", "tool", tmp_path / "base", **section.knobs()).config
    assert {name: getattr(config, name) for name in section.knobs()} == section.knobs()
    assert {name: getattr(config, name) for name in told} == told


def test_a_row_is_a_name_and_the_fields_of_a_merge_config() -> None:
    row = MergeRow(**{"name": "x", "preset": "paper", "top": 0.1})
    assert row.config == MergeConfig(top=0.1, r=0.1, alpha=2.0)
    assert row.candidates() == [({}, row.config)]


def test_a_grid_is_every_combination_in_the_order_written() -> None:
    row = MergeRow(**{"name": "x", "method": "ties", "top": 0.3, "tune": {"scale": [1, 0.5], "top": [0.1, 0.2]}})
    knobs = [{"scale": s, "top": t} for s in (1, 0.5) for t in (0.1, 0.2)]
    assert row.candidates() == [(k, MergeConfig(method="ties", **k)) for k in knobs]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bases": 1}, "bases is not a field here"),
        ({"base": {"args": {}}}, "base: name a checkpoint (model) or a function that makes one (make)"),
        ({"base": {"model": "m", "make": "a.py:a"}}, "base: name a checkpoint (model) or a function"),
        ({"base": {"model": "m", "args": {"steps": 1}}}, "base: args are the arguments of make"),
        ({"base": {"make": "a.py:a", "revision": "x"}}, "base: revision belongs to model"),
        ({"base": {"make": "tasks/base.py"}}, "base.make: 'tasks/base.py' does not name a function"),
        ({"agents": []}, "agents is []: list should have at least 1 item"),
        ({"agents": [{"name": "a", "task": "a.py:a", "lr": 1}]}, r"agents[0].lr is not a field here"),
        ({"agents": [{"name": "a/b", "task": "a.py:a"}]}, "agents[0].name: 'a/b' is not an agent's name"),
        ({"agents": [{"name": "a", "task": "a.py:a", "trainer": "dpo"}]}, "agents[0].trainer is 'dpo'"),
        ({"agents": [{"name": "a", "task": "a.py:a", "devices": [-1]}]}, "agents[0].devices[0] is -1"),
        ({"launch": {"schedule": "all"}}, "launch.schedule is 'all'"),
        ({"launch": {"gpus": 8}}, "launch.gpus is not a field here"),
        ({"continual": CONTINUAL | {"wait": 0}}, "continual.wait"),
        ({"agents": [{"name": "a", "task": "a.py:a"}] * 2}, "two agents are called 'a'"),
        ({"agents": [{"name": "average", "task": "a.py:a"}]}, "an agent is called 'average'"),
        ({"scoring": {"dev": 0, "test": 1}}, "scoring.dev is 0"),
        ({"merge": {"name": "x", "method": "rum"}}, "merge: method is 'rum'"),
        ({"merge": {"name": "x", "scale": 1}}, "merge: method 'ram' does not use scale"),
        ({"merge": {"name": "x", "preset": "best"}}, "merge: unknown preset 'best'"),
        ({"merge": {"method": "ram"}}, "merge.name is missing"),
        ({"merge": {"name": "x", "tune": {"r": [0, 1]}}}, "the generalist is not tuned"),
        ({"merge": "ram"}, "merge: 'ram' is not a mapping"),
        ({"compare": [{"name": "ram+"}]}, "two models of the comparison are called 'ram+'"),
        ({"compare": [{"name": "agent:tool"}]}, "two models of the comparison are called 'agent:tool'"),
        ({"compare": [{"name": "x", "tune": {"r": []}}]}, "compare[0]: tune.r has no values to try"),
        ({"compare": [{"name": "x", "tune": {"scale": [1]}}]}, "compare[0]: method 'ram' does not use scale"),
        ({"continual": {"rows": [{"name": "x"}]}}, "continual.merge_every is missing"),
        ({"continual": CONTINUAL | {"merge_every": 0}}, "continual.merge_every is 0"),
        ({"continual": CONTINUAL | {"rows": []}}, "continual.rows is []"),
        ({"continual": CONTINUAL | {"rows": [{"name": "ties"}]}}, "two models of the comparison are called 'ties'"),
        (
            {"continual": CONTINUAL | {"rows": [{"name": "x", "keep": 1}]}},
            "continual.rows[0].keep is not a field here",
        ),
        ({"fast": {"continual": {"merge_every": 2}}}, "fast.continual changes the section continual, which"),
        ({"compare": [{"name": "x", "epsilion": 1}]}, "compare[0]: epsilion is not a field here"),
        (
            {"factors": [{"name": "x"}]},
            "factors merges the A and B of adapters, but not every agent has a section peft",
        ),
        ({"factors": [{"name": "x", "tune": {"scale": [1]}}]}, "factors[0]: tune is {'scale': [1.0]}; it may hold"),
        ({"factors": [{"name": "x", "tune": {"weight": []}}]}, "factors[0]: tune is {'weight': []}; it may hold"),
        ({"factors": [{"name": "ties"}], "agents": ADAPTED}, "two models of the comparison are called 'ties'"),
    ],
)
def test_a_mistake_is_a_sentence_that_names_file_and_field(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is checked below, as plain text)
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("scoring: {dev: 1, test: 1}\nmerge: {name: x}\n")
    with pytest.raises(ValueError, match="base is missing; agents is missing"):
        load_recipe(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml: there is no such file"):
        load_recipe(tmp_path / "none.yaml")


def test_a_recipe_can_be_written_and_read_back(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path))
    assert recipe.model_dump()["compare"] == SMALL["compare"]
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def folder_of_tasks(parent: Path, answer: int) -> Path:
    tasks = parent / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "common.py").write_text(f"ANSWER = {answer}\n")
    (tasks / "one.py").write_text("from .common import ANSWER\n\n\ndef one():\n    return ANSWER\n")
    (tasks / "two.py").write_text("from . import one\n\n\ndef two():\n    return one\n")
    return parent


def test_files_of_a_folder_import_each_other(tmp_path: Path) -> None:
    folder = folder_of_tasks(tmp_path, 41)
    one = load_function("tasks/one.py:one", folder)
    assert one() == 41
    assert load_function("tasks/two.py:two", folder)().one is one, "a file is loaded once"


def test_folders_do_not_meet_each_other_or_an_imported_tasks_package(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "elsewhere" / "tasks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("MINE = True\n")
    monkeypatch.syspath_prepend(package.parent)
    import tasks

    before = list(sys.path)
    first, second = folder_of_tasks(tmp_path / "a", 1), folder_of_tasks(tmp_path / "b", 2)
    assert load_function("tasks/one.py:one", first)() == 1
    assert load_function("tasks/one.py:one", second)() == 2
    assert load_function(f"{first}/tasks/one.py:one", second)() == 1, "an absolute path is fine"
    assert sys.path == before
    assert sys.modules["tasks"] is tasks
    assert tasks.MINE
    monkeypatch.delitem(sys.modules, "tasks")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tasks/none.py:x", "there is no such file"),
        ("tasks/one.py:x", "has no function 'x'"),
        ("tasks/one.py:ANSWER", "has no function 'ANSWER'"),
        ("tasks/broken.py:x", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_function_that_cannot_be_had_is_told(tmp_path: Path, name: str, told: str) -> None:
    folder = folder_of_tasks(tmp_path, 1)
    (folder / "tasks" / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=told):
        load_function(name, folder)
