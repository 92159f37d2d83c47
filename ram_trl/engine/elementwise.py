"""
Sweeps, comparisons and selections over flat tensors, made for chunks that are worked on by one thread each.

On the CPU sweeps are compiled (`compiled.py`), and a choice between two numbers is made on their bits, with masks that
have all bits set or none: plain integer arithmetic, which is vectorized everywhere, and exact. On a GPU it is torch.
All ways give the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ram_trl.engine import compiled


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


INDEX_KEY, MIX_KEY = _signed(0x9E3779B97F4A7C15), _signed(0xD6E8FEB86659FD93)


def on_cpu(tensor: Tensor) -> bool:
    """Whether numpy and compiled code can work on it."""
    return tensor.device.type == "cpu"


def thin(tau: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Where |τ| > threshold, bool; and τ there, +0 elsewhere. All in float32."""
    if not on_cpu(tau):
        thinned = torch.hardshrink(tau, threshold)
        return thinned != 0, thinned
    thinned, mask = torch.empty_like(tau), torch.empty_like(tau, dtype=torch.bool)
    compiled.thin(tau.numpy(), np.float32(threshold), thinned.numpy(), mask.numpy())
    return mask, thinned


def differ(left: Tensor, right: Tensor) -> Tensor:
    """Where two tensors of a dtype that numpy knows are not equal; bool."""
    if not on_cpu(left):
        return left != right
    return torch.from_numpy(left.numpy() != right.numpy())


def bits(where: Tensor) -> Tensor:
    """A bool tensor as int32 with all bits set where it is true, and none elsewhere."""
    return where.to(torch.int32).neg_()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` (float32) where the mask's bits are set, +0 elsewhere."""
    return (values.view(torch.int32) & mask).view(torch.float32)


def at_least(count: Tensor, number: int) -> Tensor:
    """A mask, as bits, of where a count (uint8) reaches a number."""
    if not on_cpu(count):
        return bits(count >= number)
    return bits(torch.from_numpy(count.numpy() >= number))


def select(mask: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """`values` where the mask's bits are set, `others` elsewhere; float32, to the bit."""
    other_bits = others.view(torch.int32)
    return ((values.view(torch.int32) ^ other_bits).bitwise_and_(mask).bitwise_xor_(other_bits)).view(torch.float32)


def largest(values: Tensor) -> float:
    """The largest |value|, or NaN if there is one; 0 for no values."""
    if not values.numel():
        return 0.0
    if not on_cpu(values):
        return float(values.abs().max())
    held = values.numpy()
    return float(np.maximum(held.max(), -held.min()))


def divided(values: Tensor, by: float) -> Tensor:
    """values / by in float32, in place; on CUDA torch would multiply by the reciprocal of a plain number."""
    return values.div_(torch.tensor(by, dtype=torch.float32, device=values.device))


def how_many(where: Tensor) -> int:
    """Number of true entries of a bool tensor."""
    if not on_cpu(where):
        return int(torch.count_nonzero(where))
    return int(np.count_nonzero(where.numpy()))


def carry(theta: Tensor, before: Tensor, state: Tensor, consumed: Tensor) -> Tensor:
    """
    S_k + (θ − S_b − τ̂), all float32, with τ̂ 0 where nothing was consumed.

    Where the state did not change and nothing was consumed it is θ, and where nothing is left S_k, to the bit.
    """
    if not on_cpu(theta):
        left = (theta - before) - consumed
        untouched = (state.view(torch.int32) == before.view(torch.int32)) & (consumed == 0)
        return torch.where(untouched, theta, torch.where(left == 0, state, state + left))
    result = torch.empty_like(theta)
    compiled.carry(theta.numpy(), before.numpy(), state.numpy(), consumed.numpy(), result.numpy())
    return result


def fingerprint(values: Tensor, start: int) -> int:
    """Sum of a 64-bit hash of (flat index, bits) over float32 entries, the first at `start`, modulo 2⁶⁴."""
    if not on_cpu(values):
        index = torch.arange(start, start + len(values), device=values.device)
        mixed = values.contiguous().view(torch.int32).to(torch.int64) + index * INDEX_KEY
        mixed = (mixed ^ (mixed >> 32)) * MIX_KEY
        return int(((mixed ^ (mixed >> 29)) * INDEX_KEY).sum()) % 2**64
    keys = np.int64(INDEX_KEY), np.int64(MIX_KEY)
    return int(compiled.fingerprint(values.contiguous().numpy(), np.int64(start), *keys)) % 2**64


def mean_where_shared(base: Tensor, total: Tensor, count: Tensor, single: Tensor) -> Tensor:
    """base + total / count where `count` is 2 or more, `single` elsewhere."""
    if not on_cpu(base):
        return torch.where(count >= 2, total / count + base, single)
    compiled.mean_where_shared(*(tensor.numpy() for tensor in (base, total, count, single)))
    return single
