"""Merged adapters: peft loads them, and they hold what the merge changes as well as their rank allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ram_trl import MergeConfig, MergeInputError, merge_adapters
from ram_trl.cli import app
from ram_trl.engine.workers import Workers
from ram_trl.folders.adapters import merge_low_rank
from ram_trl.folders.assembly import MergedAdapter
from ram_trl.folders.offline import merge_to_adapter
from ram_trl.weights import Span, Store, entries
from ram_trl.weights.adapter import Adapter
from ram_trl.weights.anatomy import Anatomy
from ram_trl.weights.checkpoint import open_checkpoint
from tests import lora, models
from tests.weights.test_adapter import VARIANTS, untied

AVERAGE = MergeConfig(method="average")
RAM = MergeConfig(top=0.2, r=0.2)
ONE_PER_MODEL = {"bias_all", "bias_lora_only"}
"""peft allows no second adapter with biases in a model."""
NOT_IN_ONE_MODEL = {"tied_targets", "tied_modules"}
"""peft 0.21 loses what a second tied adapter does to the output embeddings."""
NO_PRODUCT = {"dora_rslora", "embedding_dora"}
"""What DoRA does to all columns of a small matrix has full rank."""


def two_agents(folder: Path, variant: str) -> tuple[Store, dict[str, Adapter]]:
    make, settings = VARIANTS[variant]
    make().save_pretrained(folder / "base")
    for seed, agent in enumerate(("tool", "code"), start=1):
        lora.adapter(folder / "base", folder / agent, seed=seed, **settings)
    return lora.opened(folder / "base", {"tool": folder / "tool", "code": folder / "code"})


def as_adapter(base, agents, config: MergeConfig, folder: Path, **how) -> MergedAdapter:
    with Workers(2) as workers:
        merged = merge_low_rank(base, agents, config, workers, Anatomy(base.config, base), **how)
    folder.mkdir()
    merged.save(folder, str(base.folder))
    return merged


def live(folder: Path, *agents: str):
    """The base with saved adapters, by name."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "base"), folder / agents[0], adapter_name=agents[0]
    )
    for agent in agents[1:]:
        model.load_adapter(folder / agent, adapter_name=agent)
    return model


def change(base, result) -> dict[str, torch.Tensor]:
    return {n: t.view(-1).double() - Span(n, 0, entries(base, n)).of(base).double() for n, t in result.items()}


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - NO_PRODUCT))
def test_average_as_an_adapter_is_the_mean_of_the_updates(tmp_path, variant):
    base, agents = two_agents(tmp_path, variant)
    full = lora.merged(base, agents, AVERAGE)
    lora.save_model(tmp_path / "base", full, tmp_path / "full")
    merged = as_adapter(base, agents, AVERAGE, tmp_path / "generalist", rank=32)
    assert merged.report.error < 1e-6

    found = lora.of_agent(tmp_path / "base", tmp_path / "generalist")
    assert lora.distance(found, lora.of_folder(tmp_path / "full")) < 1e-5
    _, again = lora.opened(tmp_path / "base", {"generalist": tmp_path / "generalist"})
    updates = [lora.update(base, agent) for agent in agents.values()]
    mean = {name: (updates[0][name].double() + updates[1][name].double()) / 2 for name in base.names()}
    assert lora.far(lora.update(base, again["generalist"]), mean) < 1e-6


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - NO_PRODUCT - ONE_PER_MODEL - NOT_IN_ONE_MODEL))
def test_merge_adapters_in_a_model(tmp_path, variant):
    base, agents = two_agents(tmp_path, variant)
    lora.save_model(tmp_path / "base", lora.merged(base, agents, AVERAGE), tmp_path / "full")
    model = live(tmp_path, "tool", "code")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = merge_adapters(model, ["tool", "code"], "generalist", AVERAGE, rank=32)
    assert report.error < 1e-6
    assert model.active_adapters == ["tool"]
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    model.set_adapter("generalist")
    assert lora.distance(lora.logits(model), lora.of_folder(tmp_path / "full")) < 1e-5


def test_peft_loses_tied_adapters_so_the_merge_is_refused(tmp_path):
    two_agents(tmp_path, "tied_targets")
    model = live(tmp_path, "tool", "code")
    with pytest.raises(MergeInputError, match="lm_head"):
        merge_adapters(model, ["tool", "code"], "generalist", AVERAGE, rank=8)
    assert set(model.peft_config) == {"tool", "code"}


def test_every_round_replaces_the_adapter(tmp_path):
    """TRAPS 3.2: add_weighted_adapter would return without a word."""
    two_agents(tmp_path, "plain")
    model = live(tmp_path, "tool", "code")
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    seen = []
    for round_number in range(3):
        lora.train(model, seed=round_number, adapter="tool")
        merge_adapters(model, ["tool", "code"], "generalist", RAM, rank=4 + round_number)
        model.set_adapter("generalist")
        seen.append(lora.logits(model))
        if round_number < 2:
            merge_adapters(model, ["tool", "code"], "generalist", RAM, rank=4 + round_number)
            assert model.active_adapters == ["generalist"]
            assert torch.equal(lora.logits(model), seen[-1])
    assert lora.distance(seen[0], seen[1]) > 1e-3
    assert lora.distance(seen[1], seen[2]) > 1e-3
    assert sorted(model.peft_config) == ["code", "generalist", "other", "tool"]


def test_agent_may_be_replaced_by_what_it_is_merged_into(tmp_path):
    two_agents(tmp_path, "plain")
    model = live(tmp_path, "tool", "code")
    merge_adapters(model, ["tool", "code"], "other", AVERAGE, rank=8)
    model.set_adapter("other")
    expected = lora.logits(model)
    model.set_adapter("tool")
    merge_adapters(model, ["tool", "code"], "tool", AVERAGE, rank=8)
    assert torch.equal(lora.logits(model), expected)


def test_ram_as_an_adapter_is_the_best_fit(tmp_path):
    base, agents = two_agents(tmp_path, "square")
    dense = change(base, lora.merged(base, agents, RAM))
    merged = as_adapter(base, agents, RAM, tmp_path / "generalist", rank=8)
    _, again = lora.opened(tmp_path / "base", {"generalist": tmp_path / "generalist"})
    found = lora.update(base, again["generalist"])
    missed = total = 0.0
    for name, error in merged.report.errors.items():
        values = torch.linalg.svdvals(dense[name].view(base.shape(name)))
        best = float(values[8:].norm() / values.norm())
        assert error <= 1.01 * best + 1e-6
        assert lora.distance(found[name], dense[name]) == pytest.approx(error, abs=1e-6)
        missed += float((found[name].double() - dense[name]).square().sum())
        total += float(dense[name].square().sum())
    assert merged.report.error == pytest.approx((missed / total) ** 0.5, rel=1e-4)
    assert merged.report.rank == 8


def test_error_bound(tmp_path):
    base, agents = two_agents(tmp_path, "patterns")
    merged = as_adapter(base, agents, RAM, tmp_path / "generalist", max_error=0.2)
    assert max(merged.report.errors.values()) <= 0.2 + 1e-6
    assert len(set(merged.report.ranks.values())) > 1
    _, again = lora.opened(tmp_path / "base", {"generalist": tmp_path / "generalist"})
    dense = change(base, lora.merged(base, agents, RAM))
    assert lora.far(lora.update(base, again["generalist"]), dense) == pytest.approx(merged.report.error, rel=1e-4)
    lora.save_model(tmp_path / "base", lora.merged(base, again, MergeConfig(epsilon=0)), tmp_path / "full")
    found = lora.of_agent(tmp_path / "base", tmp_path / "generalist")
    assert lora.distance(found, lora.of_folder(tmp_path / "full")) < 1e-5


def test_task_arithmetic_with_weights_and_scale_is_exact(tmp_path):
    base, agents = two_agents(tmp_path, "rslora")
    config = MergeConfig(method="task_arithmetic", scale=0.7, weights={"tool": -1, "code": 2})
    merged = as_adapter(base, agents, config, tmp_path / "generalist", rank=8)
    assert merged.report.error < 1e-6
    one, two = (lora.update(base, agents[agent]) for agent in ("tool", "code"))
    _, again = lora.opened(tmp_path / "base", {"generalist": tmp_path / "generalist"})
    expected = {name: 0.7 * (2 * two[name].double() - one[name].double()) for name in base.names()}
    assert lora.far(lora.update(base, again["generalist"]), expected) < 1e-6


def test_other_ranks_and_targets_in_one_model(tmp_path):
    """TRAPS 3.4."""
    lora.qwen3().save_pretrained(tmp_path / "base")
    lora.adapter(tmp_path / "base", tmp_path / "tool", seed=1, r=4, target_modules=["q_proj", "up_proj"])
    lora.adapter(tmp_path / "base", tmp_path / "code", seed=2, r=8, target_modules=".*layers.1.*(up|down)_proj")
    model = live(tmp_path, "tool", "code")
    report = merge_adapters(model, ["tool", "code"], "generalist", AVERAGE, rank=12)
    assert report.error < 1e-6
    base, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool", "code": tmp_path / "code"})
    lora.save_model(tmp_path / "base", lora.merged(base, agents, AVERAGE), tmp_path / "full")
    model.set_adapter("generalist")
    assert lora.distance(lora.logits(model), lora.of_folder(tmp_path / "full")) < 1e-5
    model.save_pretrained(tmp_path / "saved", selected_adapters=["generalist"])
    assert lora.distance(lora.of_agent(tmp_path / "base", tmp_path / "saved" / "generalist"), lora.logits(model)) == 0


def test_rank_by_default_is_the_largest_of_the_agents(tmp_path):
    lora.qwen3().save_pretrained(tmp_path / "base")
    lora.adapter(tmp_path / "base", tmp_path / "tool", seed=1, r=3)
    lora.adapter(tmp_path / "base", tmp_path / "code", seed=2, r=2, rank_pattern={"q_proj": 7})
    model = live(tmp_path, "tool", "code")
    assert merge_adapters(model, ["tool", "code"], "generalist", RAM).rank == 7
    assert model.peft_config["generalist"].r == 7


def test_with_a_full_checkpoint_norms_are_kept_whole(tmp_path):
    untied().save_pretrained(tmp_path / "base")
    lora.adapter(tmp_path / "base", tmp_path / "tool")
    models.trained(untied(), seed=3).save_pretrained(tmp_path / "code")
    base, agents = lora.opened(tmp_path / "base", {"tool": tmp_path / "tool"})
    agents |= {"code": open_checkpoint(tmp_path / "code", "code").store}
    as_adapter(base, agents, AVERAGE, tmp_path / "generalist", rank=40)
    lora.save_model(tmp_path / "base", lora.merged(base, agents, AVERAGE), tmp_path / "full")
    found = lora.of_agent(tmp_path / "base", tmp_path / "generalist")
    assert lora.distance(found, lora.of_folder(tmp_path / "full")) < 1e-5


def test_chunks_and_threads_change_no_bit(tmp_path):
    base, agents = two_agents(tmp_path, "plain")
    results = []
    for threads, chunk in ((1, 1 << 20), (3, 333)):
        with Workers(threads) as workers:
            anatomy = Anatomy(base.config, base)
            results.append(merge_low_rank(base, agents, RAM, workers, anatomy, rank=6, chunk=chunk).tensors)
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_merge_that_changes_nothing_is_refused(tmp_path):
    base, agents = two_agents(tmp_path, "plain")
    with pytest.raises(MergeInputError, match="changes nothing"):
        as_adapter(base, agents, MergeConfig(epsilon=1e6), tmp_path / "generalist", rank=4)


def test_rank_or_error_not_both(tmp_path):
    base, agents = two_agents(tmp_path, "plain")
    for how in ({}, {"rank": 4, "max_error": 0.1}, {"rank": 0}, {"max_error": 1.0}, {"max_error": -0.1}):
        with pytest.raises(ValueError, match="rank"):
            as_adapter(base, agents, AVERAGE, tmp_path / "generalist", **how)


def test_settings_are_those_of_plain_lora(tmp_path):
    base, agents = two_agents(tmp_path, "dora")
    as_adapter(base, agents, RAM, tmp_path / "generalist", rank=4)
    settings = json.loads((tmp_path / "generalist" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_dora"], settings["use_rslora"]) == (
        4,
        4,
        False,
        False,
    )
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert sorted(settings["target_modules"]) == sorted(lora.EVERYWHERE)


def test_what_cannot_be_merged_in_a_model_is_refused(tmp_path):
    two_agents(tmp_path, "plain")
    model = live(tmp_path, "tool", "code")
    with pytest.raises(MergeInputError, match="no adapter of that name"):
        merge_adapters(model, ["tool", "absent"], "generalist", RAM)
    model.merge_adapter(["tool"])
    with pytest.raises(MergeInputError, match="unmerge_adapter"):
        merge_adapters(model, ["tool", "code"], "generalist", RAM)
    model.unmerge_adapter()
    pissa = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"),
        adapter_name="tool",
    )
    with pytest.raises(MergeInputError, match="pissa"):
        merge_adapters(pissa, ["tool"], "generalist", RAM)


def test_linear_of_peft_is_not_the_mean(tmp_path):
    """TRAPS 3.1: why there is `merge_adapters`."""
    base, agents = two_agents(tmp_path, "plain")
    lora.save_model(tmp_path / "base", lora.merged(base, agents, AVERAGE), tmp_path / "full")
    model = live(tmp_path, "tool", "code")
    model.add_weighted_adapter(["tool", "code"], [0.5, 0.5], "linear", combination_type="linear")
    model.set_adapter("linear")
    assert lora.distance(lora.logits(model), lora.of_folder(tmp_path / "full")) > 0.01


def test_folders_into_an_adapter(tmp_path):
    base, agents = two_agents(tmp_path, "plain")
    folders = {"tool": tmp_path / "tool", "code": tmp_path / "code"}
    report, fitted = merge_to_adapter(tmp_path / "base", folders, tmp_path / "out", RAM, rank=12)
    assert sorted(report.agents) == ["code", "tool"]
    assert json.loads((tmp_path / "out" / "adapter_report.json").read_text())["errors"] == fitted.errors
    assert json.loads((tmp_path / "out" / "merge_report.json").read_text())["agents"].keys() == {"tool", "code"}
    _, again = lora.opened(tmp_path / "base", {"generalist": tmp_path / "out"})
    dense = change(base, lora.merged(base, agents, RAM))
    assert lora.far(lora.update(base, again["generalist"]), dense) == pytest.approx(fitted.error, rel=1e-4)
    with pytest.raises(MergeInputError, match="exists"):
        merge_to_adapter(tmp_path / "base", folders, tmp_path / "out", RAM, rank=12)
    readable = (tmp_path / "out" / "adapter_config.json").stat().st_mode
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_mode == readable


def test_nan_is_told_with_agent_and_layer(tmp_path):
    two_agents(tmp_path, "plain")
    model = live(tmp_path, "tool", "code")
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.up_proj.lora_B["code"].weight[3, 1] = torch.nan
    for config in (AVERAGE, RAM):
        with pytest.raises(MergeInputError, match=r"agent 'code'.*layers\.1\.mlp\.up_proj"):
            merge_adapters(model, ["tool", "code"], "generalist", config)


def test_command_line(tmp_path):
    two_agents(tmp_path, "plain")
    job = ["merge", "--base", tmp_path / "base", "--agent", f"tool={tmp_path / 'tool'}"]
    job += ["--agent", f"code={tmp_path / 'code'}", "--out", tmp_path / "out"]

    def run(*options: str) -> Result:
        return CliRunner().invoke(app, [str(part) for part in (*job, *options)])

    for options, reason in {
        ("--as", "lora"): "--rank R or --max-error E",
        ("--as", "lora", "--rank", "4", "--max-error", "0.1"): "one of them",
        ("--rank", "4"): "for --as lora",
        ("--as", "lora", "--rank", "4", "--dtype", "bfloat16"): "for --as full",
        ("--as", "qlora"): "expected full or lora",
        ("--as", "lora", "--rank", "4", "--dry-run"): "for --as full",
    }.items():
        refused = run(*options)
        assert refused.exit_code == 1
        assert reason in refused.output.replace("\n", " ")
        assert not (tmp_path / "out").exists()
    made = run("--as", "lora", "--max-error", "0.3")
    assert made.exit_code == 0, made.output
    assert "relative error" in made.output
    lora.of_agent(tmp_path / "base", tmp_path / "out")
