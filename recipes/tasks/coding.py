"""
Template: writing functions that pass tests.

The reward runs what the model wrote, in a process of its own with limits on time and memory. That keeps mistakes
away, not attacks: train in a container without network and without anything you would miss.
"""

from __future__ import annotations

import re
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ram_trl.recipe import Task

from .hub import hub_task, text_of

SECONDS, BYTES, AT_ONCE = 5, 1 << 30, 8

PROMPT = """{text}

Your code has to pass such tests:
{test}

Answer with one Python code block and nothing else."""


def coding(
    dataset: str = "google-research-datasets/mbpp",
    config: str | None = "full",
    split: str = "train",
    held_out: int = 60,
    limit: int | None = None,
) -> Task:
    """Rows with `text` and `test_list`."""
    return hub_task("coding", dataset, config, split, _row, [passed_tests, has_code], held_out, limit, 512)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": PROMPT.format(text=row["text"], test=row["test_list"][0]), "tests": list(row["test_list"])}


def passed_tests(completions: list[Any], tests: list[list[str]], **columns: Any) -> list[float]:
    """The share of the tests that pass."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(_share, (code_of(text_of(c)) for c in completions), tests))


def has_code(completions: list[Any], **columns: Any) -> list[float]:
    """A little for a code block."""
    return [0.1 * ("```python" in text_of(completion)) for completion in completions]


def code_of(text: str) -> str:
    """The first code block, or everything."""
    found = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return found[1] if found else text


def _share(code: str, tests: list[str]) -> float:
    return sum(runs(f"{code}\n\n{test}\n") for test in tests) / max(len(tests), 1)


def runs(program: str) -> bool:
    """Whether a program comes to its end within its limits; one that leaves before its tests has not."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", f"{program}\nprint({token!r})"],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
                preexec_fn=_limit,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.stdout.endswith(f"{token}\n".encode())


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
