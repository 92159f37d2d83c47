"""
Files that are whole or not there: write beside, flush to disk, rename.

Everything that several jobs read goes through here. A crash at any moment leaves the old content or the new one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial-"
"""Marks files and folders that are being made; readers never look at them."""


class DamagedFileError(ValueError):
    """A JSON file of the hub cannot be trusted; the message names it."""


def partial(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    # Names may have 255 bytes; the number makes up for what is cut off.
    return path.parent / f".{path.name[:60]}{PARTIAL}{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextmanager
def folder_in_one_piece(folder: Path) -> Iterator[Path]:
    """
    A temporary folder beside `folder` that takes its name when the block ends well, and vanishes when it does not.

    Everything in it is flushed to disk before the rename, so that after a crash `folder` is complete or absent.

    Raises:
        `FileExistsError`: if `folder` exists by then.
    """
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial(folder)
    temporary.mkdir()
    try:
        yield temporary
        settle(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # somebody else uses it by now
                parent.rmdir()
        raise


def settle(temporary: Path, folder: Path) -> None:
    """
    Gives a finished temporary folder its name, durably.

    Raises:
        `FileExistsError`: if `folder` exists; the temporary folder is left as it is.
    """
    for path in sorted(temporary.rglob("*")):
        flush(path)
    flush(temporary)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} appeared while it was being made; nothing was overwritten")
        os.rename(temporary, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(f"{folder} appeared while it was being made; nothing was overwritten") from error
        raise
    flush(folder.parent)


def flush(path: Path) -> None:
    """Makes a file's content, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes | memoryview, offset: int | None = None) -> None:
    """Writes all of `content`, at the descriptor's position or at `offset`."""
    view = memoryview(content)
    while view:
        if offset is None:
            written = os.write(descriptor, view)
        else:
            written = os.pwrite(descriptor, view, offset)
            offset += written
        view = view[written:]


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Errors of the system that do not say which file they are about, such as a full disk, get to name `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def new_file(path: Path) -> int:
    """A descriptor of a file that did not exist; others may read it as the umask says."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """
    Replaces a JSON file atomically; it carries a checksum of its content.

    Args:
        path (`Path`):
            The file.
        content (`Mapping[str, Any]`):
            What to write.
        durable (`bool`, *optional*, defaults to `True`):
            Flush it to disk first; heartbeats need not be.
    """
    temporary = _written(path, content, durable)
    os.replace(temporary, path)
    if durable:
        flush(path.parent)


def link_json(path: Path, content: Mapping[str, Any]) -> bool:
    """
    Makes a JSON file unless it exists: the first of several processes wins, for good.

    Returns:
        `bool`: whether this call made it.
    """
    temporary = _written(path, content, True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    flush(path.parent)
    return True


def read_json(path: Path) -> dict[str, Any]:
    """
    The content of a file made by `write_json` or `link_json`.

    Raises:
        `FileNotFoundError`: if there is none.
        `DamagedFileError`: if it is not JSON, or its checksum does not fit.
    """
    try:
        held = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged or truncated: {error}") from error
    if (
        not isinstance(held, dict)
        or held.keys() != {"content", "crc32"}
        or held["crc32"] != _checksum(held["content"])
    ):
        raise DamagedFileError(f"{path} is damaged: its checksum does not fit its content")
    return dict(held["content"])


def _written(path: Path, content: Mapping[str, Any], durable: bool) -> Path:
    held = json.dumps({"content": content, "crc32": _checksum(content)}, indent=1).encode()
    temporary = partial(path)
    descriptor = new_file(temporary)
    try:
        write_all(descriptor, held)
        if durable:
            os.fsync(descriptor)
    except BaseException:
        temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    return temporary


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
