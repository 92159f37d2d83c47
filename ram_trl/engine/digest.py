"""A fingerprint of weights that adds up over shards, so that no rank needs to see them whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ram_trl.engine.elementwise import fingerprint
from ram_trl.weights import Span


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
        self._sums[span.name] = (self._sums[span.name] + fingerprint(values, span.start)) % 2**64

    def sums(self, shares: Iterable[Mapping[str, int]] = ()) -> dict[str, str]:
        """The fingerprint of every tensor, with those of other ranks' shares added."""
        totals = dict(self._sums)
        for share in shares:
            totals = {name: (total + share[name]) % 2**64 for name, total in totals.items()}
        return {name: f"{total:016x}" for name, total in totals.items()}

    def share(self) -> dict[str, int]:
        """This rank's part, for `sums` of another."""
        return dict(self._sums)
