"""Template: calling tools. The model answers with a JSON list of calls, and is rewarded for the right ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ram_trl.recipe import Task

from .hub import hub_task, text_of

PROMPT = """You can call these tools:
{tools}

Answer with nothing but a JSON list of calls, such as [{{"name": "tool", "arguments": {{"key": "value"}}}}].

{query}"""


def tool_use(
    dataset: str = "Salesforce/xlam-function-calling-60k",
    config: str | None = None,
    split: str = "train",
    held_out: int = 200,
    limit: int | None = None,
) -> Task:
    """Rows with `query`, `tools` and `answers`, the latter two as JSON."""
    return hub_task("tool_use", dataset, config, split, _row, [right_calls, well_formed], held_out, limit, 256)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": PROMPT.format(tools=row["tools"], query=row["query"]), "answers": row["answers"]}


def right_calls(completions: list[Any], answers: list[str], **columns: Any) -> list[float]:
    """1 for exactly the right calls, in any order; for some of them, half their share."""
    rewards = []
    for completion, answer in zip(completions, answers, strict=True):
        calls, wanted = parsed(text_of(completion)), parsed(answer) or []
        if calls is None:
            rewards.append(0.0)
            continue
        hits = sum(call in wanted for call in calls)
        exact = sorted(map(_key, calls)) == sorted(map(_key, wanted))
        rewards.append(1.0 if exact else 0.5 * hits / max(len(calls), len(wanted), 1))
    return rewards


def well_formed(completions: list[Any], **columns: Any) -> list[float]:
    """A little for an answer that can be read."""
    return [0.1 * (parsed(text_of(completion)) is not None) for completion in completions]


def parsed(text: str) -> list[dict[str, Any]] | None:
    """The calls in an answer, also within a code fence; `None` if it is not a list of calls."""
    inner = text.split("```")[1].removeprefix("json") if text.count("```") >= 2 else text
    try:
        calls = json.loads(inner)
    except ValueError:
        return None
    good = isinstance(calls, list) and all(isinstance(call, dict) and "name" in call for call in calls)
    return calls if good else None


def _key(call: Mapping[str, Any]) -> str:
    return json.dumps(call, sort_keys=True)
