"""
Where numbers come from: one small interface, several stores.

A store hands out any flat range of any tensor without holding the rest, so that one engine merges state dicts,
checkpoints on disk and the shards of a model in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

MERGEABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are merged. Whole-number, bool and float64 tensors (buffers) are taken over from the base."""


INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight")
"""How the names of embeddings end; tied ones are stored under the input's name."""


class Store(Protocol):
    """The tensors of one model, readable by flat range (row-major)."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tied tensors and the name each is stored under; aliases are not in `names()`."""

    def names(self) -> list[str]:
        """Sorted names of all tensors, tied ones once."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype the tensor is stored in."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Entries `start … stop` of the flattened tensor, 1-D, in the stored dtype; not to be written to."""


@dataclass(frozen=True)
class Span:
    """Entries `start … stop` of the flattened tensor `name`."""

    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, store: Store) -> Tensor:
        """The entries in float32, 1-D."""
        return store.read(self.name, self.start, self.stop).to(torch.float32)


def entries(store: Store, name: str) -> int:
    """Number of entries of a tensor."""
    return prod(store.shape(name))


def mergeable(store: Store) -> list[str]:
    """Sorted names of the tensors that are merged."""
    return [name for name in store.names() if store.dtype(name) in MERGEABLE]


def whole(store: Store) -> list[Span]:
    """One span per mergeable tensor: the whole model."""
    return [Span(name, 0, entries(store, name)) for name in mergeable(store)]


def cut(spans: Iterable[Span], size: int) -> Iterator[Span]:
    """
    The spans in pieces of at most `size` entries, in order.

    Raises:
        `ValueError`: if `size` is below 1.
    """
    if size < 1:
        raise ValueError(f"the chunk size is {size}; give at least 1 entry")
    for span in spans:
        for start in range(span.start, span.stop, size):
            yield Span(span.name, start, min(start + size, span.stop))
