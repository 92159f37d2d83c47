"""From an agent of a recipe to TRL's trainer of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, set_seed

from ram_trl.recipe import AgentSection, Recipe, Task
from ram_trl.runs.hardware import Hardware
from ram_trl.runs.jobs import known_args
from ram_trl.runs.judge import Judge

VLLM_PORTS = "RAM_TRL_VLLM_PORTS"
"""Environment variable of a job: a port per agent, as `tool=41001,code=41002`, that no other job has."""


def build_trainer(
    agent: AgentSection, task: Task, recipe: Recipe, base: Path, folder: Path, hardware: Hardware
) -> Trainer:
    """
    Builds an agent's trainer, without merging.

    Args:
        agent ([`AgentSection`]):
            The agent.
        task ([`Task`]):
            Its task.
        recipe ([`Recipe`]):
            Its recipe.
        base (`Path`):
            Folder of the checkpoint to start from.
        folder (`Path`):
            Where checkpoints go.
        hardware ([`Hardware`]):
            The layout: CPU or GPU, and the precision.

    Raises:
        `ValueError`: if TRL has no such trainer, or refuses its arguments.
    """
    args = trainer_args(agent, recipe, folder, hardware)
    set_seed(args["seed"])  # adapters and value heads are drawn before the trainer seeds
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    make = {"grpo": _group, "rloo": _group, "ppo": _ppo}[agent.trainer]
    trainer = make(agent, task, base, args, tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_args(agent: AgentSection, recipe: Recipe, folder: Path, hardware: Hardware) -> dict[str, Any]:
    """The arguments of an agent's trainer config: ours under the recipe's."""
    assert recipe.continual is not None
    known = known_args(agent.trainer)
    own: dict[str, Any] = {
        "seed": recipe.seed,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": recipe.continual.merge_every,
        "save_total_limit": 2,
        "bf16": hardware.precision == "bf16",
    }
    if agent.trainer == "ppo":
        own |= {"save_strategy": "no", "num_sample_generations": 0}  # it cannot resume, so it need not save
    ports = dict(pair.split("=") for pair in os.environ.get(VLLM_PORTS, "").split(",") if pair)
    if agent.args.get("use_vllm") and agent.name in ports and "vllm_group_port" in known:
        own["vllm_group_port"] = int(ports[agent.name])
    return own | agent.args | {"output_dir": str(folder), "use_cpu": hardware.on_cpu}


def _group(agent: AgentSection, task: Task, base: Path, args: Mapping[str, Any], tokenizer: Any) -> Trainer:
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    kinds = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    trainer, config = kinds[agent.trainer]
    return trainer(
        model=str(base),  # loaded by TRL, sharded from the start where it can be
        reward_funcs=task.rewards,
        args=config(**args),
        train_dataset=task.train,
        processing_class=tokenizer,
        peft_config=adapter_config(agent),
    )


def _ppo(agent: AgentSection, task: Task, base: Path, args: Mapping[str, Any], tokenizer: Any) -> Trainer:
    known_args("ppo")
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    config = PPOConfig(**args)

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def classifier(folder: str | Path) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)

    prompts = task.train.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]})
    prompts = prompts.select_columns(["input_ids"])
    lora = adapter_config(agent)
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy(),
        ref_model=policy() if lora is None else None,
        reward_model=classifier(task.reward_model)
        if task.reward_model is not None
        else Judge(task.rewards, task.train, tokenizer),
        value_model=classifier(base),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(min(8, len(prompts)))),
        **({} if lora is None else {"peft_config": lora}),
    )


def adapter_config(agent: AgentSection) -> Any:
    """
    The `LoraConfig` of an agent; `None` if it trains all weights.

    Raises:
        `ValueError`: if peft refuses its fields.
    """
    if agent.peft is None:
        return None
    from peft import LoraConfig

    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **agent.peft})
    except (TypeError, ValueError) as error:
        raise ValueError(f"agent '{agent.name}': LoraConfig refuses its peft section: {error}") from error
