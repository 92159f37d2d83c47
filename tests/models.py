"""Tiny models and checkpoints, made on the spot."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TRAINING = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Arguments of trainers that learn fast on a CPU and leave nothing behind."""


def tiny_model(seed: int = 0, tied: bool = True, dtype: torch.dtype = torch.float32, vocabulary: int = 61):
    """A Qwen3 of a few thousand weights with odd sizes."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=33,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def trained(model, seed: int, share: float = 0.3, size: float = 0.01):
    """A copy in which a random `share` of all weights moved by about `size`."""
    agent = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < share
            step = torch.randn(parameter.shape, generator=generator) * size
            parameter += (moved * step).to(parameter.dtype)
    return agent


def tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer with a chat template."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = "{{ messages[0]['content'] }}"
    return made


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A checkpoint folder that holds just these tensors."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "architectures": ["Toy"]}))


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the tensors of a single-file checkpoint."""
    rewrite_file(folder / "model.safetensors", change)


def rewrite_file(file: Path, change) -> None:
    """Applies `change` to the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def reconfigure(folder: Path, **values) -> None:
    """Sets keys of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
