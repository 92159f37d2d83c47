"""A real model with everything that is hard to shard: odd sizes, tied, frozen and never active parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM


class Odd(nn.Module):
    """Parameters of 7 entries, of 1 (on two ranks, the second holds padding only), and one that never moves."""

    def __init__(self) -> None:
        super().__init__()
        self.seven = nn.Parameter(torch.zeros(7))
        self.one = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.ones(3, 3))

    def forward(self, logits: Tensor) -> Tensor:
        shift = torch.nn.functional.pad(self.seven, (0, logits.shape[-1] - 7))
        return logits * self.one + shift + 0 * self.never.sum()


class OddModel(Qwen3ForCausalLM):
    """A Qwen3 of a few thousand weights whose logits go through `Odd`."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.odd = Odd()
        self.post_init()

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = self.odd(output.logits)
        return output


def load_odd(folder: Path) -> OddModel:
    """The model of a checkpoint, its last norm frozen (loading under ZeRO-3 forgets what was frozen before)."""
    model = OddModel.from_pretrained(folder, dtype=torch.float32)
    model.model.norm.weight.requires_grad_(False)
    return model


def odd_model(seed: int = 0) -> OddModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=33,
        intermediate_size=47,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = OddModel(config)
    with torch.no_grad():
        for parameter in (model.odd.seven, model.odd.one, model.odd.never):
            parameter += 0.1 * torch.randn(parameter.shape)
    return model
