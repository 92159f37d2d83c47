"""The base of the demo, made on the spot: a tiny Qwen3 that has read a corpus and picked up its careless habits.

The warm-up is supervised, on the train split of all three tasks. In its first part every answer is right, until the
model has learned the skills; in the second many answers are careless, and it learns to give those. That leaves what RL
needs: right answers that are sampled often enough to be rewarded, and plenty of room above.
"""

from __future__ import annotations

import random

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ram_trl.evaluate import ScoreRow, accuracies, collate
from ram_trl.recipe import Progress

from . import code, mem, tool
from .common import Draw, Example, make_tokenizer, sample, split_of

# Each task's share of the corpus; code, with four functions to learn, gets a larger one.
CORPUS: dict[Draw, float] = {tool.draw: 1.0, code.draw: 1.3, mem.draw: 1.0}

CHECKED = 30
"""Steps between two looks at what has been learned."""
SEEN = 100
"""Prompts per task that are looked at."""


def tiny_qwen3(
    seed: int,
    progress: Progress,
    learning_steps: int = 600,
    careless_steps: int = 260,
    learned: float = 95.0,
    batch_size: int = 48,
    learning_rate: float = 4e-3,
    often: float = 0.65,
    rarely: float = 0.3,
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """
    Make the base model and its tokenizer.

    Args:
        seed (`int`):
            Seed of the initial weights and of the corpus.
        progress (`Callable[[int, int], None]`):
            Called after every step with the steps done and the steps in all.
        learning_steps (`int`, *optional*, defaults to `600`):
            At most so many steps in which every answer is right.
        careless_steps (`int`, *optional*, defaults to `260`):
            Steps after that.
        learned (`float`, *optional*, defaults to `95.0`):
            The first part ends when so many percent of the train prompts of each task are answered rightly. How long
            that takes differs by seed, and a skill that is not there yet leaves RL nothing to reward.
        batch_size (`int`, *optional*, defaults to `48`):
            Examples per step.
        learning_rate (`float`, *optional*, defaults to `4e-3`):
            Peak learning rate, after a warm-up of 40 steps.
        often (`float`, *optional*, defaults to `0.65`):
            How often the later corpus is right about the skills it is careful with.
        rarely (`float`, *optional*, defaults to `0.3`):
            How often it is right about the others.
    """
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    generator = random.Random(seed)
    known = {draw.__module__: [ScoreRow(e.prompt, e.answer) for e in sample(draw, "train", SEEN)] for draw in CORPUS}

    def step(chance: tuple[float, float], rate: float) -> None:
        rows = [corpus_row(draw_train(generator), chance, generator) for _ in range(batch_size)]
        inputs, mask, labels = collate(tokenizer, rows)
        logits = model(input_ids=inputs, attention_mask=mask).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate * rate
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    for done in range(1, learning_steps + 1):
        step((1.0, 1.0), min(1.0, done / 40) * (1 - done / (learning_steps + 50)))
        progress(done, learning_steps + careless_steps)
        if done % CHECKED == 0 and min(accuracies(model, tokenizer, known).values()) >= learned:
            break
    for left in range(careless_steps, 0, -1):
        step((rarely, often), 0.05 + 0.35 * left / careless_steps)
        progress(done + careless_steps - left + 1, done + careless_steps)
    return model, tokenizer


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """A Qwen3 of about 77 000 parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        # Prompts are short: with the usual 10 000 nearby positions look alike, and recall is not learned in time.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def draw_train(generator: random.Random) -> Example:
    """An example of any task, from its train split."""
    while True:
        (draw,) = generator.choices(list(CORPUS), weights=list(CORPUS.values()))
        example = draw(generator)
        if split_of(example.prompt) == "train":
            return example


def corpus_row(example: Example, chance: tuple[float, float], generator: random.Random) -> ScoreRow:
    """What the corpus answers: rightly with the first chance, or with the second where it is often right."""
    right = generator.random() < chance[example.often_right]
    return ScoreRow(example.prompt, example.answer if right else example.slip)
