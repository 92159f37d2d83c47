"""Code execution: say what a small string function returns, `C:rev(abc)=` → `cba`."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from ram_trl.recipe import Task

from .common import Example, make_task

FUNCTIONS: dict[str, Callable[[str], str]] = {
    "rev": lambda s: s[::-1],
    "rot": lambda s: s[1:] + s[0],
    "end": lambda s: s[-2:],
    "swp": lambda s: s[-1] + s[1:-1] + s[0],
}


def draw(generator: random.Random) -> Example:
    """A function of a few different letters; the careless answer repeats the argument."""
    name = generator.choice(list(FUNCTIONS))
    argument = "".join(generator.sample(string.ascii_lowercase, generator.randint(3, 4)))
    return Example(
        prompt=f"C:{name}({argument})=",
        answer=FUNCTIONS[name](argument),
        slip=argument,
        often_right=name in ("rev", "end"),
    )


def code() -> Task:
    """The code-execution task."""
    return make_task(draw)
