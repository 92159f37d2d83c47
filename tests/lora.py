"""Tiny bases and trained-looking LoRA adapters, made by peft itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ram_trl import MergeConfig
from ram_trl.engine.counting import make_plan
from ram_trl.engine.merging import merge_spans
from ram_trl.engine.workers import Workers
from ram_trl.weights import Span, Store, entries
from ram_trl.weights.adapter import Adapter, open_adapter
from ram_trl.weights.checkpoint import Checkpoint, open_checkpoint
from tests import models

PROMPT = torch.tensor([[3, 4, 5, 9, 17, 28, 2, 40], [1, 60, 33, 8, 8, 19, 20, 5]])
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def qwen3(tied: bool = True):
    return models.tiny_model(tied=tied)


def llama(bias: bool = False):
    """Square attention weights, biases on request."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_bias=bias,
        mlp_bias=bias,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def gpt2():
    """Conv1D layers: c_attn is not square, attn.c_proj is; the head is tied."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def qwen3_moe():
    """Five experts (not the rank of any adapter), stored one by one, not square."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def mixtral():
    """Stored under other names than the model has; square experts."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)


def gpt_oss():
    """Experts stored as (expert, in, out), fused, square; with biases."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def train(model: PeftModel, seed: int, adapter: str = "default", size: float = 0.05) -> None:
    """Moves everything that the adapter trains, B included, which starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ours = f".{adapter}." in name or name.endswith(f".{adapter}")
            if ours or (parameter.requires_grad and name.endswith("bias")):
                parameter += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * size


def adapter(base: Path, folder: Path, seed: int = 1, size: float = 0.05, **settings) -> PeftModel:
    """Saves an adapter on a base folder, as if it had been trained; the agent is returned."""
    settings = {"r": 4, "target_modules": list(EVERYWHERE), "lora_alpha": 6} | settings
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    train(model, seed, size=size)
    model.save_pretrained(folder)
    return model.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


def of_agent(base: Path, folder: Path) -> torch.Tensor:
    """What peft computes with a saved adapter."""
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))


def of_folder(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance in the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def reconfigure(folder: Path, **values) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def opened(base: Path, agents: dict[str, Path]) -> tuple[Checkpoint, dict[str, Adapter]]:
    """Base and agents as stores; there must be no problems."""
    checkpoint = open_checkpoint(base, "base").store
    found = {name: open_adapter(folder, checkpoint, f"agent '{name}'") for name, folder in agents.items()}
    for one in found.values():
        assert not one.problems, "\n".join(map(str, one.problems))
    return checkpoint, {name: one.store for name, one in found.items()}


def merged(base: Store, agents: Mapping[str, Store], config: MergeConfig, **how) -> dict[str, torch.Tensor]:
    """The merge of stores in float32, by stored name, shaped."""
    result = {name: torch.empty(entries(base, name)) for name in base.names()}

    def keep(span: Span, values: torch.Tensor) -> None:
        result[span.name][span.start : span.stop] = values

    with Workers(how.pop("threads", 2)) as workers:
        plan = make_plan(base, agents, config, workers, **how)
        for _ in merge_spans(base, agents, plan, keep, workers, **how):
            pass
    return {name: tensor.view(base.shape(name)) for name, tensor in result.items()}


def update(base: Store, agent: Store) -> dict[str, torch.Tensor]:
    """ΔW of an agent, by stored name, flat."""
    spans = {name: Span(name, 0, entries(base, name)) for name in base.names()}
    return {name: span.of(agent) - span.of(base) for name, span in spans.items()}


def save_model(base: Path, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """A folder like the base with other weights."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(base / "config.json", folder)


def far(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Relative distance of all tensors together."""
    names = sorted(expected)
    return distance(*(torch.cat([one[name].double().reshape(-1) for name in names]) for one in (found, expected)))
