"""Memory: recall one of five letters by its position, `M:k b x q d?3=` → `x`."""

from __future__ import annotations

import random
import string

from ram_trl.recipe import Task

from .common import Example, make_task

LETTERS = 5


def draw(generator: random.Random) -> Example:
    """Five different letters and a position; the careless answer is a letter from the end or, for it, the start."""
    letters = generator.sample(string.ascii_lowercase, LETTERS)
    position = generator.randrange(LETTERS)
    return Example(
        prompt=f"M:{' '.join(letters)}?{position + 1}=",
        answer=letters[position],
        slip=letters[0] if position else letters[-1],
        often_right=position in (0, 2),
    )


def mem() -> Task:
    """The memory task."""
    return make_task(draw)
