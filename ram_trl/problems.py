"""Bad input as data: what is wrong, where, and what to do; all problems of a merge are reported at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

SHOWN_PER_KIND = 8


@dataclass(frozen=True)
class Problem:
    """
    One thing that stops a merge.

    Args:
        where (`str`):
            `"base"`, `"agent 'tool'"`, `"output"` or `"config"`.
        what (`str`):
            A sentence: what was found, what was expected, what to do.
        tensor (`str`, *optional*):
            Name of the tensor it is about.
        kind (`str`, *optional*, defaults to `""`):
            Problems of one kind at one place are shown together, the first few in full.
    """

    where: str
    what: str
    tensor: str | None = None
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class MergeInputError(ValueError):
    """
    The input cannot be merged. Nothing was written.

    Args:
        problems (`Iterable[Problem]`):
            Everything that was found, in order.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        shown: list[str] = []
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for problem in self.problems:
            key = (problem.where, problem.kind)
            seen[key] += 1
            if not problem.kind or seen[key] <= SHOWN_PER_KIND:
                shown.append(f"- {problem}")
        for (where, kind), count in seen.items():
            if kind and count > SHOWN_PER_KIND:
                shown.append(f"- {where}: … and {count - SHOWN_PER_KIND} more of the kind '{kind}'")
        counted = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n".join([f"cannot merge, {counted}; nothing was written:", *shown])


def agent_place(agent: str) -> str:
    """How an agent is named in problems and warnings."""
    return f"agent '{agent}'"
