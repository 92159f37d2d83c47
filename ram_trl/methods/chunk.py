"""What a merge rule sees: one flat fp32 chunk of one tensor, with the change of every agent on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ram_trl.methods.change import Change, Sums, Update


@dataclass(frozen=True)
class Chunk:
    """
    Entries `start … start + len(base)` of the flattened tensor `name`.

    Args:
        name (`str`):
            Name of the tensor.
        start (`int`):
            Flat index of the first entry.
        base (`Tensor`, float32):
            The base's weights.
        changes (`Iterable[Change]`):
            One per agent, in sorted order of agent names: the order of every sum. To be gone through once: each is
            read when it is its turn, and the cache has room for few.
        agents (`int`):
            How many there are, at most 255.
    """

    name: str
    start: int
    base: Tensor
    changes: Iterable[Change]
    agents: int


def combine(base: Tensor, changes: Iterable[Change | Update], coefficients: Sequence[float]) -> Sums:
    """The ingredients of a rule, in one sweep over the agents."""
    sums = Sums.none(base)
    for change, coefficient in zip(changes, coefficients, strict=True):
        change.add_to(sums, base, coefficient)
    return sums
