"""
`save_pretrained` weight files, written range by range.

Each safetensors file is laid out first and filled in afterwards, in any order and from any thread, so that no tensor
is ever held whole. A file that has all its bytes is flushed to disk and summed in a thread of its own, while others
are still being filled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from ram_trl.files import errors_name, new_file, write_all
from ram_trl.weights.checkpoint import INDEX_FILE, SAFETENSORS_NAMES


@dataclass(frozen=True)
class FinishedFile:
    """
    A weight file that is complete and on disk.

    Args:
        name (`str`):
            Its name in the folder.
        size (`int`):
            Its bytes.
        sha256 (`str`):
            Their checksum, in hexadecimal.
    """

    name: str
    size: int
    sha256: str


class CheckpointWriter:
    """
    Writes the weight files and the index of a checkpoint.

    Nothing is on disk before the first `write`, which may be called from several threads for disjoint ranges.

    Args:
        folder (`Path`):
            An existing folder.
        shapes (`Mapping[str, tuple[int, ...]]`):
            Shapes of the tensors to be written, by name.
        dtypes (`Mapping[str, torch.dtype]`):
            Their dtypes.
        max_shard_size (`int` or `str`):
            Largest size of one file, in bytes or as in `"5GB"`; a larger tensor has a file of its own.
        finished (`Collection[FinishedFile]`, *optional*):
            Files that an earlier writer of the same tensors finished in this folder; they are left as they are.
        on_finish (`Callable[[FinishedFile], None]`, *optional*):
            Called, from a thread, for every file that is complete and on disk.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        max_shard_size: int | str,
        finished: Collection[FinishedFile] = (),
        on_finish: Callable[[FinishedFile], None] = lambda file: None,
    ) -> None:
        self._folder = folder
        self._dtypes = dict(dtypes)
        self._on_finish = on_finish
        empty = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
        split = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
        self._index = (
            {"metadata": {"total_size": sum(t.nbytes for t in empty.values())}, "weight_map": split.tensor_to_filename}
            if split.is_sharded
            else None
        )
        self._files = {
            file: _File(folder / file, {name: empty[name] for name in names})
            for file, names in split.filename_to_tensors.items()
        }
        self._finished = {file.name: file for file in finished}
        self._holder = {name: file for file, names in split.filename_to_tensors.items() for name in names}
        # One thread: files go to one disk.
        self._finisher = ThreadPoolExecutor(1)
        self._finishing: list[Future[FinishedFile]] = []

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every weight file, by name."""
        return {name: file.size for name, file in self._files.items()}

    @property
    def wanted(self) -> list[str]:
        """Sorted names of the tensors that no finished file holds."""
        return sorted(name for name, file in self._holder.items() if file not in self._finished)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """
        Writes `values` (1-D, of the tensor's dtype) from flat index `start` on, unless a finished file has them.

        Raises:
            `OSError`: naming the file, if the disk is full or fails; also for a file completed before.
        """
        assert values.dtype == self._dtypes[name], f"{name}: {values.dtype}"
        if self._holder[name] in self._finished:
            return
        file = self._files[self._holder[name]]
        if file.write(name, start * values.itemsize, _bytes(values)):
            for future in self._finishing:
                if future.done():
                    future.result()
            self._finishing.append(self._finisher.submit(self._finish, file))

    def _finish(self, file: _File) -> FinishedFile:
        finished = file.finish()
        self._on_finish(finished)
        return finished

    def close(self) -> list[FinishedFile]:
        """
        Waits until all files are on disk, and writes the index.

        Returns:
            `list[FinishedFile]`: every weight file, sorted by name.

        Raises:
            `OSError`: naming the file, if the disk is full or fails.
            `RuntimeError`: naming files that were not filled.
        """
        finished = {**self._finished, **{file.name: file for file in (future.result() for future in self._finishing)}}
        short = [f"{name} ({file.missing} bytes)" for name, file in self._files.items() if name not in finished]
        if short:
            raise RuntimeError(f"not all of the weights were written; missing in {', '.join(short)}")
        self.abandon()
        if self._index:
            path = self._folder / INDEX_FILE
            with errors_name(path):
                path.write_text(json.dumps(self._index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return [finished[name] for name in sorted(finished)]

    def abandon(self) -> None:
        """Closes the files as they are."""
        self._finisher.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.abandon()


class _File:
    """One safetensors file; `missing` bytes of its tensors are not written yet."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        offset = 0
        # Larger items first keeps every tensor aligned to its item size.
        for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
            tensor = tensors[name]
            header[name] = {
                "dtype": SAFETENSORS_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            self._offsets[name] = offset
            offset += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.missing = offset
        self.size = len(self._head) + offset
        self._descriptor: int | None = None
        self._lock = Lock()
        self._writing = 0
        self._abandoned = False

    def write(self, name: str, position: int, content: memoryview) -> bool:
        """Writes bytes of a tensor; whether the file is complete then."""
        with errors_name(self.path):
            descriptor = self._enter()
            try:
                write_all(descriptor, content, len(self._head) + self._offsets[name] + position)
            except BaseException:
                self._leave(0)
                raise
            return self._leave(len(content))

    def _enter(self) -> int:
        with self._lock:
            if self._abandoned:
                raise RuntimeError(f"{self.path} is written to no more")
            if self._descriptor is None:
                self._descriptor = new_file(self.path)
                os.ftruncate(self._descriptor, self.size)
                write_all(self._descriptor, self._head, 0)
            self._writing += 1
            return self._descriptor

    def _leave(self, written: int) -> bool:
        with self._lock:
            self._writing -= 1
            self.missing -= written
            self._close_if_idle()
            return self.missing == 0

    def finish(self) -> FinishedFile:
        """Makes it durable and sums it."""
        assert self._descriptor is not None
        with errors_name(self.path):
            # Read back while it is in the page cache: what is summed is what readers will see.
            with self.path.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256")
            os.fsync(self._descriptor)
        self.abandon()
        return FinishedFile(self.path.name, self.size, digest.hexdigest())

    def abandon(self) -> None:
        """Closes it, as soon as no thread is writing: the number of a closed descriptor may be another file's."""
        with self._lock:
            self._abandoned = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._abandoned and not self._writing and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _bytes(values: Tensor) -> memoryview:
    return values.contiguous().cpu().view(torch.uint8).numpy().data
