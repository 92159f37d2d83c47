"""The demo: real GRPO, real merges, a report whose numbers are those of the models it leaves behind."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import warnings
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev

import datasets
import numpy as np
import pytest
import torch
import transformers
import yaml
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ram_trl.config import MergeConfig
from ram_trl.continual.export import round_report
from ram_trl.continual.hub import Hub
from ram_trl.continual.rounds import Rounds
from ram_trl.demo import DemoReport, run_demo, training
from ram_trl.engine.merging import merge_state_dicts
from ram_trl.evaluate import accuracies
from ram_trl.recipe import RECIPES, load_function, load_recipe
from ram_trl.team import Team
from ram_trl.training.callback import attach
from ram_trl.weights import entries

TASKS = ["tool", "code", "mem"]
MERGES = ["average", "task_arithmetic@1.0", "task_arithmetic@0.7", "ties", "dare", "ram@1e-5", "ram+"]
RUNS = ["continual", "continual-drop"]
NAMES = ["base", *(f"agent:{task}" for task in TASKS), *MERGES, *RUNS]


def process_state() -> dict[str, object]:
    """What the demo changes for the whole process while it runs."""
    return {
        "threads": torch.get_num_threads(),
        "denormals": float(torch.full((1 << 16,), 1e-39).mul(0.5).count_nonzero()),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE", "TRL"))},
        "logging": logging.root.manager.disable,
        "bars": (transformers.utils.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()),
        "warnings": list(warnings.filters),
    }


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory):
    """The shipped recipe in its quick form: folder, report, what was printed, process state before and after."""
    out, console = tmp_path_factory.mktemp("demo") / "out", Console(file=StringIO(), width=100)
    before = process_state()
    report = run_demo(RECIPES / "demo.yaml", out, seeds=1, fast=True, console=console)
    return out, report, console.file.getvalue(), (before, process_state())


def test_the_report_holds_every_model_and_column(fast) -> None:
    out, report, _, _ = fast
    written = json.loads((out / "report.json").read_text())
    assert list(written["models"]) == NAMES
    for scores in written["models"].values():
        assert list(scores) == [*TASKS, "average"]
        assert scores["average"] == pytest.approx(fmean(scores[task] for task in TASKS))
    assert written["per_seed"] == [{"seed": 0, "models": written["models"]}]
    assert written["std"] is None
    assert written["fast"] is True
    assert DemoReport.model_validate(written) == report


def test_scores_are_those_of_the_saved_models_on_the_test_split(fast) -> None:
    out, report, _, _ = fast
    rows = {name: load_function(f"tasks/{name}.py:{name}", RECIPES)().rows("test", 40) for name in TASKS}
    folders = {"base": out / "base", "ram+": out / "generalist"}
    # The base is in float32, so the export of a round is its state, to the bit.
    hub = Hub(out / "hub")
    assert hub.latest() == 3
    folders["continual"] = hub.generalist_folder(3)
    folders |= {f"agent:{name}": out / "agents" / name for name in TASKS}
    for name, folder in folders.items():
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert accuracies(model, tokenizer, rows) == report.models[name], name


def test_the_generalist_is_our_default_merge_of_the_saved_agents(fast) -> None:
    out, report, _, _ = fast
    base, generalist = (load_file(out / name / "model.safetensors") for name in ("base", "generalist"))
    agents = {name: load_file(out / "agents" / name / "model.safetensors") for name in TASKS}
    merged, account = merge_state_dicts(base, agents, MergeConfig())
    assert merged.keys() == generalist.keys()
    assert all(torch.equal(merged[name], generalist[name]) for name in merged)
    assert report.overlap == account.agents
    assert list(report.overlap) == TASKS


def test_every_agent_was_trained(fast) -> None:
    out, report, _, _ = fast
    assert all(agent.active > 0 for agent in report.overlap.values())
    written = json.loads((out / "report.json").read_text())["overlap"]["tool"]
    assert written["shared"] + written["unique"] == written["active"]
    assert written["lambda"] == pytest.approx(1 + 0.2 * min(written["rho"], 1.0))


def test_every_round_is_scored_on_dev_and_accounted_for(fast) -> None:
    out, report, _, _ = fast
    hub = Hub(out / "hub")
    assert list(report.rounds) == RUNS
    # Two rounds of three steps, and one more for what agents still carry at the end; continual-drop has nothing left.
    assert [[found.round for found in rounds] for rounds in report.rounds.values()] == [[1, 2, 3], [1, 2]]
    rows = {name: load_function(f"tasks/{name}.py:{name}", RECIPES)().rows("dev", 20) for name in TASKS}
    for found in report.rounds["continual"]:
        model = AutoModelForCausalLM.from_pretrained(hub.generalist_folder(found.round))
        assert accuracies(model, AutoTokenizer.from_pretrained(out / "base"), rows) == found.scores
        told = round_report(hub, found.round)
        assert told is not None
        assert list(found.density) == list(found.lambda_) == list(found.shared) == TASKS
        for name, agent in told[1].agents.items():
            assert (found.density[name], found.lambda_[name]) == (agent.density, agent.lambda_)
            assert found.shared[name] == (agent.shared / agent.active if agent.active else None)
        assert found.sign_conflict == told[1].sign_conflict
    written = json.loads((out / "report.json").read_text())["rounds"]["continual"][0]
    assert list(written) == ["round", "scores", "density", "lambda", "shared", "sign_conflict"]
    assert list(report.dev) == [*MERGES, "base"]


def test_only_ties_and_dare_are_tuned_and_on_dev(fast) -> None:
    _, report, _, _ = fast
    assert list(report.tuned) == ["ties", "dare"]
    for tuning in report.tuned.values():
        (choice,) = tuning.per_seed
        assert tuning.split == "dev"
        assert [knobs["scale"] for knobs, _ in choice.tried] == tuning.grid["scale"]
        best = max(average for _, average in choice.tried)
        assert choice.chosen == next(knobs for knobs, average in choice.tried if average == best)


def test_the_process_is_left_as_it_was(fast) -> None:
    before, after = fast[3]
    for what in before:
        assert before[what] == after[what], what


def test_the_table_and_then_the_paths_are_printed(fast) -> None:
    out, report, printed, _ = fast
    for name, scores in report.models.items():
        line = next(line for line in printed.splitlines() if line.split()[:1] == [name] and "/" not in line)
        assert line.split()[-4:] == [f"{scores[column]:.1f}" for column in (*TASKS, "average")]
    names = ["report.md", "report.json", "scores.png", "overlap.png", "rounds.png", "hub", "generalist"]
    assert printed.split()[-7:] == [str(out / name) for name in names]
    assert all((out / name).exists() for name in names)
    assert "Warning" not in printed


def test_the_markdown_says_what_was_tuned_and_what_was_not(fast) -> None:
    out, report, _, _ = fast
    text = (out / "report.md").read_text()
    assert "ram+ is not tuned at all" in text
    assert f"ties (scale {report.tuned['ties'].per_seed[0].chosen['scale']:g} out of 0.5, 0.7, 1, 1.4, 2)" in text
    assert all(f"| {name} |" in text for name in NAMES)
    assert "| ram+ while training, every 3 steps, the unconsumed dropped |" in text
    assert "](rounds.png)" in text
    assert "its numbers mean nothing" in text


REWARDED_ALWAYS = """
import dataclasses

from . import mem, tool
from .common import make_task


def vowels(completions, **columns):
    return [sum(letter in "aeiou" for letter in text) / 12 for text in completions]


def first():
    return dataclasses.replace(make_task(tool.draw), rewards=[vowels])


def second():
    return dataclasses.replace(make_task(mem.draw), rewards=[vowels])
"""


@pytest.fixture
def own_recipe(tmp_path: Path) -> Path:
    """A copied and edited recipe, small enough to run several times, whose reward does not wait for skill."""
    shutil.copytree(RECIPES / "tasks", tmp_path / "recipe" / "tasks")
    (tmp_path / "recipe" / "tasks" / "own.py").write_text(REWARDED_ALWAYS)
    args = {"max_steps": 2, "per_device_train_batch_size": 16, "max_completion_length": 6, "learning_rate": 1e-3}
    recipe = {
        "base": {"make": "tasks/base.py:tiny_qwen3", "args": {"learning_steps": 30, "careless_steps": 10}},
        "agents": [{"name": name, "task": f"tasks/own.py:{name}", "args": args} for name in ("first", "second")],
        "scoring": {"dev": 20, "test": 20},
        "merge": {"name": "mine", "top": 0.3},
        "compare": [{"name": "dare", "method": "dare", "tune": {"drop": [0.2, 0.8]}}],
        "continual": {"merge_every": 1, "rows": [{"name": "while-training"}]},
    }
    (tmp_path / "recipe" / "own.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path / "recipe" / "own.yaml"


def test_a_seed_gives_the_same_bits_every_time_and_std_is_over_seeds(own_recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    console = Console(file=StringIO())
    several = run_demo(own_recipe, out, seeds=2, fast=False, console=console)
    weights = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    # Base, two agents, generalist; of the hub the base and three rounds as states, three exports, publications.
    assert len(weights) == 4 + 4 + 3 + len(list((out / "hub" / "agents").rglob("*.safetensors")))

    # Over the folder of the first, with the random numbers somewhere else.
    torch.rand(7), random.random()
    again = run_demo(own_recipe, out, seeds=1, fast=False, console=console)
    assert {path: path.read_bytes() for path in out.rglob("*.safetensors")} == weights
    assert again.per_seed == several.per_seed[:1]
    assert again.overlap == several.overlap
    assert again.rounds == several.rounds
    assert all(agent.active for agent in again.overlap.values())

    first, second = (scores.models for scores in several.per_seed)
    assert several.std is not None
    for name, row in several.models.items():
        for column, value in row.items():
            pair = [first[name][column], second[name][column]]
            assert value == pytest.approx(fmean(pair))
            assert several.std[name][column] == pytest.approx(stdev(pair))
    assert [choice.seed for choice in several.tuned["dare"].per_seed] == [0, 1]
    assert load_recipe(own_recipe).merge.config == MergeConfig(top=0.3)


def test_rounds_merge_as_if_nothing_was_flushed_in_training(
    own_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "sweep", lambda self, keep, living: None)  # publications stay, to be merged again here
    run_demo(own_recipe, tmp_path / "out", seeds=1, fast=False, console=Console(file=StringIO()))
    hub = Hub(tmp_path / "out" / "hub")
    rounds = Rounds(hub, Team(), hub.described()["identity"])

    def whole(store) -> dict[str, torch.Tensor]:
        return {name: store.read(name, 0, entries(store, name)).view(store.shape(name)) for name in store.names()}

    assert len(hub.decisions()) == 3
    for decision in hub.decisions():
        published = {p.agent: whole(rounds.publication(p)) for p in decision.publications}
        merged, _ = merge_state_dicts(whole(rounds.state(decision.round - 1)), published, rounds.config)
        made = whole(rounds.state(decision.round))
        assert all(torch.equal(merged[name], made[name]) for name in made), decision.round


def test_agents_that_only_observe_are_the_agents_trained_alone(own_recipe: Path, tmp_path: Path, monkeypatch) -> None:
    """Same seeds, data and random numbers: what continual agents do otherwise is due to merging alone."""
    trainers = {}

    def observe(trainer, **arguments) -> None:
        trainers[arguments["agent"]] = trainer
        attach(trainer, **arguments, resync="none")

    monkeypatch.setattr(training, "attach", observe)
    out = tmp_path / "out"
    run_demo(own_recipe, out, seeds=1, fast=False, console=Console(file=StringIO()))
    for name, trainer in trainers.items():
        seen, alone = trainer.model.state_dict(), load_file(out / "agents" / name / "model.safetensors")
        assert all(torch.equal(seen[tensor], alone[tensor]) for tensor in alone), name
    assert sorted(trainers) == ["first", "second"]


def test_a_folder_that_is_not_a_demos_is_refused_before_any_work(own_recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "base").write_text("precious")
    with pytest.raises(ValueError, match="holds files that are not from a demo"):
        run_demo(own_recipe, out, seeds=1, fast=False, console=Console(file=StringIO()))
    assert [path.name for path in out.iterdir()] == ["base"]
    assert (out / "base").read_text() == "precious"


def test_files_a_user_put_beside_the_demos_stay(own_recipe: Path, fast, tmp_path: Path) -> None:
    from ram_trl.demo import _claim

    shutil.copytree(fast[0], tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    _claim(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".ram-trl-demo", "notes.txt"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"lerning_rate": 1}, "agent 'first': args.lerning_rate is not a field of TRL's GRPOConfig"),
        ({"seed": 3}, "agent 'first': args.seed is set by the demo itself"),
        ({"num_generations": 7, "per_device_train_batch_size": 16}, "agent 'first': GRPOConfig refuses its args"),
    ],
)
def test_wrong_trainer_arguments_are_told_before_any_work(
    own_recipe: Path, tmp_path: Path, args: dict[str, int], told: str
) -> None:
    recipe = yaml.safe_load(own_recipe.read_text())
    recipe["agents"][0]["args"] = args
    own_recipe.write_text(yaml.safe_dump(recipe))
    with pytest.raises(ValueError, match=told):
        run_demo(own_recipe, tmp_path / "out", seeds=1, fast=False, console=Console(file=StringIO()))
    assert not (tmp_path / "out").exists()


def test_no_seeds_is_an_error(own_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds is 0"):
        run_demo(own_recipe, tmp_path / "out", seeds=0, fast=True, console=Console(file=StringIO()))
