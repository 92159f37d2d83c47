"""What the templates share: rows of a dataset on the Hugging Face Hub or in a file, and a scorer on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset, load_dataset

from ram_trl.evaluate import Scorer
from ram_trl.recipe import RewardFunction, Task


def hub_task(
    name: str,
    dataset: str,
    config: str | None,
    split: str,
    row: Callable[[Mapping[str, Any]], dict[str, Any] | None],
    rewards: Sequence[RewardFunction],
    held_out: int,
    limit: int | None,
    max_new_tokens: int,
) -> Task:
    """
    A task from a dataset: a chat prompt per row, and whatever the rewards read.

    Args:
        name (`str`):
            Name of the task in scores.
        dataset (`str`), config (`str`, *optional*), split (`str`):
            A dataset on the Hub, or a `.jsonl` file.
        row (`Callable[[Mapping[str, Any]], dict[str, Any] | None]`):
            From a row of the dataset to the columns of ours, with the text of a question as `question`; `None` leaves
            it out.
        rewards (`Sequence[Callable]`):
            Rewards with TRL's signature; the first one scores.
        held_out (`int`):
            First rows, which are scored on and not trained on.
        limit (`int`, *optional*):
            Rows to read at most.
        max_new_tokens (`int`):
            Longest completion when scoring.
    """
    if dataset.endswith(".jsonl"):
        read = load_dataset("json", data_files=dataset, split="train")
    else:
        read = load_dataset(dataset, config, split=split)
    rows = [
        made for given in read.select(range(min(limit or len(read), len(read)))) if (made := row(given)) is not None
    ]
    if len(rows) <= held_out:
        raise ValueError(f"{dataset} has {len(rows)} usable rows; more than {held_out} are needed (held_out)")
    columns = {
        "prompt": [[{"role": "user", "content": made["question"]}] for made in rows],
        **{key: [made[key] for made in rows] for key in rows[0] if key != "question"},
    }
    scored = {key: values[:held_out] for key, values in columns.items()}
    return Task(
        train=Dataset.from_dict({key: values[held_out:] for key, values in columns.items()}),
        rewards=list(rewards),
        scorer=Scorer(name, scored.pop("prompt"), rewards[0], scored, max_new_tokens, batch_size=16),
    )


def text_of(completion: str | Sequence[Mapping[str, str]]) -> str:
    """A completion's text; TRL hands over a list of messages where prompts are chats."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
