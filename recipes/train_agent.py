"""
One agent of a continual run. Start one process per agent; they meet in the hub, a folder.

    ram-trl demo                          # makes runs/demo/base, the checkpoint all agents start from
    python recipes/train_agent.py tool & python recipes/train_agent.py code & wait
    ram-trl status runs/hub
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import ram_trl
from ram_trl.recipe import RECIPES, load_function

BASE = "runs/demo/base"


def main(agent: str) -> None:
    """Trains `agent` (tool, code or mem) by GRPO, merging with the others every 6 steps."""
    task = load_function(f"tasks/{agent}.py:{agent}", RECIPES)()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(BASE, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(BASE, padding_side="left"),
        reward_funcs=task.rewards,
        train_dataset=task.train,
        args=GRPOConfig(
            output_dir=f"runs/{agent}",
            max_steps=30,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=12,
            use_cpu=True,
            bf16=False,
            logging_steps=6,
            save_steps=6,
            report_to="none",
        ),
    )
    ram_trl.attach(
        trainer,
        hub="runs/hub",
        agent=agent,
        base=BASE,
        merge_every=6,
        agents=["tool", "code"],  # the first round waits for these two even if one starts late
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
