"""The demo with LoRA agents: adapters that peft opens, merged in ΔW space and, to compare, A and B apart."""

from __future__ import annotations

import copy
import json
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ram_trl import MergeConfig
from ram_trl.cli import app
from ram_trl.continual.hub import Hub
from ram_trl.demo import run_demo
from ram_trl.demo.lab import SeedRun
from ram_trl.demo.merging import _in_one_model, _merged_by_peft
from ram_trl.evaluate import accuracies
from ram_trl.folders.offline import merge
from ram_trl.recipe import RECIPES, load_function
from tests import lora, models

TASKS = ["tool", "code", "mem"]
MERGES = ["ab-average", "peft-linear", "average", "task_arithmetic", "ties", "ram", "ram+"]
RUNS = ["continual-fold", "continual-svd"]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory):
    """What `ram-trl demo --lora --fast` leaves."""
    out = tmp_path_factory.mktemp("demo") / "out"
    done = CliRunner().invoke(app, ["demo", "--lora", "--fast", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out, json.loads((out / "report.json").read_text()), done.output


def test_every_row_is_in_the_report_and_in_the_table(fast) -> None:
    out, report, printed = fast
    names = ["base", *(f"agent:{task}" for task in TASKS), *MERGES, *RUNS]
    assert list(report["models"]) == names
    assert list(report["tuned"]) == ["peft-linear", "task_arithmetic", "ties"]
    assert list(report["rounds"]) == RUNS
    for name in names:
        assert any(line.split()[:1] == [name] for line in printed.splitlines()), name
    for name in ("report.md", "scores.png", "overlap.png", "rounds.png", "hub", "generalist"):
        assert (out / name).exists(), name
    told = (out / "report.md").read_text()
    assert "| A and B averaged, each apart |" in told
    assert "| peft's add_weighted_adapter, linear, weight tuned on dev |" in told
    assert "the unconsumed carried on, svd into the agents |" in told
    assert "averaging A and B apart." in told


def test_scores_are_those_of_the_saved_adapters_and_models(fast) -> None:
    out, report, _ = fast
    rows = {name: load_function(f"tasks/{name}.py:{name}", RECIPES)().rows("test", 40) for name in TASKS}
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    for task in TASKS:
        agent = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(out / "base"), out / "agents" / task)
        assert accuracies(agent, tokenizer, rows) == report["models"][f"agent:{task}"], task
    hub = Hub(out / "hub")
    newest = hub.latest()
    assert newest is not None
    for name, folder in {"ram+": out / "generalist", "continual-fold": hub.generalist_folder(newest)}.items():
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert accuracies(model, tokenizer, rows) == report["models"][name], name


def test_the_generalist_is_our_default_merge_of_the_adapters(fast, tmp_path) -> None:
    out, report, _ = fast
    agents = {task: out / "agents" / task for task in TASKS}
    again = merge(out / "base", agents, tmp_path / "again", MergeConfig())
    one, other = (load_file(folder / "model.safetensors") for folder in (out / "generalist", tmp_path / "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    for task in TASKS:
        # Counted in memory while scoring, and from the folders here.
        assert report["overlap"][task]["active"] == again.agents[task].active > 0
        assert report["overlap"][task]["unique"] == again.agents[task].unique
    assert not [warning for warning in again.warnings if "base" in warning], "adapters name the base they belong to"


def test_agents_start_from_different_adapters(fast) -> None:
    """Whatever six steps change of A is small against what it was drawn from."""
    out, _, _ = fast
    held = [load_file(out / "agents" / task / "adapter_model.safetensors") for task in TASKS]
    name = next(name for name in held[0] if "lora_A" in name)
    assert lora.distance(held[0][name], held[1][name]) > 1
    assert lora.distance(held[1][name], held[2][name]) > 1


@pytest.fixture
def run(tmp_path) -> SeedRun:
    """Two agents on a base, as if trained."""
    base = models.tiny_model()
    run = SeedRun(0, base, models.tokenizer())
    for seed, agent in enumerate(("tool", "code"), 1):
        torch.manual_seed(seed)
        config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
        run.agents[agent] = get_peft_model(copy.deepcopy(base), config)
        lora.train(run.agents[agent], seed, size=0.3)
    return run


@pytest.mark.parametrize(("weight", "of_each"), [("mean", 1 / 2), (1.0, 1.0), (0.49, 0.7)])
def test_factors_are_summed_apart(run: SeedRun, weight, of_each) -> None:
    """A is the sum of the agents' A times the root of the weight, and so is B."""
    expected = copy.deepcopy(run.agents["tool"])
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if ".lora_" in name:
                both = [agent.get_parameter(name) for agent in run.agents.values()]
                parameter.copy_(of_each * (both[0] + both[1]))
    model = _in_one_model(run)
    for _ in range(2):  # peft does nothing if the adapter is still there
        with _merged_by_peft(model, ["tool", "code"], weight) as merged:
            assert lora.distance(lora.logits(merged), lora.logits(expected)) < 1e-5
    model.set_adapter("code")
    assert lora.distance(lora.logits(model), lora.logits(run.agents["code"])) < 1e-6


def test_lora_and_a_recipe_of_ones_own_are_not_mixed(tmp_path) -> None:
    done = CliRunner().invoke(app, ["demo", "--lora", "--recipe", "own.yaml", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "give one of them" in done.output
    assert not (tmp_path / "out").exists()


def test_wrong_settings_of_adapters_are_told_before_any_work(tmp_path) -> None:
    recipe = yaml.safe_load((RECIPES / "lora.yaml").read_text())
    recipe["agents"][1]["peft"] = {"rank": 8}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ValueError, match=r"agent 'code': LoraConfig refuses its peft section: .*rank"):
        run_demo(tmp_path / "own.yaml", tmp_path / "out", seeds=1, fast=True, console=Console(file=StringIO()))
    assert not (tmp_path / "out").exists()


def test_the_default_folder_is_not_the_plain_demo_s(monkeypatch) -> None:
    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr("ram_trl.demo.run_demo", lambda recipe, out, *rest: asked.append((recipe.name, out)))
    for arguments in (["demo"], ["demo", "--lora"], ["demo", "--lora", "--out", "mine"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert asked == [
        ("demo.yaml", Path("runs/demo")),
        ("lora.yaml", Path("runs/demo-lora")),
        ("lora.yaml", Path("mine")),
    ]
