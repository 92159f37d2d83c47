"""
Checkpoints of any size, made fast and with flat memory: a Qwen3 in bfloat16 and agents that differ from it.

Weights are cut from one pool of random numbers, so nothing as large as a model is ever drawn or held.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ram_trl.weights import Span, cut
from ram_trl.weights.checkpoint import open_checkpoint, total_bytes
from ram_trl.weights.writer import CheckpointWriter
from tests.models import tokenizer

LAYOUTS = {1: (1024, 23), 2: (1536, 21), 4: (2048, 25)}
"""Hidden size and layers by number of parameters, in multiples of 0.41 billion."""

CHANGED = 0.205
"""Share of entries in which an agent differs: a little more than `top: 0.2` keeps, so that it has a choice to make."""

CHUNK = 1 << 20
POOL = 1 << 22


def layout(scale: int, shrink: int = 1) -> Qwen3Config:
    """A Qwen3 of `scale` · 0.41 billion parameters; all widths are divided by `shrink`."""
    hidden, layers = LAYOUTS[scale]
    return Qwen3Config(
        vocab_size=49152 // shrink,
        hidden_size=hidden // shrink,
        intermediate_size=3 * hidden // shrink,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 // shrink,
        num_key_value_heads=hidden // 128 // shrink,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )


def shapes_of(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Shapes of what `save_pretrained` stores, by name: the tied output embedding is left out."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def size_of(config: Qwen3Config) -> int:
    """Bytes of one checkpoint."""
    shapes = shapes_of(config)
    return total_bytes(shapes.values(), [torch.bfloat16] * len(shapes))


def make_base(folder: Path, config: Qwen3Config) -> int:
    """Writes a checkpoint of random weights and returns how many there are."""
    shapes = shapes_of(config)
    weights = torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * 0.02
    # Far enough from zero that an agent's steps never cross it.
    pool = torch.where(weights.abs() < 1e-6, 1e-6, weights).to(torch.bfloat16)
    pick = random.Random(0)
    return _write(folder, config, shapes, lambda span: _piece(pool, len(span), pick))


def make_agent(folder: Path, base: Path, config: Qwen3Config, seed: int) -> None:
    """Writes an agent of the base in `base`: a random `CHANGED` of its entries are one to three bfloat16 steps off."""
    store = open_checkpoint(base, "base").store
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (POOL,), generator=generator) * (
        2 * torch.randint(0, 2, (POOL,), generator=generator) - 1
    )
    steps = (steps * (torch.rand(POOL, generator=generator) < CHANGED)).to(torch.int16)
    pick = random.Random(seed)

    def moved(span: Span) -> Tensor:
        pattern = store.read(span.name, span.start, span.stop).view(torch.int16)
        return (pattern + _piece(steps, len(span), pick)).view(torch.bfloat16)

    _write(folder, config, {name: store.shape(name) for name in store.names()}, moved)


def _piece(pool: Tensor, length: int, pick: random.Random) -> Tensor:
    start = pick.randrange(POOL - CHUNK)
    return pool[start : start + length]


def _write(
    folder: Path, config: Qwen3Config, shapes: dict[str, tuple[int, ...]], values: Callable[[Span], Tensor]
) -> int:
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    writer = CheckpointWriter(folder, shapes, dict.fromkeys(shapes, torch.bfloat16), "5GB")
    written = 0
    try:
        for name in sorted(shapes):
            for span in cut([Span(name, 0, torch.Size(shapes[name]).numel())], CHUNK):
                writer.write(name, span.start, values(span))
                written += len(span)
        writer.close()
    finally:
        writer.abandon()
    return written
