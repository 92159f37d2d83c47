"""
Merge rules: one file each, a pure function of a flat fp32 chunk and a few named numbers.

To add one: write its file, name it and its knobs in `config.py`, and bind it in `rule` below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ram_trl.engine.plan import Plan
from ram_trl.methods.average import average
from ram_trl.methods.chunk import Chunk
from ram_trl.methods.dare import dare
from ram_trl.methods.ram import ram
from ram_trl.methods.task_arithmetic import task_arithmetic
from ram_trl.methods.ties import ties

Rule = Callable[[Chunk], Tensor]


def rule(plan: Plan) -> Rule:
    """The rule of `plan.config.method` with its numbers filled in: a function of a chunk alone."""
    config = plan.config
    match config.method:
        case "ram":
            return lambda chunk: ram(chunk, plan.lambdas(chunk.name))
        case "average":
            return average
        case "task_arithmetic":
            return partial(task_arithmetic, scale=config.scale)
        case "ties":
            return partial(ties, scale=config.scale)
        case "dare":
            return partial(dare, scale=config.scale, drop=config.drop, seed=config.seed)


__all__ = ["Chunk", "Rule", "average", "dare", "ram", "rule", "task_arithmetic", "ties"]
