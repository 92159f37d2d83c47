"""How good a model is at a task: by exact greedy accuracy, or by the task's own reward.

Exact accuracy needs no generating: rows of prompt and answer go in, a percentage comes out. Greedy decoding writes an
answer exactly when, with the answer itself fed as input, the most likely token at every position is the answer's own
next token and then the end-of-sequence token. One forward pass over prompt and answer therefore tells what generation
would tell, at a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100


class ScoreRow(NamedTuple):
    """A prompt and its one right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Scorer:
    """
    Scores a model on a task by the task's own reward, on completions decoded greedily.

    Args:
        task (`str`):
            Name of the task; the score is logged as `ram/eval/<task>`.
        prompts (`Sequence[str]` or `Sequence[list[dict[str, str]]]`):
            Prompts that are not trained on, as texts or as chats.
        reward (`Callable[..., Sequence[float]]`):
            Reward function with TRL's signature.
        columns (`Mapping[str, Sequence[Any]]`, *optional*):
            What else the reward reads, one value per prompt.
        max_new_tokens (`int`, *optional*, defaults to `64`):
            Longest completion.
        batch_size (`int`, *optional*, defaults to `32`):
            Prompts per batch.
    """

    task: str
    prompts: Sequence[str] | Sequence[list[dict[str, str]]]
    reward: Callable[..., Sequence[float]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    max_new_tokens: int = 64
    batch_size: int = 32

    @torch.no_grad()
    def score(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        """Mean reward over the prompts. The model is left in the mode it came in."""
        was_training, side = model.training, tokenizer.padding_side
        model.eval()
        tokenizer.padding_side = "left"
        total = 0.0
        try:
            for start in range(0, len(self.prompts), self.batch_size):
                part = slice(start, start + self.batch_size)
                prompts = [_text(prompt, tokenizer) for prompt in self.prompts[part]]
                batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
                batch = batch.to(model.device)
                written = model.generate(
                    **batch,
                    do_sample=False,
                    max_new_tokens=self.max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )
                new = written[:, batch["input_ids"].shape[1] :]
                completions = tokenizer.batch_decode(new, skip_special_tokens=True)
                columns = {name: list(values[part]) for name, values in self.columns.items()}
                total += sum(self.reward(prompts=prompts, completions=completions, **columns))
        finally:
            model.train(was_training)
            tokenizer.padding_side = side
        return total / len(self.prompts)


def _text(prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


@dataclass(frozen=True)
class ExactScorer:
    """
    Scores a model on a task by [`accuracy`].

    Args:
        task (`str`):
            Name of the task; the score is logged as `ram/eval/<task>`.
        rows (`Sequence[ScoreRow]`):
            Prompts that are not trained on, with their right answers.
    """

    task: str
    rows: Sequence[ScoreRow]

    def score(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        """Percentage of the rows answered exactly."""
        return accuracy(model, tokenizer, self.rows)


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[ScoreRow], batch_size: int = 128
) -> float:
    """
    Percentage of the rows that greedy decoding answers exactly, the end of the answer included.

    The answer counts as the tokens the tokenizer makes of it on its own; a model that spells the same text with
    other tokens has not given it. The model is in evaluation mode meanwhile and left in the mode it came in.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A causal language model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer, which must have an end-of-sequence token.
        rows (`Sequence[ScoreRow]`):
            Prompts and right answers, at least one.
        batch_size (`int`, *optional*, defaults to `128`):
            Rows per forward pass.

    Raises:
        `ValueError`: if there are no rows, or the tokenizer has no end-of-sequence token.
    """
    if not rows:
        raise ValueError("there are no rows to score; give at least one prompt with its answer")
    was_training = model.training
    model.eval()
    try:
        hits = 0
        for start in range(0, len(rows), batch_size):
            inputs, mask, labels = (t.to(model.device) for t in collate(tokenizer, rows[start : start + batch_size]))
            predicted = model(input_ids=inputs, attention_mask=mask).logits[:, :-1].argmax(-1)
            wanted = labels[:, 1:]
            hits += int(((predicted == wanted) | (wanted == IGNORED)).all(1).sum())
    finally:
        model.train(was_training)
    return 100 * hits / len(rows)


def accuracies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Mapping[str, Sequence[ScoreRow]]
) -> dict[str, float]:
    """[`accuracy`] of every task by name and, last, their plain mean as `average`."""
    scores = {name: accuracy(model, tokenizer, rows) for name, rows in tasks.items()}
    return scores | {"average": sum(scores.values()) / len(scores)}


def collate(tokenizer: PreTrainedTokenizerBase, rows: Sequence[ScoreRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, attention mask and labels of a batch, padded on the right; only answer and end carry labels."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so where an answer ends cannot be scored")
    prompts = tokenizer([row.prompt for row in rows])["input_ids"]
    answers = tokenizer([row.answer for row in rows], add_special_tokens=False)["input_ids"]
    answers = [[*answer, tokenizer.eos_token_id] for answer in answers]
    shape = (len(rows), max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)))
    inputs = torch.full(shape, tokenizer.eos_token_id)
    mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        inputs[row, :end] = torch.tensor(prompt + answer)
        mask[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return inputs, mask, labels
