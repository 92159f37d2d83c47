"""
Block files: what jobs exchange through the hub.

A file holds flat ranges of tensors in blocks of at most 2¹⁶ entries. Of a publication, a block stores the active
entries only: their positions as 16-bit numbers or as a bitmap, whichever is smaller, and their exact values. Of a
state, it stores all. Every block has its place and checksum in a table, so a rank of any world size reads and checks
just the ranges it owns.

The file is a safetensors file with two tensors, `payload` (the blocks, back to back) and `table` (one row per block);
the names and dtypes of the tensors that were cut up are in its metadata.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ram_trl.files import new_file, write_all
from ram_trl.weights import Span, Store
from ram_trl.weights.checkpoint import DTYPES, SAFETENSORS_NAMES

BLOCK = 1 << 16
POSITIONS, BITMAP, DENSE = 0, 1, 2
COLUMNS = ("tensor", "start", "length", "kind", "active", "offset", "bytes", "crc32")
TENSOR, START, LENGTH, KIND, ACTIVE, OFFSET, BYTES, CRC = range(len(COLUMNS))
FORMAT = "ram_trl blocks 1"

LARGEST = 10**15
"""More bytes, and more blocks, than a file will ever hold."""


class BlockFileError(ValueError):
    """A block file is damaged, truncated or not one; the message names the file and, if known, the tensor."""


def blocks(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans cut at multiples of 2¹⁶ of the flat index, in order."""
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, (start // BLOCK + 1) * BLOCK)
            yield Span(span.name, start, stop)
            start = stop


class BlockWriter:
    """
    Writes a block file, block by block; use it as a context manager. The file is complete when the block ends well.

    Args:
        path (`Path`):
            File to make.
        dtypes (`Mapping[str, torch.dtype]`):
            Every tensor that may be written and the dtype its values are stored in.
    """

    def __init__(self, path: Path, dtypes: Mapping[str, torch.dtype]) -> None:
        self._path = path
        self._ids = {name: i for i, name in enumerate(sorted(dtypes))}
        self._metadata = {
            "format": FORMAT,
            "tensors": json.dumps([[name, SAFETENSORS_NAMES[dtypes[name]]] for name in self._ids]),
        }
        self._rows: list[tuple[int, ...]] = []
        self._size = 0

    def __enter__(self) -> BlockWriter:
        self._descriptor = new_file(self._path)
        write_all(self._descriptor, self._header(0, 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                table = np.array(self._rows, np.int64).reshape(-1, len(COLUMNS))
                write_all(self._descriptor, table.tobytes())
                write_all(self._descriptor, self._header(self._size, len(table)), 0)
        finally:
            os.close(self._descriptor)

    def _header(self, payload: int, rows: int) -> bytes:
        def text(payload: int, rows: int) -> bytes:
            end = payload + rows * 8 * len(COLUMNS)
            header = {
                "__metadata__": self._metadata,
                "payload": {"dtype": "U8", "shape": [payload], "data_offsets": [0, payload]},
                "table": {"dtype": "I64", "shape": [rows, len(COLUMNS)], "data_offsets": [payload, end]},
            }
            return json.dumps(header).encode()

        # As long as it can get: it is written before the sizes are known, and again when they are.
        length = len(text(LARGEST, LARGEST)) // 8 * 8 + 8
        return length.to_bytes(8, "little") + text(payload, rows).ljust(length)

    def add(self, span: Span, values: Tensor, active: Tensor | None = None) -> int:
        """
        Writes one block.

        Args:
            span (`Span`):
                A range within one block of 2¹⁶.
            values (`Tensor`):
                Its entries, 1-D, in the dtype declared for the tensor.
            active (`Tensor`, bool, *optional*):
                Which of them to store; by default all.

        Returns:
            `int`: the checksum of the block.
        """
        bits = _bits(values)
        if active is None:
            kind, count, content = DENSE, len(span), bits.tobytes()
        else:
            mask = active.cpu().numpy()
            count = int(np.count_nonzero(mask))
            if count == len(span):
                kind, content = DENSE, bits.tobytes()
            else:
                positions = np.flatnonzero(mask)
                kind = POSITIONS if 16 * count < len(span) else BITMAP
                places = positions.astype(np.uint16) if kind == POSITIONS else np.packbits(mask)
                content = bits[positions].tobytes() + places.tobytes()
        checksum = zlib.crc32(content)
        row = (self._ids[span.name], span.start, len(span), kind, count, self._size, len(content), checksum)
        self._rows.append(row)
        content += b"\0" * (-len(content) % 8)
        write_all(self._descriptor, content)
        self._size += len(content)
        return checksum


class BlockFile:
    """
    A block file, open for reading: memory-mapped, nothing read but the table.

    Args:
        path (`Path`):
            The file.

    Raises:
        `BlockFileError`: if it is damaged, truncated or of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            handle = safe_open(path, framework="pt")
            metadata = handle.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise BlockFileError(f"{path} is not a block file of format '{FORMAT}'")
            self._payload = handle.get_tensor("payload").numpy()
            self.table: NDArray[np.int64] = handle.get_tensor("table").numpy()
            named = [(name, DTYPES[dtype]) for name, dtype in json.loads(metadata["tensors"])]
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, BlockFileError):
                raise
            raise BlockFileError(f"{path} is damaged or truncated ({error})") from error
        self.dtypes = dict(named)
        self._names = [name for name, _ in named]
        self._check_table()
        self._rows = {name: self._rows_of(i) for i, name in enumerate(self._names)}
        self._ends = {name: rows[:, START] + rows[:, LENGTH] for name, rows in self._rows.items()}
        self._sound: set[tuple[int, int]] = set()

    def _check_table(self) -> None:
        table, sizes = self.table, np.array([self.dtypes[name].itemsize for name in self._names], np.int64)
        sound = table.ndim == 2 and table.shape[1] == len(COLUMNS) and bool((table >= 0).all())
        sound = sound and bool((table[:, TENSOR] < len(sizes)).all() and (table[:, KIND] <= DENSE).all())
        if sound:
            length, active, kind = table[:, LENGTH], table[:, ACTIVE], table[:, KIND]
            places = np.choose(kind, [2 * active, (length + 7) // 8, 0])
            fits = table[:, BYTES] == active * sizes[table[:, TENSOR]] + places
            within = table[:, OFFSET] + table[:, BYTES] <= len(self._payload)
            one_block = table[:, START] % BLOCK + length <= BLOCK
            sound = bool((fits & within & one_block & (active <= length) & (length > 0)).all())
            sound = sound and bool((active[kind == DENSE] == length[kind == DENSE]).all())
        if not sound:
            raise BlockFileError(f"{self.path} is damaged: its table of blocks is not consistent")

    def _rows_of(self, tensor: int) -> NDArray[np.int64]:
        rows = self.table[self.table[:, TENSOR] == tensor]
        return rows[np.argsort(rows[:, START], kind="stable")]

    def spans(self) -> list[Span]:
        """The range of every block, by tensor and start."""
        return [Span(name, int(r[START]), int(r[START] + r[LENGTH])) for name in self._names for r in self._rows[name]]

    def checksum(self) -> int:
        """Of the table and of the names and dtypes: with the blocks' own checksums it covers the whole file."""
        return zlib.crc32(self.table.tobytes(), zlib.crc32(repr(sorted(self.dtypes.items())).encode()))

    def active(self) -> int:
        """Number of entries stored."""
        return int(self.table[:, ACTIVE].sum())

    def contents(self) -> Iterator[tuple[Span, Tensor]]:
        """
        The range of every block and the entries stored of it, 1-D, in the dtype they are stored in.

        Raises:
            `BlockFileError`: if a block's checksum does not match, naming file, tensor and range.
        """
        for name in self._names:
            for row in self._rows[name]:
                yield Span(name, int(row[START]), int(row[START] + row[LENGTH])), self._split(name, row)[0]

    def view(self, span: Span) -> Tensor | None:
        """
        The entries of `span` as they lie in the file, float32, not to be written to; `None` if they are not in one
        block that stores all of its entries in float32.

        Raises:
            `BlockFileError`: if the block's checksum does not match, naming file, tensor and range.
        """
        rows = self._rows.get(span.name)
        first = 0 if rows is None else self._first(span)
        if rows is None or first == len(rows) or self.dtypes[span.name] != torch.float32:
            return None
        start, stop = int(rows[first][START]), int(self._ends[span.name][first])
        if rows[first][KIND] != DENSE or not start <= span.start < span.stop <= stop:
            return None
        return self._split(span.name, rows[first])[0][span.start - start : span.stop - start]

    def _first(self, span: Span) -> int:
        """Which block of the span's tensor is the first to reach into it."""
        return int(np.searchsorted(self._ends[span.name], span.start, side="right"))

    def fill(self, span: Span, out: Tensor) -> None:
        """
        Overwrites `out` with the stored entries of `span`; entries that are not stored are left as they are.

        Args:
            span (`Span`):
                Any flat range.
            out (`Tensor`, float32):
                1-D, of the span's length, on the CPU.

        Raises:
            `BlockFileError`: if a block's checksum does not match, naming file, tensor and range.
        """
        rows = self._rows.get(span.name)
        if rows is None:
            return
        target = out.numpy()
        for row in rows[self._first(span) :]:
            start, length = int(row[START]), int(row[LENGTH])
            if start >= span.stop:
                break
            low, high = max(span.start, start), min(span.stop, start + length)
            self._fill_block(span.name, row, low - start, high - start, target[low - span.start : high - span.start])

    def _split(self, name: str, row: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.uint8]]:
        """A block's values, and where they belong, once it is checked."""
        place = int(row[OFFSET])
        content = self._payload[place : place + row[BYTES]]
        block = place, int(row[BYTES])  # an empty block stands where the next one starts
        if block not in self._sound:
            if zlib.crc32(content) != row[CRC]:
                stop = row[START] + row[LENGTH]
                raise BlockFileError(
                    f"{self.path} is damaged: checksum of '{name}' entries {row[START]}-{stop} does not fit"
                )
            self._sound.add(block)  # checked once, by whoever needs it first
        dtype = self.dtypes[name]
        end = int(row[ACTIVE]) * dtype.itemsize
        values = torch.from_numpy(content[:end]).view(dtype) if end else torch.empty(0, dtype=dtype)
        return values, content[end:]

    def _fill_block(self, name: str, row: NDArray[np.int64], low: int, high: int, target: NDArray[np.float32]) -> None:
        stored, places = self._split(name, row)
        if len(stored) == 0:
            return
        values, length = stored.to(torch.float32).numpy(), int(row[LENGTH])
        if row[KIND] == DENSE:
            target[:] = values[low:high]
        elif row[KIND] == BITMAP:
            mask = np.unpackbits(places, count=length).view(bool)
            before = int(np.count_nonzero(mask[:low]))
            inside = np.flatnonzero(mask[low:high])  # several times faster to index with than the mask
            target[inside] = values[before : before + len(inside)]
        else:
            positions = places.view(np.uint16)
            first, last = np.searchsorted(positions, [low, high])
            target[positions[first:last].astype(np.int64) - low] = values[first:last]


class Blocks:
    """
    A state or a publication as a store: block files that together cover every tensor, over a reference.

    Args:
        files (`Sequence[BlockFile]`):
            One per rank of the job that wrote them.
        shapes (`Mapping[str, tuple[int, ...]]`):
            Shapes of the tensors.
        reference (`Store`, *optional*):
            Where entries that are not stored come from; a state has none.

    Raises:
        `BlockFileError`: if an entry is covered by no file or by several, or a tensor is unknown.
    """

    def __init__(
        self, files: Sequence[BlockFile], shapes: Mapping[str, tuple[int, ...]], reference: Store | None = None
    ) -> None:
        self.aliases: Mapping[str, str] = {}
        self._files = files
        self._shapes = dict(sorted(shapes.items()))
        self._reference = reference
        self._check_cover()

    def _check_cover(self) -> None:
        found: dict[str, list[tuple[int, int, Path]]] = {name: [] for name in self._shapes}
        for file in self._files:
            for span in file.spans():
                if span.name not in found:
                    raise BlockFileError(f"{file.path} holds '{span.name}', which is not a tensor of this run")
                found[span.name].append((span.start, span.stop, file.path))
        for name, ranges in found.items():
            reached = 0
            for start, stop, path in sorted(ranges):
                if start != reached:
                    problem = "missing" if start > reached else "there twice"
                    raise BlockFileError(f"{path} does not fit: entries {reached}-{start} of '{name}' are {problem}")
                reached = stop
            entries = int(np.prod(self._shapes[name], dtype=np.int64))
            if reached != entries:
                files = ", ".join(str(file.path) for file in self._files)
                raise BlockFileError(f"{files}: '{name}' is covered up to entry {reached} of {entries}")

    def contents(self) -> Iterator[tuple[Span, Tensor]]:
        """What the files hold, block by block, as [`BlockFile.contents`] tells it; nothing of the reference."""
        for file in self._files:
            yield from file.contents()

    def stored(self) -> int:
        """Number of entries that the files hold: the active ones of a publication."""
        return sum(file.active() for file in self._files)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, start: int, stop: int) -> Tensor:
        span = Span(name, start, stop)
        if self._reference is not None:
            return self.over(span, span.of(self._reference))
        views = (file.view(span) for file in self._files)
        found = next((view for view in views if view is not None), None)
        return self._fill(span, torch.empty(len(span))) if found is None else found

    def over(self, span: Span, below: Tensor) -> Tensor:
        """A copy of `below` (float32, on the CPU) with the entries of `span` that the files hold put over it."""
        return self._fill(span, below.clone())

    def _fill(self, span: Span, out: Tensor) -> Tensor:
        for file in self._files:
            file.fill(span, out)
        return out


def _bits(values: Tensor) -> NDArray[np.generic]:
    """The entries as integers of the same width: numpy has no bfloat16."""
    integer = {2: torch.int16, 4: torch.int32}[values.itemsize]
    return values.detach().contiguous().cpu().view(integer).numpy()
