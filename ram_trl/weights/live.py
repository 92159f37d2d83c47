"""
This rank's weights of a model in training, as a store that can be written to.

The only module that touches private attributes of trainers and of the engines under them. Unsharded training is
supported: one process, or DistributedDataParallel, in fp32 (with or without autocast) or in pure bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ram_trl.team import Team
from ram_trl.weights import Span
from ram_trl.weights.sparse import BLOCK


class LayoutError(ValueError):
    """The model is laid out in a way that cannot be merged while it trains; the message names the layout."""


class LiveWeights:
    """
    The trainable parameters of a model, readable and writable by flat range, in float32.

    Parameters kept in bf16 cannot hold what a merge leaves with the agent. What bf16 rounds off is kept apart, in
    fp32 on the CPU, and is part of every read, so that nothing is lost and rounding never looks like training.

    Args:
        model (`nn.Module`):
            The model as a `TrainerCallback` gets it, or wrapped (DDP, `torch.compile`).
        team (`Team`):
            The ranks of the job.

    Raises:
        `LayoutError`: if the parameters are sharded, quantized, or of another dtype than fp32 and bf16.
    """

    aliases: Mapping[str, str]
    replicated = True
    """Whether every rank holds everything."""

    def __init__(self, model: nn.Module, team: Team) -> None:
        self.aliases = {}
        self.team = team
        self._parameters = {
            name: parameter for name, parameter in sorted(_named(model).items()) if parameter.requires_grad
        }
        _check_layout(self._parameters)
        self._apart: dict[str, Tensor] = {
            name: torch.zeros(parameter.numel())
            for name, parameter in self._parameters.items()
            if parameter.dtype == torch.bfloat16
        }

    def names(self) -> list[str]:
        return list(self._parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._parameters[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype the parameter is trained in."""
        return self._parameters[name].dtype

    def stored(self, name: str, start: int, stop: int) -> Tensor:
        """The entries as the optimizer keeps them, 1-D, in the dtype they are trained in; a view."""
        return self._parameters[name].detach().reshape(-1)[start:stop]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The entries in float32 on the CPU, with what bf16 cannot hold."""
        values = self.stored(name, start, stop).to("cpu", torch.float32, copy=True)
        return values + self._apart[name][start:stop] if name in self._apart else values

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrites entries from flat index `start` on with float32 `values`."""
        target = self._parameters[name].data.view(-1)[start : start + len(values)]
        target.copy_(values)
        if name in self._apart:
            self._apart[name][start : start + len(values)] = values - target.to("cpu", torch.float32)

    def held(self) -> list[Span]:
        """What this rank holds, and so has to load: everything."""
        return [Span(name, 0, parameter.numel()) for name, parameter in self._parameters.items()]

    def owned(self) -> list[Span]:
        """What this rank publishes and merges for the job: its share of the blocks, none twice."""
        spans = self.held()
        blocks = sum(-(-len(span) // BLOCK) for span in spans)
        first, last = (self.team.rank + i for i in (0, 1))
        low, high = (rank * blocks // self.team.world for rank in (first, last))
        owned, passed = [], 0
        for span in spans:
            here = -(-len(span) // BLOCK)
            start, stop = (min(max(edge - passed, 0), here) * BLOCK for edge in (low, high))
            if start < stop:
                owned.append(Span(span.name, start, min(stop, span.stop)))
            passed += here
        return owned

    def rounded_off(self) -> Mapping[str, Tensor]:
        """What bf16 parameters cannot hold, by name, float32; empty for fp32 training. Goes into checkpoints."""
        return self._apart

    def restore_rounded_off(self, tensors: Mapping[str, Tensor]) -> None:
        """
        Takes `rounded_off` back from a checkpoint.

        Raises:
            `ValueError`: if names or sizes are not those of this model.
        """
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in self._apart.items()}
        if found != expected:
            raise ValueError(f"the residual of the checkpoint is for {found}, this model has {expected}")
        for name, tensor in tensors.items():
            self._apart[name].copy_(tensor)


def reset_moments(optimizer: Any) -> None:
    """Forgets the optimizer's moments and their step count; it goes on as if new."""
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
        optimizer = optimizer.optimizer
    optimizer.state.clear()


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


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the name `save_pretrained` gives them, tied ones once."""
    named = {}
    for name, parameter in model.named_parameters():
        plain = ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))
        named[plain.removeprefix("module.")] = parameter
    return named


def _check_layout(parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise LayoutError("the model has no trainable parameter")
    reasons = {}
    for name, parameter in parameters.items():
        if hasattr(parameter, "ds_id"):
            reasons["DeepSpeed ZeRO-3 parameters"] = name
        elif hasattr(parameter, "_hp_mapping"):
            reasons["DeepSpeed parameters"] = name
        elif type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
            reasons["DTensor parameters (FSDP2 or tensor parallelism)"] = name
        elif getattr(parameter, "_is_flat_param", False) or type(parameter).__name__ == "FlatParameter":
            reasons["FSDP1 flat parameters"] = name
        elif ".lora_" in name:
            reasons["peft adapters"] = name
        elif parameter.dtype not in (torch.float32, torch.bfloat16):
            reasons[f"{parameter.dtype} parameters"] = name
        elif parameter.numel() == 0:
            reasons["empty parameters"] = name
        elif not parameter.is_contiguous():
            reasons["non-contiguous parameters"] = name
    if reasons:
        told = ", ".join(f"{layout} (such as '{name}')" for layout, name in sorted(reasons.items()))
        raise LayoutError(
            f"this model cannot be merged while it trains: it has {told}. Supported: one process or DDP, in fp32 "
            "(autocast is fine) or bf16"
        )
