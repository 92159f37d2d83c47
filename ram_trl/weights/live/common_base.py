"""
One base in memory for all agents with adapters that take turns in a process.

Every agent has its own model, with its own hooks and adapter; what is the same is the memory behind the parameters
that are not trained, or behind this rank's shards of them. With `svd` nobody writes there. With `fold` every agent has
a base of its own, the round it loaded with what rounds left of its update, and writes it there when its turn comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from ram_trl.weights.live.lora import LoraWeights


class CommonBase:
    """
    The memory of a base that several agents compute with, one at a time.

    All methods are called by the agent whose turn it is, and are collective: every rank of the job does the same.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, torch.Size, torch.dtype, torch.device], Tensor] = {}
        self._in_place: weakref.ref[LoraWeights] | None = None

    def join(self, live: LoraWeights) -> int:
        """
        Makes an agent compute with this memory in place of its own.

        Returns:
            `int`: bytes of its own that became free.
        """
        freed = 0
        for name, own in live.frozen_tensors().items():
            place = self._places.setdefault((name, own.shape, own.dtype, own.device), own.data)
            # With `svd` it has to hold the agent's very bits, as they are not written again.
            if place.data_ptr() != own.data_ptr() and (live.folds or torch.equal(place, own.data)):
                freed += own.nbytes
                own.data = place
        self._in_place = None
        self.take(live)
        return freed

    def take(self, live: LoraWeights) -> None:
        """The agent's turn begins: what another agent left there gives way to its own."""
        last = self._in_place() if self._in_place is not None else None
        if live.folds and last is not live:
            live.put_base_back()
        self._in_place = weakref.ref(live)

    def tensors(self) -> Iterable[Tensor]:
        """What has to stay on the device while agents wait."""
        return self._places.values()
