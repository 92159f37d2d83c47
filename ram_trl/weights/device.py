"""A store whose chunks are worked on by a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ram_trl.weights import Store


class OnDevice:
    """
    A store that hands out its entries on a GPU.

    Chunks go through pinned buffers, which torch keeps for reuse, so that copies run beside the arithmetic.

    Args:
        store (`Store`):
            Holds the entries in memory of the CPU.
        device (`str`):
            Where to, such as `"cuda"`.
    """

    def __init__(self, store: Store, device: str) -> None:
        self._store = store
        self._device = device

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._store.aliases

    def names(self) -> list[str]:
        return self._store.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._store.dtype(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._store.read(name, start, stop).pin_memory().to(self._device, non_blocking=True)
