"""`ram-trl probe`: the tables, the advice, the JSON and the pictures of two real checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ram_trl import MergeConfig, MergeReport, merge, probe
from ram_trl.cli import app
from tests import models

KINDS = ["embeddings", "attention q", "attention k", "attention v", "attention o"]
KINDS += ["mlp gate", "mlp up", "mlp down", "norms"]


def run(family: Path, *options: str | Path, agents: tuple[str, ...] = ("tool", "code")):
    given = [part for name in agents for part in ("--agent", f"{name}={family / name}")]
    return CliRunner().invoke(app, ["probe", "--base", f"{family}/base", *given, *map(str, options)])


def agents_of(family: Path) -> dict[str, Path]:
    return {"tool": family / "tool", "code": family / "code"}


def test_json_holds_everything_by_kind_and_layer_for_every_agent_and_pair(family):
    report = json.loads(run(family, "--json").stdout)
    assert list(report["kinds"]) == KINDS
    assert list(report["layers"]) == ["0", "1"]
    for part in [*report["kinds"].values(), *report["layers"].values()]:
        assert part.keys() == {"entries", "agents", "pairs", "touched", "shared", "sign_conflict"}
        assert part["agents"].keys() == {"code", "tool"}
        for agent in part["agents"].values():
            assert agent.keys() == {
                "entries", "active", "shared", "unique", "density", "rho", "lambda", "norm", "kept", "largest"
            }  # fmt: skip
        (pair,) = part["pairs"]
        assert pair.keys() == {"agents", "both", "jaccard", "jaccard_by_chance", "sign_agreement"}
    assert report["density_map"].keys() == {"code", "tool"}
    assert report["advice"].keys() == {"effect", "criterion", "option", "in_force", "reason", "notes"}
    assert report["advice"]["criterion"] == "top 0.2"
    kinds = [report["density_map"]["code"][kind] for kind in KINDS if kind != "embeddings"]
    assert all(len(densities) == 2 and all(0 <= d <= 1 for d in densities) for densities in kinds)


def test_json_comes_back_as_a_report_that_says_the_same(family):
    text = run(family, "--json").stdout
    assert MergeReport(**json.loads(text)).to_json() == text
    assert probe(family / "base", agents_of(family)).to_json() == text


def test_tables_show_every_kind_layer_and_agent(family):
    report = probe(family / "base", agents_of(family))
    shown = run(family)
    assert shown.exit_code == 0, shown.output
    for title, parts in {"by kind of tensor": report.kinds, "by layer": report.layers}.items():
        rows = shown.output[shown.output.index(title) :].splitlines()
        for label, part in parts.items():
            at = next(i for i, line in enumerate(rows) if line.strip().startswith(label))
            for line, (name, agent) in zip(rows[at : at + 2], part.agents.items(), strict=True):
                assert name in line
                for number in (
                    f"{agent.density:.1%}", f"{agent.unique / agent.active:.0%}", f"{agent.rho:.3g}",
                    f"{agent.norm:.3g}", f"{part.pairs[0].jaccard:.3f}", f"{part.pairs[0].jaccard_by_chance:.3f}",
                    f"{part.pairs[0].sign_agreement:.1%}",
                ):  # fmt: skip
                    assert number in line, (label, name, number)


def test_overlap_of_a_part_is_the_mean_over_the_others_and_signs_go_by_entries(family):
    models.trained(models.tiny_model(), seed=9, share=0.6).save_pretrained(family / "memory")
    agents = {**agents_of(family), "memory": family / "memory"}
    pairs = {pair.agents: pair for pair in probe(family / "base", agents).layers["0"].pairs}
    one, other = pairs["code", "memory"], pairs["code", "tool"]
    output = run(family, agents=tuple(agents)).output
    row = next(line for line in output[output.index("by layer") :].splitlines() if line.strip().startswith("0 "))
    agree = one.both * one.sign_agreement + other.both * other.sign_agreement
    assert f"{(one.jaccard + other.jaccard) / 2:.3f}" in row
    assert f"{agree / (one.both + other.both):.1%}" in row


def test_the_advice_stands_at_the_end_with_its_reason_and_option(family):
    output = " ".join(run(family, "--epsilon", "10").output.split())
    assert "what epsilon 10 does" in output
    assert "recommended: top 0.2 (`--top 0.2`)" in output
    assert "its largest |τ| is" in output
    assert output.index("by layer") < output.index("recommended:") < output.index("warning:")
    assert "recommended: keep top 0.2" in " ".join(run(family).output.split())


def test_lambda_is_shown_by_part_where_it_differs(family):
    assert run(family).output.count("lambda") == 1
    report = probe(family / "base", agents_of(family), MergeConfig(rho="tensor"))
    output = run(family, "--rho", "tensor").output
    assert output.count("lambda") == 3
    by_kind = {part.agents["tool"].lambda_ for part in report.kinds.values()}
    assert len(by_kind) > 1
    assert all(f"{lambda_:.4g}" in output for lambda_ in by_kind)


def test_an_agent_alone_has_tables_without_overlap(family):
    shown = run(family, agents=("tool",))
    assert shown.exit_code == 0
    assert "Jaccard" not in shown.output
    assert "by layer" in shown.output


def test_a_deep_model_shows_some_layers_and_says_where_the_others_are(tmp_path):
    layers = 150
    for name, shift in {"base": 0.0, "tool": 0.5}.items():
        (tmp_path / name).mkdir()
        tensors = {f"layers.{n}.w": torch.arange(3.0) + shift for n in range(layers)}
        models.save_tensors(tmp_path / name, tensors)
    output = run(tmp_path, agents=("tool",)).output
    assert "by layer (one of 2; all are in --json and --plot)" in " ".join(output.split())
    assert sum(line.split()[1:2] == ["tool"] for line in output.splitlines()) == 1 + math.ceil(layers / 2)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_plot_writes_pictures_into_a_folder_and_leaves_the_output_whole(family, options):
    plots = family / "new" / "plots"
    plotted, plain = run(family, *options, "--plot", plots), run(family, *options)
    assert plotted.exit_code == 0, plotted.output
    assert {path.name for path in plots.iterdir()} == {"layers.png", "overlap.png", "pairs.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())
    if options:
        assert plotted.stdout == plain.stdout
    else:
        assert plotted.stdout.startswith(plain.stdout)


def test_a_plot_folder_that_cannot_be_made_ends_in_a_sentence(family):
    (family / "file").write_text("")
    shown = run(family, "--plot", family / "file")
    assert shown.exit_code == 1
    assert str(family / "file") in shown.output
    assert "Traceback" not in shown.output


def test_the_report_of_a_merge_stays_small(family):
    """By kind and layer, not by tensor: a model with many experts has a report as long as one with few."""
    sizes = []
    for experts in (2, 40):
        folder = family / f"{experts}"
        for name, shift in {"base": 0.0, "tool": 0.5, "code": -0.25}.items():
            (folder / name).mkdir(parents=True)
            names = [f"model.layers.0.mlp.experts.{e}.{m}_proj.weight" for e in range(experts) for m in ("up", "down")]
            models.save_tensors(folder / name, {n: torch.arange(2.0) + shift for n in names})
        merge(folder / "base", agents_of(folder), folder / "out")
        sizes.append((folder / "out" / "merge_report.json").stat().st_size)
    assert sizes[1] < 1.1 * sizes[0]
