"""The demo's agents, trained by TRL's GRPOTrainer: each alone, or all in turns while they merge through a hub."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOTrainer

from ram_trl.demo.lab import Lab, SeedRun, grpo_config
from ram_trl.recipe import AgentSection, ContinualRow, Progress, Task
from ram_trl.runs.trainers import adapter_config
from ram_trl.training.callback import attach
from ram_trl.training.turns import take_turns

FOREVER = 1e9
"""Seconds. Agents of one process cannot lose each other, so no round of the demo ever closes for a clock's sake."""
ALL_ROUNDS = 1_000_000


def train(agent: AgentSection, task: Task, run: SeedRun, progress: Progress) -> PreTrainedModel:
    """An agent trained from the base of the seed."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(agent, task, run, Path(folder), progress)
        trainer.train()
    return trainer.model


def train_continually(lab: Lab, run: SeedRun, row: ContinualRow, base: Path, hub: Path, progress: Progress) -> None:
    """Trains all agents as [`train`] does, in turns, merging through a hub; the outcome is in the hub."""
    section = lab.recipe.continual
    assert section is not None
    agents = {agent.name: agent for agent in lab.recipe.agents}
    steps = dict.fromkeys(agents, 0)
    planned = {name: grpo_config(agent, run.seed, base).max_steps for name, agent in agents.items()}

    def work(name: str) -> None:
        def advance(done: int, total: int) -> None:
            steps[name], planned[name] = done, total
            progress(sum(steps.values()), sum(planned.values()))

        with tempfile.TemporaryDirectory() as folder:
            trainer = _trainer(agents[name], lab.tasks[name], run, Path(folder), advance)
            attach(
                trainer,
                hub=hub,
                agent=name,
                base=base,
                merge_every=section.merge_every,
                config=lab.recipe.merge.config,
                carry=row.carry,
                lora=row.lora,
                agents=tuple(agents),
                on_hub_error="raise",
                # Every round is scored, so none may be swept.
                keep_rounds=ALL_ROUNDS,
                timeout=FOREVER,
                patience=FOREVER,
            )
            trainer.train()

    take_turns({name: partial(work, name) for name in agents})


def _trainer(agent: AgentSection, task: Task, run: SeedRun, folder: Path, progress: Progress) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=copy.deepcopy(run.base),
        reward_funcs=task.rewards,
        args=grpo_config(agent, run.seed, folder),
        train_dataset=task.train,
        processing_class=copy.deepcopy(run.tokenizer),
        callbacks=[_StepProgress(progress)],
        peft_config=adapter_config(agent),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class _StepProgress(TrainerCallback):
    """Moves a progress bar with the trainer's steps."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress(state.global_step, state.max_steps)
