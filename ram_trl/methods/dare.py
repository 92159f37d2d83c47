"""DARE: drop task-vector entries at random, rescale the rest, then task arithmetic (arXiv 2311.03099)."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor

from ram_trl.engine.elementwise import bits, divided, masked
from ram_trl.methods.change import Update
from ram_trl.methods.chunk import Chunk
from ram_trl.methods.task_arithmetic import scaled_sum, task_arithmetic

WORD = 0xFFFFFFFF


def dare(chunk: Chunk, scale: float, drop: float, seed: int) -> Tensor:
    """
    Task arithmetic on τ · keep / (1 − drop).

    Args:
        chunk (`Chunk`):
            The entries to merge.
        scale (`float`):
            Factor on the sum.
        drop (`float`):
            Probability that an active entry is dropped, in [0, 1).
        seed (`int`):
            Seed of the mask.

    Returns:
        `Tensor`: the merged entries, float32.
    """
    if drop == 0:
        return task_arithmetic(chunk, scale)
    thinned = (_thin(chunk, change.update(chunk.base), drop, seed) for change in chunk.changes)
    return scaled_sum(chunk.base, thinned, chunk.agents, scale)


def _thin(chunk: Chunk, update: Update, drop: float, seed: int) -> Update:
    kept = update.active & ~dropped(update.agent, chunk.name, chunk.start, chunk.base, drop, seed)
    tau = divided(masked(update.tau, bits(kept)), 1 - drop)
    return dataclasses.replace(update, tau=tau, active=kept, theta=chunk.base + tau)


def dropped(agent: str, name: str, start: int, like: Tensor, drop: float, seed: int) -> Tensor:
    """
    Which entries `start … start + len(like)` of tensor `name` are dropped, bool.

    The mask is a hash of (seed, agent, tensor, flat index), not a random stream: any shard or chunk computes its own
    part of the same mask. The hash is the 32-bit `lowbias32` finalizer, once per half of the index.
    """
    key = hashlib.sha256(f"{seed}\0{agent}\0{name}".encode()).digest()
    low_key, high_key = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")
    index = torch.arange(start, start + like.numel(), device=like.device)
    hashed = _mix((index & WORD) ^ low_key)
    hashed = _mix(hashed ^ (index >> 32) ^ high_key)
    return hashed < round(drop * 2**32)


def _mix(words: Tensor) -> Tensor:
    # int64 products wrap around, and their low 32 bits are still exact.
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & WORD
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & WORD
    return words ^ (words >> 16)
