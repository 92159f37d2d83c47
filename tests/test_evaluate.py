"""Scoring: one teacher-forced pass says what greedy generation would say."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from ram_trl.evaluate import ScoreRow, accuracies, accuracy
from tests import models

PROMPTS = ["".join(random.Random(i).choices("abcdefghij ", k=1 + i % 7)) for i in range(40)]
LONGEST = 8


@pytest.fixture(scope="module")
def speaker():
    """A random model that says different things, its tokenizer, and an end token that it does say."""
    model, tokenizer = models.tiny_model(vocabulary=30).eval(), models.tokenizer()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 8
    model.generation_config.eos_token_id = None
    said = Counter(token for prompt in PROMPTS for token in generate(model, tokenizer, prompt)[1:])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(said.most_common(1)[0][0])
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def generate(model, tokenizer, prompt: str) -> list[int]:
    """The obviously right reference: greedy generation, one prompt at a time."""
    inputs = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(
        input_ids=inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=LONGEST
    )
    return out[0, inputs.shape[1] :].tolist()


def rows_of(model, tokenizer) -> list[ScoreRow]:
    """Answers the model gives, and the same with one letter changed."""
    rows = []
    for i, prompt in enumerate(PROMPTS):
        tokens = [t for t in generate(model, tokenizer, prompt) if t != tokenizer.eos_token_id]
        letters = tokenizer.convert_ids_to_tokens(tokens)
        letters = [letter if len(letter) == 1 else "a" for letter in letters]
        if i % 3 == 0 and letters:
            letters[-1] = "b" if letters[-1] == "a" else "a"
        rows.append(ScoreRow(prompt, "".join(letters)))
    return rows


@pytest.mark.parametrize("batch_size", [1, 7, 128])
def test_accuracy_is_that_of_greedy_generation(speaker, batch_size: int) -> None:
    model, tokenizer = speaker
    rows = rows_of(model, tokenizer)
    eos = tokenizer.eos_token_id
    right = [generate(model, tokenizer, p) == [*tokenizer(a)["input_ids"], eos] for p, a in rows]
    assert 5 <= sum(right) <= 35, "the comparison needs both hits and misses"
    assert accuracy(model, tokenizer, rows, batch_size) == pytest.approx(100 * sum(right) / len(right))


def test_an_answer_that_does_not_end_is_wrong(speaker) -> None:
    model, tokenizer = speaker
    row = next(
        row for row in rows_of(model, tokenizer) if len(row.answer) >= 2 and accuracy(model, tokenizer, [row]) == 100.0
    )
    assert accuracy(model, tokenizer, [ScoreRow(row.prompt, row.answer[:-1])]) == 0.0


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_left_as_it_was(speaker, training: bool) -> None:
    model, tokenizer = speaker
    model.train(training)
    accuracy(model, tokenizer, [ScoreRow("ab", "c")])
    assert model.training is training
    model.eval()


def test_the_average_is_the_plain_mean_over_tasks(speaker) -> None:
    model, tokenizer = speaker
    rows = rows_of(model, tokenizer)
    right = [row for row in rows if accuracy(model, tokenizer, [row]) == 100.0]
    wrong = [row for row in rows if row not in right]
    tasks = {"a": right, "b": wrong, "c": [right[0], wrong[0]]}
    assert accuracies(model, tokenizer, tasks) == {"a": 100.0, "b": 0.0, "c": 50.0, "average": 50.0}


def test_nothing_to_score_is_an_error(speaker) -> None:
    with pytest.raises(ValueError, match="no rows to score"):
        accuracy(*speaker, [])


def test_a_tokenizer_without_an_end_is_an_error(speaker) -> None:
    tokenizer = models.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        accuracy(speaker[0], tokenizer, [ScoreRow("ab", "c")])
