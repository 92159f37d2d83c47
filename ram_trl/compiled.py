"""
The inner loops of counting and merging on the CPU, compiled by numba: one sweep over a chunk in the cache each.

Plain arithmetic in float32, in the order it is written in: nothing is contracted (no FMA) or reordered, so that the
bits are those of torch on a GPU. Sums of squares are the exception: they are for reports alone. Machine code is kept
beside this file, or in the user's cache, and made anew when the file or the CPU changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

logger = logging.getLogger(__name__)


class _Kept(FunctionCache):
    """Machine code kept on disk, which is a matter of speed alone: what cannot be read or written is made anew."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a file cut short by a crash or a full disk fails in any way pickles can
            logger.warning("compiled code in %s cannot be read (%r) and is made again", self.cache_path, error)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            logger.warning("compiled code cannot be kept in %s (%r)", self.cache_path, error)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Machine code for a function, made when it is first called; it runs without the interpreter's lock."""
    made = njit(**{"nogil": True, "error_model": "numpy", **options})(function)
    with suppress(RuntimeError):  # if there is nowhere to keep it
        made._cache = _Kept(function)  # as enable_caching() of numba does
    return made


@intrinsic
def _bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@compiled
def thin(tau, threshold, thinned, mask):  # type: ignore[no-untyped-def]
    """Where |τ| > threshold, and τ there, +0 elsewhere."""
    for i in range(tau.shape[0]):
        active = abs(tau[i]) > threshold
        mask[i] = active
        thinned[i] = tau[i] if active else np.float32(0)


@compiled
def largest_bits(tau):  # type: ignore[no-untyped-def]
    """The bits of the largest |τ|: they sort like the numbers, with Inf and then NaN above all."""
    peak = np.int32(0)
    for i in range(tau.shape[0]):
        peak = max(peak, _bits(tau[i]) & np.int32(0x7FFFFFFF))
    return peak


def _squares(tau, mask):  # type: ignore[no-untyped-def]
    """Sum of τ², and of those that are active, in float64."""
    every, active = 0.0, 0.0
    for i in range(tau.shape[0]):
        square = np.float64(tau[i]) * np.float64(tau[i])
        every += square
        active += square if mask[i] else 0.0
    return every, active


squares = compiled(_squares, fastmath={"reassoc"})


@compiled
def survey(tau, thinned, mask, masks):  # type: ignore[no-untyped-def]
    """The bits of the largest |τ|, and sums of squares; fills rows with the active, the positive and the negative."""
    for i in range(tau.shape[0]):
        masks[0, i] = mask[i]
        masks[1, i] = thinned[i] > 0
        masks[2, i] = thinned[i] < 0
    every, active = squares(tau, mask)
    return largest_bits(tau), every, active


@compiled
def gather(base, tau, active, theta, total, count, single, coefficient):  # type: ignore[no-untyped-def]
    """Adds an agent to the sum and the count, and puts what it alone would make of an entry where it is active."""
    for i in range(base.shape[0]):
        total[i] += tau[i]
        count[i] += active[i]
        alone = theta[i] if coefficient == np.float32(1) else base[i] + tau[i] * coefficient
        single[i] = alone if active[i] else single[i]


@compiled
def mean_where_shared(base, total, count, single):  # type: ignore[no-untyped-def]
    """base + total / count where several agents are active, `single` elsewhere; into `single`."""
    for i in range(base.shape[0]):
        mean = total[i] / np.float32(count[i]) + base[i]
        single[i] = mean if count[i] >= 2 else single[i]


@compiled
def split(tau, start, stop, within):  # type: ignore[no-untyped-def]
    """How many |τ| have bits of `stop` or above; and the bits from `start` to there, less `start`, into `within`."""
    above, found = 0, 0
    for i in range(tau.shape[0]):
        pattern = _bits(tau[i]) & np.int32(0x7FFFFFFF)
        above += pattern >= stop
        within[found] = pattern - start
        found += (pattern >= start) & (pattern < stop)
    return above, found


@compiled
def tally_upper(tau, counts):  # type: ignore[no-untyped-def]
    """Adds 1 to the count of the upper 16 bits of every |τ|."""
    for i in range(tau.shape[0]):
        counts[(_bits(tau[i]) & np.int32(0x7FFFFFFF)) >> 16] += 1


@compiled
def tally(counts, offsets):  # type: ignore[no-untyped-def]
    """Adds 1 to the count of every offset."""
    for i in range(offsets.shape[0]):
        counts[offsets[i]] += 1
