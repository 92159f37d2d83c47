"""
Two unlike agents, alone and in turns: final weights as digests. Run on every rank: python -m tests.ring FOLDER [KIND]

They differ in learning rate and its schedule, clipping, accumulation, temperature and reuse of rollouts, so that
whatever one sees of the other shows.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ram_trl.training import turns
from ram_trl.training.callback import HELD
from tests import models
from tests.distributed.sharded import prepare
from tests.ppo import ppo_trainer
from tests.training.test_callback import letters_of

UNLIKE: dict[str, dict[str, Any]] = {
    "tool": {"seed": 1, "learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_grad_norm": 0.1},
    "code": {
        "seed": 2,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 10.0,
        "gradient_accumulation_steps": 2,
        "temperature": 0.8,
        "num_iterations": 2,
    },
}


seen: set[str] = set()
"""Layouts that agents of this process were trained in."""


class Rest(TrainerCallback):
    """Hands the baton over every two steps, as waiting for a round does; at the start of a step, if asked."""

    def __init__(self, park: bool, at_begin: bool) -> None:
        self.park, self.at_begin = park, at_begin
        self.trainer: Any = None

    def _rest(self, step: int) -> None:
        if step and step % 2 == 0:
            held = [getattr(self.trainer, name, None) for name in HELD]
            with turns.parked(*held) if self.park else nullcontext():
                turns.rest(0)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.at_begin:
            self._rest(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if not self.at_begin:
            self._rest(state.global_step)


def digest(trainer: Any) -> str:
    """Of all weights, gathered. Collective."""
    found = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        context = nullcontext()
        if hasattr(parameter, "ds_id"):
            import deepspeed

            context = deepspeed.zero.GatheredParameters([parameter])
        with context:
            found.update(name.encode())
            found.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(name: str, base: Path, out: Path, kind: str, park: bool, at_begin: bool) -> str:
    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    rest = Rest(park, at_begin)
    if kind == "ppo":
        unlike = UNLIKE[name] | {"num_ppo_epochs": 3 if name == "code" else 1}
        unlike.pop("num_iterations", None)
        rest.trainer = ppo_trainer(load, base, out / name, callbacks=[rest], **unlike)
    else:
        rest.trainer = group_trainer(name, load(), out, kind, rest)
    rest.trainer.train()
    seen.add(rest.trainer.accelerator.distributed_type.value)
    return digest(rest.trainer)


def group_trainer(name: str, model: Any, out: Path, kind: str, rest: Rest) -> Any:
    kinds = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    make, configure = kinds[kind]
    args = configure(
        output_dir=str(out / name),
        max_steps=6,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **UNLIKE[name],
    )
    return make(
        model,
        letters_of(name),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"] * 8}),
        processing_class=models.tokenizer(),
        callbacks=[rest],
    )


def run(
    names: Iterable[str], base: Path, out: Path, kind: str = "grpo", park: bool = False, at_begin: bool = False
) -> dict[str, str]:
    """Trains the agents in turns; one alone takes no turns with anyone. Collective."""
    return turns.take_turns({n: (lambda n=n: train(n, base, out, kind, park, at_begin)) for n in names})


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "grpo"
    prepare()
    base = folder / "base"
    found = {
        "alone": run(["tool"], base, folder, kind) | run(["code"], base, folder, kind),
        "in turns": run(UNLIKE, base, folder, kind),
        "parked": run(UNLIKE, base, folder, kind, park=True),
    }
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    (folder / f"digests-{rank}.json").write_text(json.dumps({"world": world, "layouts": sorted(seen)} | found))


if __name__ == "__main__":
    main()
