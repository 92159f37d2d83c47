"""A real model with everything that is hard to shard: odd sizes, tied, frozen and never active parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model


class Odd(nn.Module):
    """Parameters of 7 entries, of 1 (on two ranks, the second holds padding only), and one that never moves."""

    def __init__(self) -> None:
        super().__init__()
        self.seven = nn.Parameter(torch.zeros(7))
        self.one = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.ones(3, 3))

    def forward(self, states: Tensor) -> Tensor:
        shift = torch.nn.functional.pad(self.seven, (0, states.shape[-1] - 7))
        return states * self.one + shift + 0 * self.never.sum()


class OddBackbone(Qwen3Model):
    """A Qwen3 whose last hidden states go through `Odd`: trainers pass by the logits, but not by these."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.odd = Odd()
        self.post_init()

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.last_hidden_state = self.odd(output.last_hidden_state)
        return output


class OddModel(Qwen3ForCausalLM):
    """A Qwen3 of a few thousand weights on that backbone."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.model = OddBackbone(config)
        self.post_init()


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
    odd = model.model.odd
    with torch.no_grad():
        for parameter in (odd.seven, odd.one, odd.never):
            parameter += 0.1 * torch.randn(parameter.shape)
    return model
