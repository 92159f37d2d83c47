"""Exact greedy accuracy without generating: rows of prompt and answer in, a percentage out.

Greedy decoding writes an answer exactly when, with the answer itself fed as input, the most likely token at every
position is the answer's own next token and then the end-of-sequence token. One forward pass over prompt and answer
therefore tells what generation would tell, at a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100


class ScoreRow(NamedTuple):
    """A prompt and its one right answer."""

    prompt: str
    answer: str


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
