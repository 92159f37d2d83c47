"""What a merge of folders is going to read and write, and how long it should take, before any of it is done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from ram_trl.config import MergeConfig
from ram_trl.engine.counting import CHUNK, make_plan, reads
from ram_trl.engine.merging import merge_spans
from ram_trl.engine.workers import Workers
from ram_trl.folders.generalist import layout
from ram_trl.folders.inputs import Inputs
from ram_trl.weights import Store, entries, mergeable
from ram_trl.weights.checkpoint import total_bytes
from ram_trl.weights.memory import StateDict
from ram_trl.weights.writer import CheckpointWriter

TRIAL_CHUNKS = 4
"""Chunks per thread by which the time is estimated."""


@dataclass(frozen=True)
class Outline:
    """
    What a merge is going to do.

    Args:
        tensors, entries (`int`):
            Tensors and entries to be merged, tied ones once.
        copied (`int`):
            Tensors taken over from the base.
        inputs (`Mapping[str, int]`):
            Weight bytes of base and agents.
        passes (`int`):
            How often each is read.
        files (`Mapping[str, int]`):
            Bytes of every weight file that is going to be written.
        seconds (`float`):
            Expected time of the arithmetic, from a trial on random numbers; a disk slower than that adds to it.
        threads (`int`):
            Threads that this is for.
        warnings (`list[str]`):
            What does not keep the inputs from being merged, but should be known.
    """

    tensors: int
    entries: int
    copied: int
    inputs: Mapping[str, int]
    passes: int
    files: Mapping[str, int]
    seconds: float
    threads: int
    warnings: list[str]

    @property
    def bytes_read(self) -> int:
        """Bytes read in all; from the page cache where they fit into memory."""
        return self.passes * sum(self.inputs.values())

    @property
    def bytes_written(self) -> int:
        """Bytes of weights written."""
        return sum(self.files.values())


def make_outline(
    inputs: Inputs,
    out: Path,
    config: MergeConfig,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    threads: int | None,
) -> Outline:
    """The outline of a merge of `inputs` into `out`; nothing is written."""
    names = mergeable(inputs.base)
    number = sum(entries(inputs.base, name) for name in names)
    stores = {"base": inputs.base} | inputs.agents
    shapes, dtypes = layout(inputs.base, dtype)
    with Workers(threads) as workers:
        return Outline(
            tensors=len(names),
            entries=number,
            copied=len(inputs.base.names()) - len(names),
            inputs={
                place: total_bytes([s.shape(n) for n in names], [s.dtype(n) for n in names])
                for place, s in stores.items()
            },
            passes=reads(config) + 1,
            files=CheckpointWriter(out, shapes, dtypes, max_shard_size).sizes,
            seconds=number * _seconds_per_entry(inputs, config, workers),
            threads=workers.threads,
            warnings=inputs.warnings,
        )


def show_outline(outline: Outline, console: Console) -> None:
    """Prints it."""
    lines = [
        f"merge {len(outline.inputs) - 1} agents: {outline.tensors:,} tensors, {outline.entries:,} entries",
        f"copy {outline.copied:,} tensors that are no weights from the base" if outline.copied else "",
        *(f"read {outline.passes} times: {place}, {_size(size)}" for place, size in outline.inputs.items()),
        *(f"write {name}, {_size(size)}" for name, size in outline.files.items()),
        f"read {_size(outline.bytes_read)}, write {_size(outline.bytes_written)} in all",
        f"expected time {outline.seconds:.1f} s on {outline.threads} threads, and more if the disk is slower",
        *(f"warning: {warning}" for warning in outline.warnings),
        "dry run: nothing was written",
    ]
    for line in filter(None, lines):
        console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _size(number: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:,.1f} GB"


def _seconds_per_entry(inputs: Inputs, config: MergeConfig, workers: Workers) -> float:
    """Of counting and merging as many agents on random numbers; the second of two trials, when all is warm."""
    names = mergeable(inputs.base)
    if not names:
        return 0.0
    kind = inputs.base.dtype(names[0])
    size = CHUNK * TRIAL_CHUNKS * workers.threads
    generator = torch.Generator().manual_seed(0)
    base = StateDict({"trial": torch.randn(size, generator=generator).to(kind)})
    agents: dict[str, Store] = {
        name: StateDict({"trial": torch.randn(size, generator=generator).to(kind)}) for name in inputs.agents
    }
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        plan = make_plan(base, agents, config, workers)
        for _ in merge_spans(base, agents, plan, lambda span, values: values.to(kind), workers):
            pass
        seconds = time.perf_counter() - start
    return seconds / size
