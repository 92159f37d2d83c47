"""What the demo's tasks share: one alphabet and tokenizer, examples with a right and a careless answer, three splits.

A task is a `draw` function that makes up one `Example` from a random generator. Everything else is derived from it
here: the prompts an agent trains on, the prompts it is scored on, and the corpus of the base's warm-up (`base.py`).
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ram_trl.evaluate import ScoreRow
from ram_trl.recipe import Split, Task

# The capitals head a prompt and name its task: T for tool, C for code, M for mem.
ALPHABET = string.ascii_lowercase + string.digits + "=()?>: TCM"

TRAIN_PROMPTS = 2000


@dataclass(frozen=True)
class Example:
    """
    One prompt and two ways to answer it.

    Args:
        prompt (`str`):
            What the model reads.
        answer (`str`):
            The right answer.
        slip (`str`):
            The careless answer, found in the corpus of the warm-up beside the right one.
        often_right (`bool`):
            Whether the corpus mostly answers this kind of prompt rightly. Both kinds leave RL something to find:
            the one a start, the other its headroom.
    """

    prompt: str
    answer: str
    slip: str
    often_right: bool


Draw = Callable[[random.Random], Example]


def split_of(prompt: str) -> Split:
    """
    The split a prompt belongs to: a tenth of all prompts is `test`, a tenth `dev`, the rest `train`.

    It depends on the prompt's own characters alone, so no seed, and no other way of sampling, can move a scored
    prompt into the training data.
    """
    bucket = zlib.crc32(prompt.encode()) % 10
    if bucket == 0:
        return "test"
    return "dev" if bucket == 1 else "train"


def sample(draw: Draw, split: Split, count: int) -> list[Example]:
    """The first `count` different prompts of a split, always the same ones."""
    generator = random.Random(split)
    examples: dict[str, Example] = {}
    while len(examples) < count:
        example = draw(generator)
        if split_of(example.prompt) == split:
            examples.setdefault(example.prompt, example)
    return list(examples.values())


def make_task(draw: Draw) -> Task:
    """The task that asks for the right answer to the prompts of `draw`."""
    examples = sample(draw, "train", TRAIN_PROMPTS)
    columns = {"prompt": [e.prompt for e in examples], "answer": [e.answer for e in examples]}

    def rows(split: Split, count: int) -> list[ScoreRow]:
        return [ScoreRow(e.prompt, e.answer) for e in sample(draw, split, count)]

    return Task(train=Dataset.from_dict(columns), rewards=[exact_match], rows=rows)


def exact_match(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """TRL reward: 1 for the right answer and nothing else, 0 for all the rest."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of `ALPHABET`."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
