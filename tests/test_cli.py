"""The command line: what users type, what they see, and the exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from ram_trl import MergeConfig, merge
from ram_trl.cli import app
from tests import models


def run(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def inputs(family: Path) -> list[str]:
    return ["--base", f"{family}/base", "--agent", f"tool={family}/tool", "--agent", f"code={family}/code"]


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ([], MergeConfig()),
        (["--preset", "paper"], MergeConfig(epsilon=1e-5, r=0.1, alpha=2)),
        (["--preset", "mergekit", "--top", "0.1"], MergeConfig(top=0.1, r=0.1, alpha=0.2, rho="tensor")),
        (["--method", "ties", "--scale", "0.7"], MergeConfig(method="ties", scale=0.7)),
        (["--method", "dare", "--drop", "0.3", "--seed", "4"], MergeConfig(method="dare", drop=0.3, seed=4)),
        (["--r", "0", "--epsilon", "0.004"], MergeConfig(r=0, epsilon=0.004)),
        (["--ulp", "--alpha", "3", "--rho", "tensor"], MergeConfig(ulp=True, alpha=3, rho="tensor")),
        (["--weight", "tool=-0.5", "--weight", "code=2"], MergeConfig(weights={"tool": -0.5, "code": 2})),
    ],
)
def test_options_mean_what_the_config_means(family, options, config):
    result = run("merge", *inputs(family), "--out", family / "out", *options)
    assert result.exit_code == 0, result.output
    merge(family / "base", {"tool": family / "tool", "code": family / "code"}, family / "expected", config)
    assert weights(family / "out") == weights(family / "expected")


def test_output_names_agents_and_ends_with_the_folder(family):
    result = run("merge", *inputs(family), "--out", family / "out", "--shard-size", "30KB", "--threads", "1")
    assert "tool" in result.output
    assert "density" in result.output
    assert result.output.rstrip().endswith(f"generalist: {family / 'out'}")
    assert (family / "out" / "model.safetensors.index.json").exists()


def test_yaml_holds_the_same_fields_and_the_command_line_wins(family):
    file = family / "merge.yaml"
    file.write_text(
        f"base: {family}/base\nagents: {{tool: {family}/tool, code: {family}/nowhere}}\nout: {family}/out\n"
        "preset: paper\nr: 0.3\nweights: {tool: 2}\n"
    )
    result = run("merge", "--config", file, "--agent", f"code={family}/code", "--alpha", "1.5", "--top", "0.3")
    assert result.exit_code == 0, result.output
    config = MergeConfig(top=0.3, r=0.3, alpha=1.5, weights={"tool": 2})
    merge(family / "base", {"tool": family / "tool", "code": family / "code"}, family / "expected", config)
    assert weights(family / "out") == weights(family / "expected")


def test_probe_prints_json_that_equals_the_merge_report(family):
    result = run("probe", *inputs(family), "--json")
    merge(family / "base", {"tool": family / "tool", "code": family / "code"}, family / "out")
    report = json.loads((family / "out" / "merge_report.json").read_text())
    assert json.loads(result.stdout) == report | {"out": None}
    assert run("probe", *inputs(family)).exit_code == 0


def test_every_mistake_is_told_at_once_and_nothing_is_written(family):
    models.rewrite(family / "code", lambda t: t["model.norm.weight"].fill_(float("nan")))
    models.rewrite(family / "code", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    (family / "tool" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    result = run(
        "merge", *inputs(family), "--out", family / "out", "--method", "ramm", "--epsilon", "-1", "--weight",
        "nobody=2",
        "--weight", "tool=x", "--agent", "code",
    )  # fmt: skip
    assert result.exit_code == 1
    for words in (
        "'ramm'", "epsilon = -1.0", "'nobody'", "'x' is not a number", "--agent code: expected NAME=FOLDER",
        "agent 'tool'", "truncated", "'model.layers.1.mlp.up_proj.weight'", "'model.norm.weight' holds 33 NaN",
    ):  # fmt: skip
        assert words in result.output, words
    assert "Traceback" not in result.output
    assert not (family / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epsilon: [", "cannot be read as YAML"),
        ("- a", "expected a mapping"),
        ("epsilonn: 1", "epsilonn"),
        ("agents: [a, b]", "name: folder"),
        ("agents: {tool: null}", "name: folder"),
        ("agents: {tool: a, tool: b}", "the key 'tool' stands twice"),
        ("threads: two", "threads is 'two'"),
        ("shard_size: 1GiB", "shard_size is '1GiB'"),
        ("1: 2", "the key 1 is not a name"),
        ("top: true", "top = True"),
        ("preset: best", "unknown preset 'best'"),
        ("method: average\nr: 0.2", "does not use r"),
    ],
)
def test_bad_yaml_is_told_by_key_or_file(family, text, words):
    (family / "merge.yaml").write_text(text)
    result = run("merge", "--config", family / "merge.yaml", *inputs(family), "--out", family / "out")
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


def test_missing_arguments_are_named():
    result = run("merge")
    assert result.exit_code == 1
    for option in ("--base", "--agent", "--out"):
        assert f"{option} " in result.output


@pytest.mark.parametrize("options", [["--threads", "0"], ["--shard-size", "abc"], ["--weight", "tool=nan"]])
def test_odd_options_end_in_a_sentence(family, options):
    result = run("merge", *inputs(family), "--out", family / "out", *options)
    assert result.exit_code == 1
    assert result.output.startswith("cannot merge")
    assert not (family / "out").exists()


def test_odd_configs_end_in_a_sentence_or_do_not_matter(family):
    for name, values in {
        "text": {"quantization_config": "fp8"}, "list": {"model_type": ["x"]}, "part": {"text_config": 5},
    }.items():  # fmt: skip
        shutil.copytree(family / "base", family / name)
        models.reconfigure(family / name, **values)
        result = run("probe", "--base", family / name, "--agent", f"tool={family}/tool")
        assert result.exit_code in (0, 1)
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_path_with_markup_is_printed_as_it_is(family):
    result = run("merge", *inputs(family), "--out", family / "o[/b] :smile:")
    assert result.exit_code == 0
    assert result.output.rstrip().endswith("o[/b] :smile:")
