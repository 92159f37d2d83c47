"""
A model's folder, written as its base is stored: the same names, tied tensors, buffers and side files.

Merged entries come in as float32, in any order and from any thread, and are stored in the base's dtypes or in one
chosen for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ram_trl.engine.merging import stored
from ram_trl.files import errors_name
from ram_trl.folders.unfinished import Unfinished
from ram_trl.problems import MergeInputError, Problem
from ram_trl.weights import MERGEABLE, Span, entries, mergeable
from ram_trl.weights.checkpoint import CHECKSUMS_FILE, Checkpoint, open_checkpoint, side_files
from ram_trl.weights.writer import CheckpointWriter, FinishedFile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights can be stored in, by name."""

DTYPE_KEYS = ("dtype", "torch_dtype")


class GeneralistWriter:
    """
    Writes a model; a context manager.

    Args:
        base (`Checkpoint`):
            What the model is like.
        folder (`Path`):
            An existing folder.
        max_shard_size (`int` or `str`):
            Largest size of one weight file.
        dtype (`torch.dtype`, *optional*):
            What weights are stored in; by default each as the base's.
        kept (`Collection[str]`, *optional*):
            Weights that are taken over from the base, as its buffers are.
        unfinished (`Unfinished`, *optional*):
            Keeps account of finished files.
    """

    def __init__(
        self,
        base: Checkpoint,
        folder: Path,
        max_shard_size: int | str,
        dtype: torch.dtype | None = None,
        kept: Collection[str] = (),
        unfinished: Unfinished | None = None,
    ) -> None:
        self._base = base
        self._folder = folder
        self._dtype = dtype
        self._shapes, self._dtypes = layout(base, dtype)
        self._merged = [name for name in mergeable(base) if name not in kept]
        # A tensor may be stored under several names; its entries come in once.
        self._stored_as: dict[str, list[str]] = {name: [name] for name in base.names()}
        for alias in base.stored_aliases:
            self._stored_as[base.aliases[alias]].append(alias)
        self.differs = unfinished is not None and unfinished.differs
        """Whether anything written so far differs from the base."""
        self._files = CheckpointWriter(
            folder,
            self._shapes,
            self._dtypes,
            max_shard_size,
            unfinished.finished if unfinished else (),
            (lambda file: unfinished.keep(file, self.differs)) if unfinished else (lambda file: None),
        )

    def __enter__(self) -> GeneralistWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.abandon()

    @property
    def spans(self) -> list[Span]:
        """What is to be merged and written: all weights, but for those in finished files."""
        wanted = set(self._files.wanted)
        return [Span(n, 0, entries(self._base, n)) for n in self._merged if wanted.intersection(self._stored_as[n])]

    def write(self, span: Span, values: Tensor) -> int:
        """
        Stores the float32 entries of a span; from any thread.

        Returns:
            `int`: how many there were.

        Raises:
            `MergeInputError`: if an entry overflows the dtype it is stored in.
            `OSError`: naming the file, if the disk is full or fails.
        """
        result = stored(values, self._dtypes[span.name], span)
        if not self.differs and not _same_bits(result, self._before(span.name, span.start, span.stop)):
            self.differs = True
        self._write(span.name, span.start, result)
        return len(span)

    def finish(self) -> list[FinishedFile]:
        """Writes what is taken over from the base, weights and side files, and waits until all weights are on disk."""
        for name in sorted(set(self._base.names()) - set(self._merged)):
            self._write(name, 0, self._before(name, 0, entries(self._base, name)))
        files = self._files.close()
        for source in side_files(self._base.folder):
            target = self._folder / source.relative_to(self._base.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
        if self._dtype is not None:
            _say_dtype(self._folder / "config.json", self._dtype)
        return files

    def check(self) -> None:
        """
        Opens the folder as a reader would and compares it with what was to be written.

        Raises:
            `MergeInputError`: naming every tensor that is not there as it should be.
        """
        opened = open_checkpoint(self._folder, "output")
        store = opened.store
        problems = list(opened.problems)
        for name, shape in self._shapes.items():
            there = name in store.names() or name in store.stored_aliases
            held = (store.shape(name), store.dtype(name)) if there else None
            if held != (shape, self._dtypes[name]):
                what = f"'{name}' is {_told(held)} in what was written, not {_told((shape, self._dtypes[name]))}"
                problems.append(Problem("output", what, name, "not as written"))
        extra = (set(store.names()) | store.stored_aliases) - self._shapes.keys()
        problems += [Problem("output", f"'{name}' was written but is not in the base", name) for name in sorted(extra)]
        if problems:
            raise MergeInputError(problems)

    def _before(self, name: str, start: int, stop: int) -> Tensor:
        return self._base.read(name, start, stop).to(self._dtypes[name])

    def _write(self, name: str, start: int, values: Tensor) -> None:
        for stored_as in self._stored_as[name]:
            self._files.write(stored_as, start, values)


def layout(base: Checkpoint, dtype: torch.dtype | None) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Shapes and dtypes of what is written: all that the base's files hold, tied tensors as often as there."""
    source = {name: name for name in base.names()} | {alias: base.aliases[alias] for alias in base.stored_aliases}
    shapes = {name: base.shape(stored_as) for name, stored_as in source.items()}
    held = {name: base.dtype(stored_as) for name, stored_as in source.items()}
    return shapes, {name: dtype if dtype is not None and kind in MERGEABLE else kind for name, kind in held.items()}


def write_checksums(folder: Path, weights: Iterable[FinishedFile]) -> None:
    """Writes SHA256SUMS, which `sha256sum --check SHA256SUMS` reads; weight files have been summed."""
    sums = {file.name: file.sha256 for file in weights}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in sums:
            sums[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    with errors_name(folder / CHECKSUMS_FILE):
        lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
        (folder / CHECKSUMS_FILE).write_bytes(os.fsencode(lines))


def _say_dtype(path: Path, dtype: torch.dtype) -> None:
    """Makes config.json say what the weights are stored in."""
    config = json.loads(path.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    if not _replace_dtype(config, name):
        config["dtype"] = name
    with errors_name(path):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _replace_dtype(config: dict[str, Any], name: str) -> bool:
    """Replaces it here and in the parts of a composite config; whether it is said here."""
    for part in config.values():
        if isinstance(part, dict):
            _replace_dtype(part, name)
    said = [key for key in DTYPE_KEYS if isinstance(config.get(key), str) and config[key] in DTYPES]
    config |= dict.fromkeys(said, name)
    return bool(said)


def _same_bits(values: Tensor, others: Tensor) -> bool:
    return torch.equal(values.view(torch.uint8), others.to(values.device).view(torch.uint8))


def _told(held: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "missing" if held is None else f"{str(held[1]).removeprefix('torch.')} of shape {list(held[0])}"
