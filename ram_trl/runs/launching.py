"""`ram-trl launch`: reads a recipe, plans its jobs, and runs them or tells what would be run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ram_trl.config import read_yaml
from ram_trl.recipe import changed, load_recipe
from ram_trl.runs.job import read_changes
from ram_trl.runs.jobs import Plan, make_plan, visible_devices
from ram_trl.runs.launcher import Launcher
from ram_trl.runs.memory_estimate import Estimate, estimate, vllm_share
from ram_trl.runs.offline_recipe import is_offline, run_offline


def launch(
    path: Path,
    schedule: str | None,
    changes: Sequence[str],
    changes_file: Path | None,
    resume: bool,
    dry_run: bool,
    console: Console,
) -> int:
    """
    Runs a recipe.

    Args:
        path (`Path`):
            The recipe's file.
        schedule (`str`, *optional*):
            In place of the recipe's.
        changes (`Sequence[str]`), changes_file (`Path`, *optional*):
            Fields to change, as `PATH=VALUE` or in a YAML file.
        resume (`bool`):
            Go on with a run that ended early.
        dry_run (`bool`):
            Tell what would be run, and start nothing.
        console ([`~rich.console.Console`]):
            Where everything is shown.

    Returns:
        `int`: the exit code: 0 if all agents trained to their end, 130 if the run was stopped, else 1.

    Raises:
        `ValueError`: if the recipe cannot run as written; the message lists all problems.
    """
    changes = [*changes, *([f"launch.schedule={schedule}"] if schedule is not None else [])]
    read = read_changes(changes, changes_file)
    values = read_yaml(path)
    if is_offline(values):
        return run_offline(path, changed(values, read), dry_run, console)
    dotted = [key for key in values if "." in key]
    if dotted:
        raise ValueError(
            f"{path}: its key '{dotted[0]}' is a path into a recipe, so this is no recipe but a file of changes to "
            f"one; name the recipe, and pass this file with --set-file {path}"
        )
    recipe = load_recipe(path, read)
    forwarded = [part for change in changes for part in ("--set", change)]
    forwarded += ["--set-file", str(changes_file)] if changes_file is not None else []
    elsewhere = dry_run or recipe.launch.machines > 1
    plan = make_plan(path, recipe, forwarded, None if elsewhere else visible_devices())
    if dry_run:
        show_plan(plan, console)
        return 0
    if recipe.launch.machines > 1:
        raise ValueError(
            f"{path}: jobs of {recipe.launch.machines} machines are started on each of them; --dry-run prints the "
            "commands, and recipes/multinode_4x8.sbatch starts them with SLURM"
        )
    return Launcher(plan, resume, console).run()


def show_plan(plan: Plan, console: Console) -> None:
    """Prints what would be run, with the accelerate config as it is there, so that it can be run by hand."""
    for job in plan.jobs:
        variables = [f"{name}={shlex.quote(value)}" for name, value in plan.environment(job).items()]
        command = " ".join([*variables, shlex.join(plan.command(job, "PORT", False, plan.hardware.source))])
        ranks = f"{job.processes} process{'es' if job.processes > 1 else ''}"
        console.print(f"job {job.name}: {', '.join(job.agents)}; {ranks}", markup=False, highlight=False)
        console.print(f"$ {command}", markup=False, highlight=False, soft_wrap=True)
        found = estimate(plan, job)
        told = f"about {found} per rank, without activations" if isinstance(found, Estimate) else found
        console.print(f"  memory: {told}", markup=False, highlight=False, soft_wrap=True)
        for agent in plan.recipe.agents:
            share = vllm_share(agent) if agent.name in job.agents else None
            if share is not None:
                said = f"  vLLM of agent '{agent.name}' takes {share:.0%} of the device"
                console.print(said, markup=False, highlight=False, soft_wrap=True)
