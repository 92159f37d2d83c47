"""A PPO trainer of TRL 1.12, its value and reward models made on the spot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tests import models


def judge(base: Path, seed: int) -> PreTrainedModel:
    """The base with a head that scores, to be trained as value model or to give rewards."""
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)


def ppo_trainer(
    load: Callable[[], PreTrainedModel], base: Path, out: Path, callbacks=(), value_model=None, **arguments: Any
):
    """`load` makes the policy, and its reference; after the arguments, which tell transformers of DeepSpeed."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    settings = (
        models.TRAINING
        | {
            "output_dir": str(out),
            "per_device_train_batch_size": 4,
            "response_length": 5,
            "num_ppo_epochs": 2,
            "num_sample_generations": 0,
            "seed": 3,
        }
        | arguments
    )
    tokenizer = models.tokenizer()
    tokenizer.padding_side = "left"
    prompts = [tokenizer(prompt)["input_ids"] for prompt in ("ab", "cd", "ef", "gh") * 16]
    steps = settings.pop("max_steps", 6)
    episodes = steps * settings["per_device_train_batch_size"] * int(os.environ.get("WORLD_SIZE", "1"))
    configured = PPOConfig(total_episodes=episodes, **settings)
    return PPOTrainer(
        args=configured,
        processing_class=tokenizer,
        model=load(),
        ref_model=load(),
        reward_model=judge(base, 8),
        value_model=value_model or judge(base, 7),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        eval_dataset=Dataset.from_dict({"input_ids": prompts[:8]}),
        callbacks=[*callbacks],
    )
