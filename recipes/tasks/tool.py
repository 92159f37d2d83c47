"""Tool use: turn a request into a call of the right tool, `T:way to oslo>` → `map(oslo)`."""

from __future__ import annotations

import random
import string

from ram_trl.recipe import Task

from .common import Example, make_task

REQUESTS = {
    "map": ["way to {}", "route to {}"],
    "news": ["headlines on {}", "stories on {}"],
    "cab": ["ride to {}", "lift to {}"],
    "buy": ["order some {}", "get me {}"],
}


def draw(generator: random.Random) -> Example:
    """A request with a made-up word; the careless answer forgets the call's brackets."""
    tool_name = generator.choice(list(REQUESTS))
    word = "".join(generator.choices(string.ascii_lowercase, k=generator.randint(3, 4)))
    request = generator.choice(REQUESTS[tool_name]).format(word)
    return Example(
        prompt=f"T:{request}>",
        answer=f"{tool_name}({word})",
        slip=f"{tool_name} {word}",
        often_right=tool_name in ("map", "buy"),
    )


def tool() -> Task:
    """The tool-use task."""
    return make_task(draw)
