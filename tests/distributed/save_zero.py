"""
Trains a tiny tied model for two steps under DeepSpeed ZeRO and saves it as DeepSpeed does.

    torchrun --nproc-per-node 2 -m tests.distributed.save_zero STAGE BASE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main(stage: int, base: str, folder: str) -> None:
    """Leaves ZeRO shards in `folder`, and the same weights gathered in `folder`-gathered.safetensors."""
    deepspeed.init_distributed("gloo")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        tokens = torch.randint(3, 30, (1, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder, tag="global_step2")
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        gathered = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        save_file(gathered, f"{folder}-gathered.safetensors")
        model.config.save_pretrained(Path(folder))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
