"""Reward functions in the place of PPO's reward model: TRL's PPO scores with a model, tasks here with functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from ram_trl.recipe import RewardFunction

MASKED = -1


class _Reader(nn.Module):
    """Hands the tokens on as they are, where a reward model would make hidden states of them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> BaseModelOutput:
        return BaseModelOutput(hidden_states=(input_ids.masked_fill(attention_mask == 0, MASKED),))


class Judge(nn.Module):
    """
    Looks like a reward model to TRL's PPO, and scores by the sum of reward functions.

    Args:
        rewards (`list[Callable]`):
            Reward functions with TRL's signature.
        prompts (`Dataset`):
            Rows with `prompt` and whatever else the rewards read.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer that prompts are made into tokens with.
    """

    base_model_prefix = "reader"

    def __init__(self, rewards: list[RewardFunction], prompts: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.reader = _Reader()
        # DeepSpeed asks every model for these two, and makes nothing of them.
        self.config = SimpleNamespace(hidden_size=None)
        self.unused = nn.Parameter(torch.zeros(1), requires_grad=False)
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._rows = {tuple(tokenizer(row["prompt"])["input_ids"]): row for row in prompts}
        self._lengths = sorted({len(tokens) for tokens in self._rows}, reverse=True)

    def score(self, tokens: Tensor) -> Tensor:
        """The reward of every row, at every position."""
        rows, completions = [], []
        for line in tokens.tolist():
            kept = [token for token in line if token != MASKED]
            length = next((n for n in self._lengths if tuple(kept[:n]) in self._rows), None)
            if length is None:
                raise ValueError("PPO asks for the reward of a completion whose prompt is not of the task's dataset")
            rows.append(self._rows[tuple(kept[:length])])
            completions.append(self._tokenizer.decode(kept[length:], skip_special_tokens=True))
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        prompts = [row["prompt"] for row in rows]
        total = torch.zeros(len(rows))
        for reward in self._rewards:
            total += torch.tensor(reward(prompts=prompts, completions=completions, **columns), dtype=torch.float32)
        return total.to(tokens.device)[:, None, None].expand(*tokens.shape, 1)
