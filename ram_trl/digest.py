"""A fingerprint of weights that adds up over shards, so that no rank needs to see them whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ram_trl.weights import Span


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


INDEX_KEY, MIX_KEY = _signed(0x9E3779B97F4A7C15), _signed(0xD6E8FEB86659FD93)


class Digest:
    """
    Sums a 64-bit hash of (flat index, fp32 bits) over the entries of each tensor; sums wrap around.

    Args:
        names (`Iterable[str]`):
            The tensors.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._sums = dict.fromkeys(sorted(names), 0)

    def add(self, span: Span, values: Tensor) -> None:
        """Adds the float32 entries of a span; every entry of a tensor is to be added once, in any order."""
        bits = values.contiguous().view(torch.int32).to(torch.int64)
        index = torch.arange(span.start, span.stop, device=values.device)
        mixed = bits + index * INDEX_KEY
        mixed = (mixed ^ (mixed >> 32)) * MIX_KEY
        mixed = (mixed ^ (mixed >> 29)) * INDEX_KEY
        self._sums[span.name] = (self._sums[span.name] + int(mixed.sum())) % 2**64

    def sums(self, shares: Iterable[Mapping[str, int]] = ()) -> dict[str, str]:
        """The fingerprint of every tensor, with those of other ranks' shares added."""
        totals = dict(self._sums)
        for share in shares:
            totals = {name: (total + share[name]) % 2**64 for name, total in totals.items()}
        return {name: f"{total:016x}" for name, total in totals.items()}

    def share(self) -> dict[str, int]:
        """This rank's part, for `sums` of another."""
        return dict(self._sums)
