"""What continual merging has to know of a trainer: its rollout buffer, its metrics, its vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def at_generation_boundary(trainer: Any) -> bool:
    """Whether the next training step makes new rollouts, so that weights may change now (GRPO, RLOO)."""
    if not hasattr(trainer, "_step"):
        return True
    return trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0


def always_at_generation_boundary(args: Any) -> bool:
    """Whether every step end is a boundary by the arguments alone, for a callback that was not given its trainer."""
    if not hasattr(args, "steps_per_generation"):
        return True
    per_generation = args.steps_per_generation * getattr(args, "num_iterations", 1)
    return args.gradient_accumulation_steps % per_generation == 0


def log_metrics(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Adds metrics to the log: with the next line of the trainer's own where it collects those, else at once."""
    collected = getattr(trainer, "_metrics", None)
    if isinstance(collected, Mapping) and "train" in collected:
        for name, value in metrics.items():
            collected["train"][name].append(value)
    else:
        trainer.log(dict(metrics))


def forget_pushed_weights(trainer: Any) -> None:
    """Makes the trainer push its weights to vLLM before the next rollout."""
    if hasattr(trainer, "_last_loaded_step"):
        trainer._last_loaded_step = -1
