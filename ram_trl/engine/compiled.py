"""
The inner loops of counting and merging on the CPU, compiled by numba: one sweep over memory each.

Agents' weights come as they are stored, bfloat16 as its 16 bits; all else is float32. Where `mask` is None, an entry
is active where |τ| > threshold. Plain arithmetic in float32, in the order it is written in: nothing is contracted (no
FMA) or reordered, so that the bits are those of torch on a GPU. Sums of squares are the exception: they are for
reports alone. Machine code is kept beside this file, or in the user's cache, and made anew when the file or the CPU
changes.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload

logger = logging.getLogger(__name__)


class _Kept(FunctionCache):
    """
    Machine code kept on disk, which is a matter of speed alone: what cannot be read or written is made anew.

    One process writes at a time. numba numbers its files from what the index holds, and of two that start together the
    index of one could name the code of the other.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # a file cut short by a crash or a full disk fails in any way pickles can
            logger.warning("compiled code in %s cannot be read (%r) and is made again", self.cache_path, error)
            with suppress(OSError):
                self.flush()
            return None
        return found if found is not None and tuple(found.signature.args) == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            Path(self.cache_path).mkdir(parents=True, exist_ok=True)
            with open(Path(self.cache_path) / "ram_trl.lock", "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
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


@intrinsic
def _from_bits(typing_context: Any, value: Any) -> Any:
    """The float32 that has the bits of a uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _wide(value):  # type: ignore[no-untyped-def]
    """A stored weight in float32."""


@overload(_wide, inline="always")
def _overload_wide(value):  # type: ignore[no-untyped-def]
    if value == types.uint16:
        return lambda value: _from_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


@compiled
def thin(tau, threshold, thinned, mask):  # type: ignore[no-untyped-def]
    """Where |τ| > threshold, and τ there, +0 elsewhere."""
    for i in range(tau.shape[0]):
        active = abs(tau[i]) > threshold
        mask[i] = active
        thinned[i] = tau[i] if active else np.float32(0)


# A loop that does one thing is vectorized; in blocks, what it leaves is still in the cache for the next.
BLOCK = 2048


@compiled
def _subtract(theta, reference, tau):  # type: ignore[no-untyped-def]
    for i in range(tau.shape[0]):
        tau[i] = _wide(theta[i]) - reference[i]


@compiled
def _directions(tau, threshold, mask, active, up, down):  # type: ignore[no-untyped-def]
    for i in range(tau.shape[0]):
        here = abs(tau[i]) > threshold if mask is None else mask[i]
        active[i] = here
        up[i] = here & (tau[i] > 0)
        down[i] = here & (tau[i] < 0)


@compiled
def _largest_bits(tau):  # type: ignore[no-untyped-def]
    """They sort like the numbers, with Inf and then NaN above all."""
    peak = np.int32(0)
    for i in range(tau.shape[0]):
        peak = max(peak, _bits(tau[i]) & np.int32(0x7FFFFFFF))
    return peak


def _sum_squares(tau, active):  # type: ignore[no-untyped-def]
    every, those = 0.0, 0.0
    for i in range(tau.shape[0]):
        square = np.float64(tau[i]) * np.float64(tau[i])
        every += square
        those += square if active[i] else 0.0
    return every, those


_squares = compiled(_sum_squares, fastmath={"reassoc"})


@compiled
def survey(theta, reference, threshold, mask, masks):  # type: ignore[no-untyped-def]
    """
    The bits of the largest |τ|, the sum of τ², and that of active entries; and into the rows of `masks`, where entries
    are active, active with τ > 0, active with τ < 0.
    """
    peak, every, those = np.int32(0), 0.0, 0.0
    tau = np.empty(BLOCK, np.float32)
    for start in range(0, theta.shape[0], BLOCK):
        stop = min(start + BLOCK, theta.shape[0])
        here = tau[: stop - start]
        _subtract(theta[start:stop], reference[start:stop], here)
        active, up, down = masks[0, start:stop], masks[1, start:stop], masks[2, start:stop]
        _directions(here, threshold, None if mask is None else mask[start:stop], active, up, down)
        peak = max(peak, _largest_bits(here))
        more, more_active = _squares(here, active)
        every += more
        those += more_active
    return peak, every, those


@compiled
def gather(theta, reference, base, threshold, mask, weight, coefficient, as_it_is, total, count, single):  # type: ignore[no-untyped-def]
    """
    Takes in an agent where it is active: weight · τ into `total`, 1 into `count`, and into `single` what it alone
    would make of the entry: θ `as_it_is`, or base + coefficient · weight · τ.
    """
    for i in range(base.shape[0]):
        own = _wide(theta[i])
        tau = own - reference[i]
        active = abs(tau) > threshold if mask is None else mask[i]
        tau = (tau if active else np.float32(0)) * weight
        total[i] += tau
        count[i] += active
        alone = own if as_it_is else base[i] + tau * coefficient
        single[i] = alone if active else single[i]


@compiled
def mean_where_shared(base, total, count, single):  # type: ignore[no-untyped-def]
    """base + total / count where several agents are active, `single` elsewhere; into `single`."""
    for i in range(base.shape[0]):
        mean = total[i] / np.float32(count[i]) + base[i]
        single[i] = mean if count[i] >= 2 else single[i]


@compiled
def split(theta, reference, start, stop, within):  # type: ignore[no-untyped-def]
    """How many |τ| have bits of `stop` or above; and the bits from `start` to there, less `start`, into `within`."""
    above, found = 0, 0
    for i in range(theta.shape[0]):
        pattern = _bits(_wide(theta[i]) - reference[i]) & np.int32(0x7FFFFFFF)
        above += pattern >= stop
        within[found] = pattern - start
        found += (pattern >= start) & (pattern < stop)
    return above, found


@compiled
def tally_upper(theta, reference, counts):  # type: ignore[no-untyped-def]
    """Adds 1 to the count of the upper 16 bits of every |τ|."""
    for i in range(theta.shape[0]):
        counts[(_bits(_wide(theta[i]) - reference[i]) & np.int32(0x7FFFFFFF)) >> 16] += 1


@compiled
def tally(counts, offsets):  # type: ignore[no-untyped-def]
    """Adds 1 to the count of every offset."""
    for i in range(offsets.shape[0]):
        counts[offsets[i]] += 1


@compiled
def carry(theta, before, state, consumed, result):  # type: ignore[no-untyped-def]
    """S_k + (θ − S_b − τ̂); S_k where nothing is left, θ where neither state nor θ was changed by anyone else."""
    for i in range(theta.shape[0]):
        left = (theta[i] - before[i]) - consumed[i]
        moved = state[i] if left == 0 else state[i] + left
        untouched = (_bits(state[i]) == _bits(before[i])) & (consumed[i] == 0)
        result[i] = theta[i] if untouched else moved


@compiled
def fingerprint(values, start, index_key, mix_key):  # type: ignore[no-untyped-def]
    """Sum of a 64-bit hash of every flat index and the bits there; everything wraps around."""
    total = np.int64(0)
    for i in range(values.shape[0]):
        mixed = np.int64(_bits(values[i])) + (start + np.int64(i)) * index_key
        mixed = (mixed ^ (mixed >> np.int64(32))) * mix_key
        total += (mixed ^ (mixed >> np.int64(29))) * index_key
    return total
