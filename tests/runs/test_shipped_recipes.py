"""Every shipped recipe: a dry run tells commands and memory, mistakes stop it, and tiny models run it on two ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ram_trl.continual.hub import Hub
from ram_trl.recipe import RECIPES, load_function, load_recipe
from ram_trl.runs.hardware import read_hardware
from ram_trl.runs.jobs import make_plan
from ram_trl.runs.launching import launch
from ram_trl.runs.memory_estimate import Estimate, estimate, sizes_of
from ram_trl.runs.offline_recipe import is_offline
from tests import models
from tests.runs.test_launcher import check_hub, finish, start

MODELS = {"qwen2.5-7b_zero3_8gpu": 7_615_616_512, "llama3.2-3b_2gpu": 3_212_749_824, "multinode_4x8": 7_615_616_512}
LORA = {"qwen3-1.7b_lora_1gpu": (1_720_574_976, 17_432_576)}
TRAINED = ("demo", "lora", *MODELS, *LORA)


def dry_run(recipe: Path, *changes: str, schedule: str | None = None) -> str:
    console = Console(file=StringIO(), width=10_000)
    assert launch(recipe, schedule, changes, None, False, True, console) == 0
    return console.file.getvalue()


@pytest.mark.parametrize("name", TRAINED)
def test_a_dry_run_prints_the_command_and_the_memory_of_every_job(name):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    told = dry_run(RECIPES / f"{name}.yaml")
    jobs = 1 if recipe.launch.schedule == "interleaved" else len(recipe.agents)
    assert told.count("\n$ ") == jobs
    assert told.count("launch/train.py --recipe") == jobs
    assert told.count("  memory: about ") == jobs
    assert told.count("CUDA_VISIBLE_DEVICES=") == jobs
    configs = re.findall(r"--config_file (\S+)", told)
    assert len(configs) == jobs
    assert all(Path(config).is_file() for config in configs), "the commands can be run by hand"


def test_a_file_of_changes_in_place_of_a_recipe_is_told():
    with pytest.raises(ValueError, match=r"no recipe but a file of changes .*--set-file .*tiny\.yaml"):
        dry_run(RECIPES / "tiny.yaml")


@pytest.mark.parametrize("park", [True, False])
@pytest.mark.parametrize(("mode", "vllm"), [("fold", True), ("fold", False), ("svd", False), ("svd", True)])
def test_agents_that_share_a_base_need_memory_for_one(park, mode, vllm):
    """With `svd` the sync with vLLM would leave its traces in a common base."""
    (name,) = LORA
    path = RECIPES / f"{name}.yaml"
    every, trained = LORA[name]
    frozen, own = every - trained, trained * (4 + 4 + 8)
    shared = 4 * frozen if mode == "fold" or not vllm else 0
    own += 4 * frozen - shared
    changes = [("launch.park", park), ("continual.lora", mode), ("agents.*.args.use_vllm", vllm)]
    plan = make_plan(path, load_recipe(path, changes))
    found = estimate(plan, plan.jobs[0])
    assert isinstance(found, Estimate)
    assert found.device == pytest.approx(shared + own * (1 if park else 2) + 0.1e9)
    assert found.host == pytest.approx(2 * 4 * frozen + (own if park else 0))


@pytest.mark.parametrize("name", TRAINED)
def test_a_mistake_in_it_stops_the_dry_run(name):
    with pytest.raises(ValueError, match=r"max_step is not a field of TRL's"):
        dry_run(RECIPES / f"{name}.yaml", "agents.*.args.max_step=3")


def test_the_command_line_tells_of_mistakes_by_its_exit_code():
    command = [sys.executable, "-m", "ram_trl.cli", "launch", str(RECIPES / "demo.yaml"), "--dry-run", "--set", "x=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "x is not a field here" in done.stderr


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_without_the_model(name):
    path = RECIPES / f"{name}.yaml"
    recipe = load_recipe(path)
    sizes = sizes_of(make_plan(path, recipe), recipe.agents[0])
    assert (sizes.all, sizes.trained) == (MODELS[name], MODELS[name])


def test_a_lora_agent_trains_what_its_adapter_has():
    (name,) = LORA
    path = RECIPES / f"{name}.yaml"
    recipe = load_recipe(path)
    sizes = sizes_of(make_plan(path, recipe), recipe.agents[0])
    assert (sizes.all, sizes.trained) == LORA[name]


def test_memory_by_layout_is_what_the_arithmetic_says():
    """16 bytes per parameter under bf16 ZeRO: 2 + 2 + 12, cut as the stage cuts."""
    path = RECIPES / "qwen2.5-7b_zero3_8gpu.yaml"
    count, ranks, extra = MODELS["qwen2.5-7b_zero3_8gpu"], 8, 0.1e9
    expected = {
        "zero1": 2 + 2 + 12 / ranks,
        "zero2": 2 + 2 / ranks + 12 / ranks,
        "zero3": (2 + 2 + 12) / ranks,
        "fsdp2": (4 + 4 + 8) / ranks,
        "ddp": 4 + 4 + 8,
    }
    for layout, each in expected.items():
        recipe = load_recipe(path, [("launch.accelerate", layout)])
        plan = make_plan(path, recipe)
        found = estimate(plan, plan.jobs[0])
        assert isinstance(found, Estimate)
        assert found.device == pytest.approx(each * count + extra)
        assert found.host == pytest.approx(2 * each * count), "two agents rest in the host's memory"


def test_a_model_that_is_not_at_hand_is_told():
    path = RECIPES / "llama3.2-3b_2gpu.yaml"
    assert "not known: the config of meta-llama/Llama-3.2-3B-Instruct" in dry_run(path, "base.config={}")


def test_the_paper_s_recipe_tells_what_it_downloads():
    told = dry_run(RECIPES / "paper_offline.yaml")
    assert told.count("$ hf download") == 4
    assert "epsilon 1e-05" in told
    assert "61 GB to read, 15 GB to write" in told


def test_an_offline_recipe_merges_checkpoints(family, tmp_path):
    recipe = tmp_path / "offline.yaml"
    recipe.write_text(
        f"base: {{model: {family / 'base'}}}\n"
        f"agents: [{{name: tool, model: {family / 'tool'}}}, {{name: code, model: {family / 'code'}}}]\n"
        f"merge: {{name: ram+, top: 0.3}}\nout: {tmp_path / 'merged'}\n"
    )
    assert launch(recipe, None, [], None, False, False, Console(file=StringIO())) == 0
    report = json.loads((tmp_path / "merged" / "merge_report.json").read_text())
    assert report["config"]["top"] == 0.3
    with pytest.raises(ValueError, match=r"two agents are called 'tool'"):
        launch(recipe, None, ["agents.1.name=tool"], None, False, True, Console(file=StringIO()))


def test_offline_recipes_are_told_from_others():
    assert is_offline({"agents": [{"name": "a", "model": "x"}]})
    assert not is_offline({"agents": [{"name": "a", "task": "x.py:x"}]})


def test_the_slurm_script_is_sound_shell():
    script = RECIPES / "multinode_4x8.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "launch.machines" not in script.read_text()
    assert load_recipe(RECIPES / "multinode_4x8.yaml").launch.machines == 4
    assert read_hardware("zero3", RECIPES).kind == "DEEPSPEED"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "lora", *MODELS])
def test_tiny_models_run_it_on_two_ranks(name, tmp_path):
    recipe = tmp_path / "link.yaml"
    recipe.write_text((RECIPES / f"{name}.yaml").read_text())
    (tmp_path / "tasks").symlink_to(RECIPES / "tasks")
    out = tmp_path / "run"
    changes = ["--set-file", str(RECIPES / "tiny.yaml"), "--set", f"launch.out={out}", "--set", "launch.restarts=0"]
    finish(start(recipe, *changes, "--set", "continual.heartbeat=0.5"), recipe)
    hub = Hub(out / "hub")
    check_hub(out, hub.agents())
    assert [path.name for path in sorted((hub.state_folder(1)).glob("rank-*"))] == [
        f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)
    ]


# ---- templates of tasks -------------------------------------------------------------------------------------------


def rows(path: Path, given: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


def reward(task: str, name: str):
    return load_function(f"tasks/{task}.py:{name}", RECIPES)


def test_tool_use_rewards_the_right_calls(tmp_path):
    calls = [{"name": "map", "arguments": {"to": "oslo"}}, {"name": "cab", "arguments": {}}]
    given = [{"query": f"q{i}", "tools": "[]", "answers": json.dumps(calls)} for i in range(3)]
    task = load_function("tasks/tool_use.py:tool_use", RECIPES)(dataset=rows(tmp_path / "d.jsonl", given), held_out=1)
    assert task.train["answers"] == [json.dumps(calls)] * 2
    assert "q1" in task.train[0]["prompt"][0]["content"]
    right = reward("tool_use", "right_calls")
    told = ["```json\n" + json.dumps(calls[::-1]) + "\n```", json.dumps(calls[:1]), "call map", "[]"]
    said = [[{"role": "assistant", "content": text}] for text in told]
    assert right(completions=said, answers=[json.dumps(calls)] * 4) == [1.0, 0.25, 0.0, 0.0]
    assert reward("tool_use", "well_formed")(completions=said) == [0.1, 0.1, 0.0, 0.1]


def test_coding_rewards_the_share_of_tests_that_pass(tmp_path, monkeypatch):
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
    given = [{"text": "add two numbers", "test_list": tests}] * 3
    task = load_function("tasks/coding.py:coding", RECIPES)(dataset=rows(tmp_path / "d.jsonl", given), held_out=1)
    assert tests[0] in task.train[0]["prompt"][0]["content"]
    assert tests[1] not in task.train[0]["prompt"][0]["content"]
    passed = reward("coding", "passed_tests")
    told = [
        "Here:\n```python\ndef add(a, b):\n    return a + b\n```",
        "def add(a, b):\n    return 3",
        "```python\nwhile True: pass\n```",
        "not code",
        "import os; os._exit(0)  # before any test",
    ]
    monkeypatch.setitem(passed.__globals__, "SECONDS", 1)
    assert passed(completions=told, tests=[tests] * 5) == [1.0, 0.5, 0.0, 0.0, 0.0]


def test_long_memory_rewards_words_in_common(tmp_path):
    context = {"title": ["A", "B"], "sentences": [["One. ", "Two."], ["Three."]]}
    given = [{"question": "Who?", "answer": "The Great Ada Lovelace", "context": context}] * 3
    task = load_function("tasks/long_memory.py:long_memory", RECIPES)(
        dataset=rows(tmp_path / "d.jsonl", given), held_out=1
    )
    assert "A\nOne. Two.\n\nB\nThree.\n\nQuestion: Who?" in task.train[0]["prompt"][0]["content"]
    told = ["I think.\nAnswer: great Ada Lovelace!", "Answer: Ada", "Ada Lovelace"]
    same = reward("long_memory", "same_words")
    assert same(completions=told, answer=["The Great Ada Lovelace"] * 3) == [1.0, 0.5, 0.0]


def test_a_template_s_scorer_scores_chats_of_held_out_rows(tmp_path):
    given = [{"question": f"q{i}", "answer": "ab", "context": {"title": [], "sentences": []}} for i in range(4)]
    task = load_function("tasks/long_memory.py:long_memory", RECIPES)(
        dataset=rows(tmp_path / "d.jsonl", given), held_out=2
    )
    assert len(task.scorer.prompts) == 2
    assert len(task.train) == 2
    tokenizer = models.tokenizer()
    tokenizer.padding_side = "left"
    short = [[{"role": "user", "content": "ab"}]] * 2
    scorer = type(task.scorer)("m", short, task.scorer.reward, task.scorer.columns, max_new_tokens=3)
    assert scorer.score(models.tiny_model(), tokenizer) == 0.0


def test_too_few_rows_are_told(tmp_path):
    given = [{"query": "q", "tools": "[]", "answers": "[]"}]
    with pytest.raises(ValueError, match="has 1 usable rows; more than 200 are needed"):
        load_function("tasks/tool_use.py:tool_use", RECIPES)(dataset=rows(tmp_path / "d.jsonl", given))
