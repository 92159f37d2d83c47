"""
A job: trains some agents of a recipe, merging them with all others through the hub.

`launch/train.py` is the script that `accelerate launch` or torchrun starts on every rank; this is what it runs. All
ranks of a job do the same in the same order. What a rank died of is left in a file for the launcher.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from huggingface_hub import snapshot_download
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ram_trl.continual.hub import Hub
from ram_trl.evaluate import ExactScorer, Scorer
from ram_trl.files import folder_in_one_piece, write_json
from ram_trl.recipe import AgentSection, Recipe, Task, load_function, load_recipe
from ram_trl.runs.hardware import Hardware, read_hardware
from ram_trl.runs.trainers import build_trainer
from ram_trl.team import Team
from ram_trl.training.callback import attach
from ram_trl.training.turns import take_turns

logger = logging.getLogger(__name__)

WHOLE = "ram_whole.json"
"""In a checkpoint's folder once all ranks have written their part of it."""
STOP = "stop"
"""In the folder of a run: jobs save a checkpoint and end."""


class StopRequested(RuntimeError):
    """The launcher asked the job to end; every agent that was training has saved a checkpoint."""


class AgentError(RuntimeError):
    """The training of an agent failed."""

    def __init__(self, agent: str, error: Exception) -> None:
        self.agent = agent
        super().__init__(f"{type(error).__name__}: {error}")


class Supervised(TrainerCallback):
    """
    What a launcher sees of an agent: progress for it to read, whole checkpoints, and ending when asked to.

    Args:
        agent (`str`):
            The agent.
        out (`Path`):
            Folder of the run.
        merge_every (`int`):
            Optimizer steps between merges.
        saves (`bool`):
            Whether its trainer can go on from a checkpoint; TRL's PPO cannot.
    """

    def __init__(self, agent: str, out: Path, merge_every: int, saves: bool) -> None:
        self._saves = saves
        self._path = agent_folder(out, agent) / "progress.json"
        self._stop = out / STOP
        self._agent = agent
        self._merge_every = merge_every
        self._told: dict[str, Any] = {"agent": agent, "counter": 0, "reward": None}
        self._stopping = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._team = Team()
        self._tell("training", state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # This callback comes before the merging one, which waits for other agents.
        self._tell("merging" if state.global_step % self._merge_every == 0 else "training", state)
        if self._team.share(self._stop.exists() if self._team.first else None):
            if not self._saves:
                raise StopRequested(f"agent '{self._agent}' ends at step {state.global_step}")
            self._stopping = True
            control.should_save = True

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tell("training", state)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for name in ("reward", "objective/scores"):
            self._told["reward"] = kwargs["logs"].get(name, self._told["reward"])
        self._tell("training", state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._team.collect(None)  # every rank has written its part
        if self._team.first:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(folder / WHOLE, {"step": state.global_step})
        self._tell("training", state)
        if self._stopping:
            raise StopRequested(f"agent '{self._agent}' saved a checkpoint at step {state.global_step} and ends")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tell("finishing", state)

    def _tell(self, what: str, state: TrainerState) -> None:
        if self._team.first:
            self._told |= {"state": what, "step": state.global_step, "steps": state.max_steps}
            self._told["counter"] += 1
            write_json(self._path, self._told, durable=False)


def agent_folder(out: Path, agent: str) -> Path:
    """Where an agent's checkpoints and progress are."""
    return out / "agents" / agent


def whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that all ranks finished writing."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{WHOLE}")]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


def ensure_base(recipe: Recipe, folder: Path, out: Path, first: bool) -> Path:
    """
    The base's folder; a base that a function makes is made by the first rank, once, while others wait.

    Args:
        recipe ([`Recipe`]):
            The recipe.
        folder (`Path`):
            The recipe's folder.
        out (`Path`):
            Folder of the run.
        first (`bool`):
            Whether this process makes it.
    """
    base = recipe.base
    if base.model is not None:
        own = Path(base.model).expanduser()
        if own.is_dir() or (folder / own).is_dir():
            return own if own.is_dir() else folder / own
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        return Path(snapshot_download(base.model, revision=base.revision, allow_patterns=patterns))
    made = out / "base"
    while not made.exists():
        if not first:
            time.sleep(0.2)
            continue
        assert base.make is not None
        model, tokenizer = load_function(base.make, folder)(
            seed=recipe.seed, progress=lambda done, total: None, **base.args
        )
        try:
            with folder_in_one_piece(made) as temporary:
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
        except FileExistsError:
            logger.info("another job made the base meanwhile")
    return made


def scorer_of(agent: AgentSection, task: Task, recipe: Recipe) -> Scorer | ExactScorer | None:
    """What scores generalists on an agent's task: the task's own scorer, or its rows of the dev split."""
    if not recipe.scoring.rounds or task.scorer is not None or task.rows is None:
        return task.scorer if recipe.scoring.rounds else None
    return ExactScorer(agent.name, tuple(task.rows("dev", recipe.scoring.dev)))


@dataclass(frozen=True)
class Run:
    """
    What the agents of a job have in common.

    Args:
        recipe ([`Recipe`]), folder (`Path`):
            The recipe, and where its files are.
        base (`Path`), out (`Path`), hub (`Path`):
            Folders of the base, of the run, and of the hub.
        hardware ([`Hardware`]):
            The layout.
        resume (`bool`):
            Go on from the newest whole checkpoints.
    """

    recipe: Recipe
    folder: Path
    base: Path
    out: Path
    hub: Path
    hardware: Hardware
    resume: bool


def train_agent(agent: AgentSection, run: Run) -> None:
    """
    Trains an agent to its end. Collective: all ranks of the job.

    Raises:
        `AgentError`: from what went wrong.
        `StopRequested`: if the launcher asked for it.
    """
    try:
        _train(agent, run)
    except StopRequested:
        raise
    except Exception as error:
        raise AgentError(agent.name, error) from error


def _train(agent: AgentSection, run: Run) -> None:
    recipe, out = run.recipe, run.out
    assert recipe.continual is not None
    task = load_function(agent.task, run.folder)(**agent.task_args)
    own = agent_folder(out, agent.name)
    knobs = recipe.continual.knobs()
    trainer: Trainer = build_trainer(agent, task, recipe, run.base, own, run.hardware)
    saves = agent.trainer != "ppo"
    trainer.add_callback(Supervised(agent.name, out, recipe.continual.merge_every, saves))
    attach(
        trainer,
        hub=run.hub,
        agent=agent.name,
        base=run.base,
        config=recipe.merge.config,
        agents=tuple(each.name for each in recipe.agents),
        scorer=scorer_of(agent, task, recipe),
        resume=run.resume,
        park=recipe.launch.park,
        **knobs,
    )
    checkpoint = whole_checkpoint(own) if run.resume else None
    if saves:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    else:
        trainer.train()  # on resuming, from the newest generalist
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_job(arguments: argparse.Namespace) -> None:
    """Trains the agents of a job. Collective: all ranks."""
    recipe = load_recipe(arguments.recipe, read_changes(arguments.set, arguments.set_file))
    folder = arguments.recipe.parent
    out = recipe.launch.out or Path("runs") / arguments.recipe.stem
    hub = recipe.launch.hub or out / "hub"
    hardware = read_hardware(recipe.launch.accelerate, folder)
    known = {agent.name: agent for agent in recipe.agents}
    names = list(known) if arguments.agents == "all" else arguments.agents.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"--agents names '{name}', but the recipe has {', '.join(known)}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if hardware.kind != "NO" and world == 1 and (recipe.launch.processes or hardware.processes or 2) > 1:
        raise ValueError(
            f"this job has one process, but launch.accelerate is {hardware.source.name} ({hardware.kind}); start it "
            "with `ram-trl launch`, or with the command that `ram-trl launch --dry-run` prints"
        )
    if hardware.on_cpu:
        # Adam's moments decay into denormals, which are very slow.
        torch.set_flush_denormal(True)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    base = ensure_base(recipe, folder, out, first=os.environ.get("RANK", "0") == "0")
    if arguments.resume:
        names = [name for name in names if not finished(Hub(hub), name)]
    run = Run(recipe, folder, base, out, hub, hardware, arguments.resume)
    works: dict[str, Callable[[], None]] = {name: partial(train_agent, known[name], run) for name in names}
    if len(works) == 1:
        works[names[0]]()  # in the main thread, where signal handlers can be set
    else:
        take_turns(works)


def finished(hub: Hub, agent: str) -> bool:
    """Whether an agent trained to its end."""
    return hub.is_done(agent) and hub.gave_up(agent) is None


def read_changes(pairs: Sequence[str], file: Path | None) -> list[tuple[str, Any]]:
    """
    What the command line sets in a recipe: a YAML file of paths and values, then `PATH=VALUE` pairs.

    Raises:
        `ValueError`: if one is not of that form.
    """
    from ram_trl.config import read_yaml

    changes = list(read_yaml(file).items()) if file is not None else []
    for pair in pairs:
        field, equals, value = pair.partition("=")
        if not (field and equals):
            raise ValueError(f"--set {pair}: expected PATH=VALUE, such as agents.tool.args.max_steps=10")
        try:
            changes.append((field, yaml.safe_load(value)))
        except yaml.YAMLError as error:
            raise ValueError(f"--set {pair}: '{value}' is not YAML: {error}") from error
    return changes


def die_with(parent: int) -> None:
    """Ends this process when the one that started it ends: a rank that nobody watches must not train on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def parser() -> argparse.ArgumentParser:
    """The options of `launch/train.py`."""
    made = argparse.ArgumentParser(description="Train agents of a recipe in this job; start it on every rank.")
    made.add_argument("--recipe", type=Path, required=True, help="the recipe's YAML file")
    made.add_argument("--agents", required=True, help="names of the agents of this job, with commas; or all")
    made.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field of the recipe")
    made.add_argument("--set-file", type=Path, help="YAML file of paths and values to change")
    made.add_argument("--resume", action="store_true", help="go on from the agents' newest checkpoints")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job; the exit code tells whether it went well."""
    die_with(os.getppid())
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # A log that several jobs share is for what differs between runs.
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    parsed = parser().parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    try:
        run_job(parsed)
    except StopRequested as stopped:
        logger.info("%s", stopped)
        # Other threads may be in the middle of anything; what counts is on the disk.
        sys.stdout.flush()
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        folder = os.environ.get("RAM_TRL_FAILURES")
        if folder:
            agent = error.agent if isinstance(error, AgentError) else None
            cause = str(error) if agent is not None else f"{type(error).__name__}: {error}"
            told = {"rank": rank, "agent": agent, "cause": cause, "time": time.time()}
            (Path(folder) / f"failure-rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a rank must end at once: others wait for it in a collective
    return 0
