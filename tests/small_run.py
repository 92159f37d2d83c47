"""A base, three tasks and a recipe for runs of a few seconds: rewards count letters, so nothing has to be learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset

from ram_trl.evaluate import ScoreRow
from ram_trl.recipe import Task
from tests import models
from tests.training.test_callback import letters_of

AGENTS = ("tool", "code", "mem")

GRPO = {
    "max_steps": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "gradient_checkpointing": False,
}


def base(seed: int, progress: Any):
    return models.tiny_model(seed), models.tokenizer()


def task_of(agent: str) -> Task:
    prompts = Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"] * 8})
    return Task(train=prompts, rewards=[letters_of(agent)], rows=lambda split, count: [ScoreRow("ab", "cd")])


def tool() -> Task:
    return task_of("tool")


def code() -> Task:
    return task_of("code")


def mem() -> Task:
    return task_of("mem")


def broken() -> Task:
    raise RuntimeError("the data is gone")


def recipe(folder: Path, agents: tuple[str, ...] = AGENTS, steps: int = 4, **launch: Any) -> Path:
    """Writes a recipe; its run goes to `folder/run`."""
    args = GRPO | {"max_steps": steps}
    values = {
        "base": {"make": "tests.small_run:base"},
        "agents": [
            {"name": name, "task": f"tests.small_run:{name}", "args": args | {"seed": place}}
            | {"job": "one" if name in ("tool", "code") else "two"}
            for place, name in enumerate(agents)
        ],
        "merge": {"name": "ram+"},
        "continual": {"merge_every": 2, "heartbeat": 0.5, "patience": 60, "keep_rounds": 99},
        "scoring": {"dev": 1},
        "launch": {"out": str(folder / "run"), "backoff": 0.1} | launch,
    }
    path = folder / "recipe.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return path
