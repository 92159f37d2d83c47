"""What continual merging has to know of a trainer: its policy, its rollout buffer, its metrics, its vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ram_trl.weights.live.layout import LayoutError


def merged_part(model: nn.Module) -> nn.Module:
    """
    What of a trainer's model is merged: all of it, or PPO's policy without its value model.

    Raises:
        `LayoutError`: if merging PPO's policy would change the value model, or was not shown to work.
    """
    if not (hasattr(model, "policy") and hasattr(model, "value_model")):
        return model
    policy: Any = model.policy
    value_model: Any = model.value_model
    own = {id(parameter) for parameter in value_model.parameters()}
    shared = [name for name, parameter in policy.named_parameters() if id(parameter) in own]
    if shared:
        raise LayoutError(
            f"PPO's value model shares parameters with the policy (such as '{shared[0]}'), so a merge would change "
            "it; load it as a model of its own"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise LayoutError("PPO under FSDP2 was not shown to work; use DDP or DeepSpeed")
    return policy


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
