"""What a demo works on: the recipe with everything it names at hand, and what one seed made and found."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig

from ram_trl.demo.report import Choice, RoundScores, Scores
from ram_trl.evaluate import ScoreRow
from ram_trl.problems import MergeInputError, agent_place
from ram_trl.recipe import AgentSection, BaseMaker, Recipe, Split, Task, load_function, load_recipe
from ram_trl.runs.trainers import adapter_config
from ram_trl.telling.report import MergeReport
from ram_trl.weights import entries
from ram_trl.weights.adapter import live_adapter
from ram_trl.weights.memory import StateDict


@dataclasses.dataclass(frozen=True)
class Lab:
    """A recipe with its functions loaded and its prompts drawn."""

    recipe: Recipe
    make_base: BaseMaker
    tasks: dict[str, Task]
    dev: dict[str, list[ScoreRow]]
    test: dict[str, list[ScoreRow]]


@dataclasses.dataclass
class SeedRun:
    """What one seed made and found; agents that train adapters are PEFT models."""

    seed: int
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    agents: dict[str, PreTrainedModel] = dataclasses.field(default_factory=dict)
    scores: dict[str, Scores] = dataclasses.field(default_factory=dict)
    choices: dict[str, Choice] = dataclasses.field(default_factory=dict)
    merges: dict[str, MergeReport] = dataclasses.field(default_factory=dict)
    dev: dict[str, Scores] = dataclasses.field(default_factory=dict)
    rounds: dict[str, list[RoundScores]] = dataclasses.field(default_factory=dict)

    def weights(self, agent: AgentSection) -> Mapping[str, Tensor]:
        """What an agent computes with, under the base's names: its state dict, or W + ΔW of its adapter."""
        model = self.agents[agent.name]
        if agent.peft is None:
            return model.state_dict()
        base = self.base.state_dict()
        opened = live_adapter(model, "default", StateDict(base), agent_place(agent.name))
        if opened.problems:
            raise MergeInputError(opened.problems)
        store = opened.store
        theta = {name: store.read(name, 0, entries(store, name)).view(store.shape(name)) for name in store.names()}
        return theta | {alias: theta[name] for alias, name in store.aliases.items()}


def open_lab(path: Path, fast: bool) -> Lab:
    """
    Reads a recipe and loads what it names.

    Raises:
        `ValueError`: if the demo cannot run it.
    """
    recipe = load_recipe(path)
    if fast:
        recipe = recipe.quick()
    for agent in recipe.agents:
        if agent.trainer != "grpo":
            raise ValueError(f"agent '{agent.name}': the demo trains with grpo; use ram-trl launch")
        # Built here for their checks only: a wrong argument should show before minutes of training, not after.
        grpo_config(agent, 0, path.parent)
        adapter_config(agent)
    tasks = {agent.name: load_function(agent.task, path.parent)(**agent.task_args) for agent in recipe.agents}
    if recipe.base.make is None:
        raise ValueError(f"{path}: the demo makes its base with a function; name it as base.make")
    return Lab(
        recipe=recipe,
        make_base=load_function(recipe.base.make, path.parent),
        tasks=tasks,
        dev={name: _rows(name, task, "dev", recipe.scoring.dev) for name, task in tasks.items()},
        test={name: _rows(name, task, "test", recipe.scoring.test) for name, task in tasks.items()},
    )


def _rows(agent: str, task: Task, split: Split, count: int) -> list[ScoreRow]:
    if task.rows is None:
        raise ValueError(f"agent '{agent}': its task has no rows, and the demo scores by right answers; add them")
    return task.rows(split, count)


def grpo_config(agent: AgentSection, seed: int, folder: Path) -> GRPOConfig:
    """
    The arguments of an agent's trainer.

    Raises:
        `ValueError`: if the recipe gives one that is not there, that is the demo's own, or that TRL refuses.
    """
    own = {
        "output_dir": str(folder),
        # With one seed all agents would begin with the same A, and people's seeds differ.
        "seed": seed if agent.peft is None else zlib.crc32(f"{seed} {agent.name}".encode()),
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        # The models are tiny. On one kind of CPU the same seed gives the same numbers; on another it is another draw.
        "use_cpu": True,
    }
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    for name in agent.args:
        if name not in known:
            raise ValueError(f"agent '{agent.name}': args.{name} is not a field of TRL's GRPOConfig")
        if name in own:
            raise ValueError(f"agent '{agent.name}': args.{name} is set by the demo itself; leave it out")
    try:
        return GRPOConfig(**agent.args, **own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"agent '{agent.name}': GRPOConfig refuses its args: {error}") from error
