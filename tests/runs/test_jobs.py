"""From recipe to jobs: who shares a process, what is passed, and every clash told at once before anything starts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ram_trl.recipe import load_recipe
from ram_trl.runs.hardware import LAUNCH, hardware_problems, read_hardware
from ram_trl.runs.job import read_changes
from ram_trl.runs.jobs import RecipeError, make_plan
from tests import small_run

SHIPPED = (
    "cpu", "cpu_ddp", "cpu_zero1", "cpu_zero2", "cpu_zero3", "ddp", "fsdp2", "single_gpu", "zero1", "zero2", "zero3",
    "zero3_offload",
)  # fmt: skip


def plan(folder: Path, changes: dict[str, Any] | None = None, visible=None, **launch: Any):
    path = small_run.recipe(folder, **launch)
    return make_plan(path, load_recipe(path, list((changes or {}).items())), visible=visible)


def problems(folder: Path, changes: dict[str, Any] | None = None, visible=None, **launch: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        plan(folder, changes, visible, **launch)
    return str(caught.value)


def accelerate_file(folder: Path, **values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "own.yaml").write_text(yaml.safe_dump({"num_machines": 1, "num_processes": 2} | values))
    return "own.yaml"


# ---- who shares a job -------------------------------------------------------------------------------------------


def test_concurrent_gives_every_agent_a_job(tmp_path):
    jobs = plan(tmp_path).jobs
    assert [(job.name, job.agents) for job in jobs] == [(name, (name,)) for name in small_run.AGENTS]


def test_interleaved_puts_all_in_one_and_mixed_follows_the_recipe(tmp_path):
    assert [job.agents for job in plan(tmp_path, schedule="interleaved").jobs] == [small_run.AGENTS]
    mixed = plan(tmp_path, schedule="mixed").jobs
    assert [(job.name, job.agents) for job in mixed] == [("one", ("tool", "code")), ("two", ("mem",))]


def test_mixed_needs_to_know_every_agent_s_job(tmp_path):
    assert "agent 'tool': the schedule is mixed" in problems(tmp_path, {"agents.tool.job": None}, schedule="mixed")


# ---- devices (TRAPS 5.4) ----------------------------------------------------------------------------------------


def test_jobs_see_their_own_devices_within_the_outer_mask(tmp_path):
    changes = {f"agents.{name}.devices": [place] for place, name in enumerate(small_run.AGENTS)}
    found = plan(tmp_path, changes, visible=["4", "6", "7"], accelerate="single_gpu")
    assert [found.environment(job)["CUDA_VISIBLE_DEVICES"] for job in found.jobs] == ["4", "6", "7"]


def test_devices_are_shared_out_if_nobody_says_them(tmp_path):
    found = plan(tmp_path, visible=["0", "1", "2", "3", "4", "5"], accelerate="zero3")
    assert [(job.devices, job.processes) for job in found.jobs] == [
        (("0", "1"), 2), (("2", "3"), 2), (("4", "5"), 2)
    ]  # fmt: skip


def test_a_device_in_two_jobs_or_outside_the_mask_is_refused(tmp_path):
    changes = {"agents.*.devices": [0, 5]}
    told = problems(tmp_path, changes, visible=["0", "1"], accelerate="zero3")
    assert "GPU 0 is in two jobs, 'tool' and 'code'" in told
    assert "job 'tool': GPU 5 is asked for, but only 2 are visible (0,1)" in told


def test_agents_of_one_job_use_the_devices_of_all(tmp_path):
    changes = {"agents.tool.devices": [0, 1], "agents.code.devices": [1, 2], "agents.mem.devices": [3]}
    found = plan(tmp_path, changes, visible=list("0123"), accelerate="zero3", schedule="mixed")
    assert [job.devices for job in found.jobs] == [("0", "1", "2"), ("3",)]


def test_fewer_gpus_than_jobs_asks_to_interleave(tmp_path):
    assert "--schedule interleaved" in problems(tmp_path, visible=["0"], accelerate="single_gpu")


def test_devices_on_the_cpu_are_a_mistake(tmp_path):
    assert "devices are GPUs, but cpu.yaml runs on the CPU" in problems(tmp_path, {"agents.tool.devices": [0]})


# ---- the command ------------------------------------------------------------------------------------------------


def test_every_value_that_accelerate_could_take_from_elsewhere_is_passed(tmp_path):
    found = plan(tmp_path, visible=list("012345"), accelerate="zero3")
    command = found.command(found.jobs[0], 41234, True, found.config_file(found.jobs[0]))
    pairs = dict(itertools.pairwise(command))
    assert pairs["--num_processes"] == "2"
    assert pairs["--main_process_port"] == "41234"
    assert pairs["--mixed_precision"] == "bf16"
    assert pairs["--config_file"].endswith("run/jobs/tool/accelerate.yaml")
    assert pairs["--agents"] == "tool"
    assert command[-1] == "--resume"
    explicit = found.hardware.explicit(2, 1, 41234)
    assert (explicit["num_processes"], explicit["main_process_port"]) == (2, 41234)


def test_several_cpu_processes_are_started_by_torchrun(tmp_path):
    """accelerate launch would start one, and say nothing."""
    found = plan(tmp_path, accelerate="cpu_ddp")
    assert "torch.distributed.run" in found.command(found.jobs[0], 1, False, Path())
    assert found.jobs[0].processes == 2


# ---- what would silently be one process, or clash (TRAPS 5.5, SHARDS 5.8) ------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"distributed_type": "MULTI_GPU", "use_cpu": True}, "accelerate would silently start one process"),
        ({"distributed_type": "FSDP", "use_cpu": True}, "accelerate would silently start one process"),
        ({"distributed_type": "NO", "use_cpu": True}, "accelerate would start one process, but 2 are asked for"),
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "0,1"}, "gpu_ids is 0,1; say which GPUs an agent uses"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type is MEGATRON_LM; ram_trl runs"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "FSDP version 1"),
        ({"distributed_type": "DEEPSPEED", "mixed_precision": "fp16"}, "fp16 is not supported"),
        ({"distributed_type": "DEEPSPEED", "compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment is"),
    ],
)
def test_a_config_that_would_not_do_what_it_says_is_refused(tmp_path, values, told):
    hardware = read_hardware(accelerate_file(tmp_path / "a", **values), tmp_path / "a")
    assert told in " | ".join(hardware_problems(hardware, 2))


def test_one_gpu_process_under_multi_gpu_is_refused(tmp_path):
    assert "take single_gpu" in " | ".join(hardware_problems(read_hardware("ddp", tmp_path), 1))


def test_numbers_of_processes_that_differ_are_both_told(tmp_path):
    name = accelerate_file(tmp_path, distributed_type="DEEPSPEED", use_cpu=True, deepspeed_config={"zero_stage": 2})
    told = problems(tmp_path, accelerate=name, processes=4)
    assert "launch.processes is 4, but own.yaml has num_processes 2" in told


def test_the_same_key_in_accelerate_and_deepspeed_config_is_refused_with_both_values(tmp_path):
    engine = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(engine))
    section = {"deepspeed_config_file": "ds.json", "zero_stage": 2}
    name = accelerate_file(tmp_path, distributed_type="DEEPSPEED", use_cpu=True, deepspeed_config=section)
    told = problems(tmp_path, {"agents.tool.args.bf16": False}, accelerate=name)
    assert "zero_stage is 2 here, and the DeepSpeed config file has its own zero_optimization.stage (3)" in told
    assert "agent 'tool': args.bf16 is False, but own.yaml has mixed_precision bf16" in told
    assert (
        "agent 'code': gradient_accumulation_steps is 1 in the recipe (or TRL's default), but 4 for DeepSpeed" in told
    )


def test_layouts_are_not_said_in_trainer_arguments(tmp_path):
    told = problems(tmp_path, {"agents.tool.args.deepspeed": "x.json", "agents.tool.args.use_cpu": True})
    assert "agent 'tool': args.deepspeed is set, but the layout comes from launch.accelerate" in told
    assert "agent 'tool': args.use_cpu is set by the launcher" in told


# ---- agents -----------------------------------------------------------------------------------------------------


def test_all_mistakes_of_all_agents_are_told_at_once(tmp_path):
    told = problems(
        tmp_path,
        {
            "agents.tool.args.learning_rat": 1,
            "agents.code.task": "tests.small_run:nothing",
            "agents.tool.task_args": {"rows": 3},
            "agents.mem.peft": {"rank": 8},
            "agents.mem.args.num_generations": 3,
            "base": {"make": "tasks/none.py:none"},
            "continual": None,
        },
    )
    for sentence in (
        "args.learning_rat is not a field of TRL's GRPOConfig",
        "tests.small_run has no function 'nothing'",
        "'tests.small_run:tool' cannot be called with the recipe's arguments: got an unexpected keyword",
        "peft.rank is not a field of peft's LoraConfig",
        "4 completions per generation (4 per device × 1 processes × 1 steps) cannot be split into groups of",
        "base.make: 'tasks/none.py:none' names",
        "continual is missing",
    ):
        assert sentence in told
    assert "7 problems; nothing was started" in told


def test_ppo_says_which_trl_has_it(tmp_path):
    """This environment's TRL has no PPO; with one that has, the recipe is fine."""
    try:
        import trl.experimental.ppo  # noqa: F401
    except ImportError:
        assert "pip install 'trl==1.12.0'" in problems(tmp_path, {"agents.tool.trainer": "ppo"})
    else:
        assert plan(tmp_path, {"agents.tool.trainer": "ppo", "agents.tool.args": {}}).jobs


def test_what_agents_of_one_process_cannot_share(tmp_path):
    changes = {"agents.tool.args.report_to": "wandb", "agents.code.args.enable_jit_checkpoint": True}
    told = problems(tmp_path, changes, schedule="interleaved")
    assert "W&B keeps one run per process" in told
    assert "enable_jit_checkpoint installs a signal handler" in told
    assert plan(tmp_path, changes).jobs


def test_two_agents_need_two_vllm_servers(tmp_path):
    changes = {"agents.*.args.use_vllm": True, "agents.*.args.vllm_mode": "server"}
    told = problems(tmp_path, changes | {"agents.mem.args.vllm_server_port": 8001})
    assert "agents 'tool' and 'code' use one vLLM server (0.0.0.0:8000)" in told
    assert "'mem'" not in told


# ---- --set ------------------------------------------------------------------------------------------------------


def test_set_reaches_fields_by_agent_name_by_number_and_all(tmp_path):
    pairs = [
        "agents.tool.args.max_steps=9",
        "agents.1.args.beta=0.5",
        "agents.*.args.top_k=3",
        "continual.carry=false",
    ]
    recipe = load_recipe(small_run.recipe(tmp_path), read_changes(pairs, None))
    assert [agent.args["max_steps"] for agent in recipe.agents] == [9, 4, 4]
    assert [agent.args.get("beta") for agent in recipe.agents] == [None, 0.5, None]
    assert [agent.args["top_k"] for agent in recipe.agents] == [3, 3, 3]
    assert recipe.continual is not None
    assert recipe.continual.carry is False


def test_a_file_of_changes_comes_before_the_command_line(tmp_path):
    (tmp_path / "tiny.yaml").write_text("agents.*.args.max_steps: 2\nlaunch.accelerate: cpu_zero3\n")
    changes = read_changes(["agents.tool.args.max_steps=3"], tmp_path / "tiny.yaml")
    recipe = load_recipe(small_run.recipe(tmp_path), changes)
    assert [agent.args["max_steps"] for agent in recipe.agents] == [3, 2, 2]
    assert recipe.launch.accelerate == "cpu_zero3"


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        ("agents.toll.args.beta=1", "'toll' names none of the entries there (tool, code, mem)"),
        ("agents.tool.argz.beta=1", "agents[0].argz is not a field here"),
        ("merge.name.x=1", "there is no field 'x' below 'ram+'"),
        ("seed", "expected PATH=VALUE"),
        ("seed={", "is not YAML"),
    ],
)
def test_a_wrong_change_is_told(tmp_path, pair, told):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is checked below, as plain text)
        load_recipe(small_run.recipe(tmp_path), read_changes([pair], None))
    assert told in str(caught.value)


# ---- the shipped configs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_accelerate_configs_are_read_by_accelerate_and_are_sound(name):
    from accelerate.commands.config.config_args import load_config_from_file

    hardware = read_hardware(name, Path())
    assert hardware.shipped
    loaded = load_config_from_file(str(LAUNCH / "accelerate" / f"{name}.yaml"))
    assert loaded.distributed_type.value == hardware.kind
    assert (loaded.mixed_precision or "no") == hardware.precision
    assert list(hardware_problems(hardware, 1 if hardware.kind == "NO" else 2)) == []


def test_an_unknown_config_names_those_there_are(tmp_path):
    told = problems(tmp_path, accelerate="zero4")
    assert "launch.accelerate is 'zero4'" in told
    assert "cpu_zero3" in told
