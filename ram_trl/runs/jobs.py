"""
From a recipe to jobs: which agents share a process, on which devices, started by which command.

A recipe flows in; jobs flow out, or every reason why it cannot run as written. Nothing is started here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ram_trl.config import ContinualConfig
from ram_trl.recipe import AgentSection, Recipe, load_function
from ram_trl.runs.hardware import LAUNCH, Hardware, agent_clashes, hardware_problems, read_hardware

CONFIGS = {"grpo": ("trl", "GRPOConfig"), "rloo": ("trl", "RLOOConfig"), "ppo": ("trl.experimental.ppo", "PPOConfig")}
"""TRL's config of each trainer."""

OWN_ARGS = ("output_dir", "use_cpu")
"""Trainer arguments that the launcher sets."""


class RecipeError(ValueError):
    """A recipe cannot run as written; the message lists every reason. Nothing was started."""

    def __init__(self, recipe: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        counted = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{recipe}: cannot launch, {counted}; nothing was started:"] + [
            f"- {problem}" for problem in problems
        ]))  # fmt: skip


@dataclass(frozen=True)
class Job:
    """
    A job to start.

    Args:
        name (`str`):
            Its name.
        agents (`tuple[str, ...]`):
            Its agents; several take turns.
        devices (`tuple[str, ...]`):
            What `CUDA_VISIBLE_DEVICES` names; nothing on the CPU.
        processes (`int`), machines (`int`):
            Ranks in all, and machines.
    """

    name: str
    agents: tuple[str, ...]
    devices: tuple[str, ...]
    processes: int
    machines: int


@dataclass(frozen=True)
class Plan:
    """
    How a recipe is run.

    Args:
        path (`Path`):
            The recipe's file.
        recipe ([`Recipe`]):
            The recipe, with what the command line changed.
        hardware ([`Hardware`]):
            The accelerate config.
        jobs (`tuple[Job, ...]`):
            The jobs.
        out (`Path`), hub (`Path`):
            Folder of the run, and its hub.
        forwarded (`tuple[str, ...]`, *optional*):
            Options of the command line that every job gets, too.
    """

    path: Path
    recipe: Recipe
    hardware: Hardware
    jobs: tuple[Job, ...]
    out: Path
    hub: Path
    forwarded: tuple[str, ...] = field(default=())

    def command(self, job: Job, port: int | str, resume: bool, config: Path) -> list[str]:
        """What starts a job from an accelerate config. All that accelerate could take from elsewhere is passed."""
        script = [str(LAUNCH / "train.py"), "--recipe", str(self.path), "--agents", ",".join(job.agents)]
        script += [*self.forwarded, *(["--resume"] if resume else [])]
        if self.hardware.kind == "MULTI_CPU":
            # accelerate launch starts one process from such a config.
            return [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0",
                "--nproc-per-node", str(job.processes), "--master-addr", "127.0.0.1", "--master-port", str(port),
                *script,
            ]  # fmt: skip
        multi = self.hardware.kind != "NO"
        there = job.machines > 1
        return [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
            "--num_processes", str(job.processes), "--num_machines", str(job.machines),
            "--machine_rank", "$MACHINE_RANK" if there else "0",
            *(["--main_process_ip", "$MAIN_ADDRESS" if there else "127.0.0.1"] if multi else []),
            *(["--main_process_port", str(port)] if multi else []),
            *([] if self.hardware.deepspeed else ["--mixed_precision", self.hardware.precision]),
            "--dynamo_backend", "no",
            *(["--num_cpu_threads_per_process", threads_per_process()] if self.hardware.on_cpu else []),
            *script,
        ]  # fmt: skip

    def environment(self, job: Job) -> dict[str, str]:
        """Variables of a job, beside those it inherits."""
        own = {"RAM_TRL_JOB": job.name}
        if self.hardware.on_cpu:
            own |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads_per_process()}
            if self.hardware.kind == "MULTI_CPU":  # what accelerate launch would have set
                own |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": self.hardware.precision}
        else:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
        return own

    def config_file(self, job: Job) -> Path:
        """Where the explicit accelerate config of a job is written."""
        return self.out / "jobs" / job.name / "accelerate.yaml"


def threads_per_process() -> str:
    """Threads of a rank on the CPU: one, so that results depend on no core count, unless the user says otherwise."""
    return os.environ.get("OMP_NUM_THREADS", "1")


def make_plan(path: Path, recipe: Recipe, forwarded: Sequence[str] = (), visible: Sequence[str] | None = None) -> Plan:
    """
    Plans the jobs of a recipe, and looks for everything that keeps them from running.

    Args:
        path (`Path`):
            The recipe's file.
        recipe ([`Recipe`]):
            The recipe.
        forwarded (`Sequence[str]`, *optional*):
            Options that every job gets, too.
        visible (`Sequence[str]`, *optional*):
            The GPUs there are; without it they are not checked, as where the jobs will run elsewhere.

    Raises:
        `RecipeError`: listing all problems.
    """
    folder = path.parent
    out = recipe.launch.out or Path("runs") / path.stem
    try:
        hardware = read_hardware(recipe.launch.accelerate, folder)
    except ValueError as error:
        raise RecipeError(path, [str(error), *_problems_of_agents(recipe, folder)]) from error
    problems = list(_problems_of_agents(recipe, folder))
    groups = _groups(recipe, problems)
    jobs = _with_devices(recipe, hardware, groups, visible, problems)
    most = max((job.processes for job in jobs), default=1)
    problems += hardware_problems(hardware, most)
    for agent in recipe.agents:
        processes = next((job.processes for job in jobs if agent.name in job.agents), 1)
        problems += agent_clashes(hardware, agent.args, processes, agent.name)
        problems += _batch_problems(agent, processes)
    problems += _problems_of_sharing(recipe, jobs)
    if problems:
        raise RecipeError(path, problems)
    return Plan(path, recipe, hardware, tuple(jobs), out, recipe.launch.hub or out / "hub", tuple(forwarded))


def visible_devices() -> list[str]:
    """The GPUs this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    import torch

    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        return [device for device in mask.split(",") if device]
    return [str(number) for number in range(torch.cuda.device_count())]


def known_args(trainer: str) -> dict[str, Any]:
    """
    Fields of TRL's config of a trainer, with their defaults.

    Raises:
        `ValueError`: if the installed TRL does not have that trainer.
    """
    module, name = CONFIGS[trainer]
    try:
        found = getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError) as error:
        from importlib.metadata import version

        raise ValueError(
            f"the installed TRL ({version('trl')}) has no {module}.{name}; PPO left TRL after 1.12: "
            "pip install 'trl==1.12.0' to train with ppo"
        ) from error
    return {each.name: each.default for each in dataclasses.fields(found) if each.init}


def _problems_of_agents(recipe: Recipe, folder: Path) -> Iterator[str]:
    if recipe.continual is None:
        yield "continual is missing: launched agents merge while they train; give at least continual.merge_every"
    else:
        ContinualConfig(merge=recipe.merge.config, **recipe.continual.knobs())
    if recipe.base.make is not None:
        own = {"seed": recipe.seed, "progress": None} | recipe.base.args
        yield from _problem_of_function(recipe.base.make, folder, "base.make", own)
    peft = importlib.util.find_spec("peft") is not None
    fields: dict[str, dict[str, Any]] = {}
    for agent in recipe.agents:
        yield from _problem_of_function(agent.task, folder, f"agent '{agent.name}': task", agent.task_args)
        try:
            fields[agent.trainer] = fields.get(agent.trainer) or known_args(agent.trainer)
        except ValueError as error:
            yield f"agent '{agent.name}': trainer is {agent.trainer}: {error}"
            continue
        for name in agent.args:
            if name in OWN_ARGS:
                yield f"agent '{agent.name}': args.{name} is set by the launcher; leave it out"
            elif name not in fields[agent.trainer]:
                config = CONFIGS[agent.trainer][1]
                yield f"agent '{agent.name}': args.{name} is not a field of TRL's {config}"
        if agent.peft is not None and peft:
            from peft import LoraConfig

            known = {each.name for each in dataclasses.fields(LoraConfig) if each.init}
            for name in set(agent.peft) - known:
                yield f"agent '{agent.name}': peft.{name} is not a field of peft's LoraConfig"


def _problem_of_function(name: str, folder: Path, where: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    try:
        inspect.signature(load_function(name, folder)).bind(**arguments)
    except ValueError as error:
        yield f"{where}: {error}"
    except TypeError as error:
        yield f"{where}: '{name}' cannot be called with the recipe's arguments: {error}"


def _groups(recipe: Recipe, problems: list[str]) -> dict[str, list[AgentSection]]:
    """Agents by job."""
    schedule = recipe.launch.schedule
    if schedule == "concurrent":
        return {agent.name: [agent] for agent in recipe.agents}
    if schedule == "interleaved":
        return {"agents": list(recipe.agents)}
    groups: dict[str, list[AgentSection]] = {}
    for agent in recipe.agents:
        if agent.job is None:
            problems.append(f"agent '{agent.name}': the schedule is mixed, so it needs the name of its job (job)")
        groups.setdefault(agent.job or agent.name, []).append(agent)
    return groups


def _with_devices(
    recipe: Recipe,
    hardware: Hardware,
    groups: Mapping[str, Sequence[AgentSection]],
    visible: Sequence[str] | None,
    problems: list[str],
) -> list[Job]:
    launch = recipe.launch
    said = launch.processes if launch.processes is not None else None
    if said is None and hardware.processes is not None:
        said = hardware.processes
    elif said is not None and hardware.processes not in (None, said) and not hardware.shipped:
        problems.append(
            f"launch.processes is {said}, but {hardware.source.name} has num_processes {hardware.processes}; "
            "make them equal, or leave one out"
        )
    if hardware.on_cpu:
        for agent in recipe.agents:
            if agent.devices:
                problems.append(f"agent '{agent.name}': devices are GPUs, but {hardware.source.name} runs on the CPU")
        processes = 1 if hardware.kind == "NO" and launch.processes is None else said or 1
        return [Job(name, tuple(a.name for a in members), (), processes, 1) for name, members in groups.items()]
    asked = {name: sorted({d for agent in members for d in agent.devices}) for name, members in groups.items()}
    if not any(asked.values()):
        count = (said or (1 if hardware.kind == "NO" else 0)) // launch.machines or None
        asked = _shared_out(groups, visible, count, problems)
    jobs = []
    taken: dict[int, str] = {}
    for name, members in groups.items():
        if not asked[name] and any(asked.values()):
            problems.append(f"job '{name}' has no devices, though other jobs do; give its agents devices")
        for device in asked[name]:
            if device in taken:
                problems.append(
                    f"GPU {device} is in two jobs, '{taken[device]}' and '{name}'; jobs need disjoint devices (agents "
                    "of one job share theirs: schedule interleaved or mixed)"
                )
            taken[device] = name
            if visible is not None and device >= len(visible):
                mask = ",".join(visible) or "none"
                problems.append(
                    f"job '{name}': GPU {device} is asked for, but only {len(visible)} are visible ({mask})"
                )
        processes = len(asked[name]) * launch.machines or 1
        if said is not None and asked[name] and said != processes:
            source = "launch.processes" if launch.processes is not None else hardware.source.name
            problems.append(
                f"job '{name}' has {len(asked[name])} devices on {launch.machines} machine(s), but {source} says "
                f"{said} processes; one process per GPU"
            )
        if hardware.kind == "NO" and processes > 1:
            processes = 1
            problems.append(f"job '{name}' has {len(asked[name])} devices, but {hardware.source.name} is for one")
        shown = tuple(visible[d] if visible is not None and d < len(visible) else str(d) for d in asked[name])
        jobs.append(Job(name, tuple(a.name for a in members), shown, processes, launch.machines))
    return jobs


def _shared_out(
    groups: Mapping[str, Sequence[AgentSection]], visible: Sequence[str] | None, count: int | None, problems: list[str]
) -> dict[str, list[int]]:
    """The visible GPUs, in equal parts."""
    if count is None and visible is None:
        problems.append("no agent has devices; say them, or launch.processes, where the GPUs cannot be counted")
    each = count or (len(visible) // len(groups) if visible is not None else 1)
    if visible is not None and not 0 < each * len(groups) <= len(visible):
        problems.append(
            f"{len(visible)} GPUs are visible for {len(groups)} jobs of {max(each, 1)} processes; run with "
            "--schedule interleaved, in which agents take turns on the same GPUs"
        )
        return {name: [] for name in groups}
    return {name: list(range(place * each, (place + 1) * each)) for place, name in enumerate(groups)}


def _batch_problems(agent: AgentSection, processes: int) -> Iterator[str]:
    if agent.trainer == "ppo":
        return
    args = known_args(agent.trainer) | agent.args
    batch, group = args["per_device_train_batch_size"], args["num_generations"]
    per_generation = args["steps_per_generation"] or args["gradient_accumulation_steps"]
    size = args["generation_batch_size"] or batch * processes * per_generation
    if size % group:
        yield (
            f"agent '{agent.name}': {size} completions per generation ({batch} per device × {processes} processes × "
            f"{per_generation} steps) cannot be split into groups of num_generations {group}"
        )


def _problems_of_sharing(recipe: Recipe, jobs: Sequence[Job]) -> Iterator[str]:
    """What several agents of one process, or several jobs of one machine, cannot share."""
    agents = {agent.name: agent for agent in recipe.agents}
    for job in jobs:
        for name in job.agents if len(job.agents) > 1 else ():
            args: Mapping[str, Any] = agents[name].args
            if args.get("enable_jit_checkpoint"):
                yield (
                    f"agent '{name}': enable_jit_checkpoint installs a signal handler, which only the main thread "
                    "may, and it takes turns in a thread here; leave it out, or run concurrent"
                )
            reported = args.get("report_to", [])
            if "wandb" in ([reported] if isinstance(reported, str) else reported):
                yield (
                    f"agent '{name}': W&B keeps one run per process, and {len(job.agents)} agents share the process "
                    f"of job '{job.name}'; report to tensorboard or trackio, or run concurrent"
                )
    servers: dict[str, str] = {}
    for agent in recipe.agents:
        args = known_args(agent.trainer) | agent.args if agent.args.get("use_vllm") else {}
        if args and args["vllm_mode"] == "server":
            where = args["vllm_server_base_url"] or f"{args['vllm_server_host']}:{args['vllm_server_port']}"
            if where in servers:
                yield (
                    f"agents '{servers[where]}' and '{agent.name}' use one vLLM server ({where}), which holds the "
                    "weights of one; give each its own vllm_server_port, or vllm_mode: colocate"
                )
            servers[where] = agent.name
