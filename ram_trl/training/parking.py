"""
Memory of an agent that waits for its turn: moved off its device, and back, at the level of storages.

Tensor objects never change, so every view, hook, flat buffer and optimizer state stays valid; only the bytes behind
them are away. A parked tensor must not be touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

OPENED = ("torch.", "deepspeed.", "accelerate.", "transformers.", "trl.", "peft.")
"""Packages whose objects are looked into."""

SCRATCH = ("IPGBucket", "IPGBucketZ3")
"""DeepSpeed's buckets for gradients on their way: empty between two steps, and 2 GB each unless configured."""


class Parked:
    """
    What was moved away; `back()` puts it where it was.

    Args:
        *roots (`Any`):
            Models, engines, optimizers: all tensors reachable from them are moved.
        keep (`Iterable[Tensor]`, *optional*):
            Tensors to leave where they are.
    """

    def __init__(self, *roots: Any, keep: Iterable[Tensor] = ()) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        kept_here = {tensor.untyped_storage()._cdata for tensor in keep}
        for storage, scratch in list(_storages(roots)):
            if storage._cdata in kept_here:
                continue
            size = storage.nbytes()
            kept = None
            if not scratch:
                kept = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                kept.copy_(_bytes(storage))
            self._held.append((storage, size, kept))
        # Freed only once everything is copied.
        for storage, _, _ in self._held:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes that are free on the device meanwhile."""
        return sum(size for _, size, _ in self._held)

    def back(self) -> None:
        """Puts every byte back."""
        for storage, size, kept in self._held:
            storage.resize_(size)
            if kept is not None:
                _bytes(storage).copy_(kept)
        self._held = []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(roots: tuple[Any, ...]) -> Iterator[tuple[torch.UntypedStorage, bool]]:
    """Every storage once, with whether it is scratch; in containers, attributes, optimizer states and gradients."""
    scratch: set[int] = set()
    found: dict[int, torch.UntypedStorage] = {}
    seen: dict[int, Any] = {}
    waiting = deque((root, False) for root in roots)
    while waiting:
        held, is_scratch = waiting.popleft()
        if held is None or isinstance(held, str | bytes | int | float | type) or id(held) in seen:
            continue
        seen[id(held)] = held
        if isinstance(held, Tensor):
            waiting += [(held.grad, False), *((value, False) for value in vars(held).values())]
            if type(held).__name__ == "DTensor":
                waiting.append((held._local_tensor, is_scratch))  # type: ignore[attr-defined]
                continue
            if held.device.type == "meta":
                continue
            storage = held.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found[storage._cdata] = storage
                scratch |= {storage._cdata} if is_scratch else set()
        elif isinstance(held, dict):
            waiting += [(value, is_scratch) for pair in held.items() for value in pair]
        elif isinstance(held, list | tuple | set | frozenset | deque):
            waiting += [(value, is_scratch) for value in held]
        elif hasattr(held, "__dict__") and f"{type(held).__module__}.".startswith(OPENED):
            bucket = type(held).__name__ in SCRATCH
            waiting += [(value, bucket and name == "buffer") for name, value in vars(held).items()]
    yield from ((storage, key in scratch) for key, storage in found.items())
