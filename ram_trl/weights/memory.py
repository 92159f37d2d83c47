"""State dicts in memory as a store."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ram_trl.weights import OUTPUT_EMBEDDINGS


class StateDict:
    """
    A state dict as a store; nothing is copied.

    Args:
        tensors (`Mapping[str, Tensor]`):
            The state dict. Entries that share memory are tied: they are one tensor, under the input embedding's name
            if there is one, else under the name that sorts first.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.aliases: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        seen: dict[tuple[object, ...], str] = {}
        for name in sorted(tensors, key=lambda name: (name.endswith(OUTPUT_EMBEDDINGS), name)):
            tensor = tensors[name].detach()
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            first = seen.setdefault(memory, name) if tensor.numel() else name
            if first != name:
                self.aliases[name] = first
            else:
                self._tensors[name] = tensor

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name].reshape(-1)[start:stop]
