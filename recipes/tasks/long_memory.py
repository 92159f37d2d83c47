"""Template: answering from many documents, of which few matter."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ram_trl.recipe import Task

from .hub import hub_task, text_of

PROMPT = """{documents}

Question: {question}
Answer in a few words, on a last line that starts with "Answer:"."""


def long_memory(
    dataset: str = "hotpotqa/hotpot_qa",
    config: str | None = "distractor",
    split: str = "train",
    held_out: int = 200,
    limit: int | None = 20_000,
) -> Task:
    """Rows with `question`, `answer` and `context`, which has `title` and `sentences`."""
    return hub_task("long_memory", dataset, config, split, _row, [same_words, has_answer], held_out, limit, 64)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    context = row["context"]
    documents = "\n\n".join(
        f"{title}\n{''.join(sentences)}"
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
    )
    return {"question": PROMPT.format(documents=documents, question=row["question"]), "answer": row["answer"]}


def same_words(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """F1 of the words of the answer."""
    return [f1(answer_of(text_of(completion)), right) for completion, right in zip(completions, answer, strict=True)]


def has_answer(completions: list[Any], **columns: Any) -> list[float]:
    """A little for a last line that can be read."""
    return [0.1 * bool(answer_of(text_of(completion))) for completion in completions]


def answer_of(text: str) -> str:
    """What stands after the last "Answer:"."""
    _, found, rest = text.rpartition("Answer:")
    return rest.strip().splitlines()[0] if found and rest.strip() else ""


def f1(given: str, right: str) -> float:
    """Harmonic mean of precision and recall over words, without case, articles and punctuation."""
    one, other = Counter(_words(given)), Counter(_words(right))
    common = sum((one & other).values())
    return 2 * common / (sum(one.values()) + sum(other.values())) if common else 0.0


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
