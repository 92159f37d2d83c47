"""Files that are whole or not there: write beside, flush to disk, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_in_one_piece(folder: Path) -> Iterator[Path]:
    """
    A temporary folder beside `folder` that takes its name when the block ends well, and vanishes when it does not.

    Everything in it is flushed to disk before the rename, so that after a crash `folder` is complete or absent.

    Raises:
        `FileExistsError`: if `folder` exists by then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            flush(path)
        flush(temporary)
        if folder.exists():
            raise FileExistsError(f"{folder} appeared while it was being made; nothing was overwritten")
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(folder.parent)


def flush(path: Path) -> None:
    """Makes a file's content, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
