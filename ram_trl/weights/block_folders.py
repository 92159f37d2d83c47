"""Folders of block files, one file per rank, that appear in one piece: publications, states, parts of checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ram_trl.files import DamagedFileError, flush, partial, read_json, settle, write_json
from ram_trl.team import Team
from ram_trl.weights.sparse import BlockFile, BlockFileError, BlockWriter


def write_folder(
    team: Team,
    folder: Path,
    head: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
    write: Callable[[BlockWriter], None],
) -> bool:
    """
    Makes a folder of block files, one per rank, that appears in one piece.

    Collective: all ranks of the job.

    Args:
        team (`Team`):
            The ranks.
        folder (`Path`):
            The folder to make.
        head (`Mapping[str, Any]`):
            What it is, for its manifest.
        dtypes (`Mapping[str, torch.dtype]`):
            The dtype each tensor is stored in.
        write (`Callable[[BlockWriter], None]`):
            Writes this rank's blocks. Enters no collective.

    Returns:
        `bool`: whether this call made it; `False` if another process was first.
    """

    def begin() -> Path | None:
        if not team.first:
            return None
        temporary = partial(folder)
        temporary.mkdir(parents=True)
        return temporary

    temporary = team.share(team.together(begin))
    try:

        def fill() -> dict[str, Any]:
            path = temporary / f"rank-{team.rank:05d}-of-{team.world:05d}.safetensors"
            with BlockWriter(path, dtypes) as writer:
                write(writer)
            flush(path)
            return {"name": path.name, "bytes": path.stat().st_size, "table_crc32": BlockFile(path).checksum()}

        files = team.collect(team.together(fill))

        def finish() -> bool:
            if team.first:
                write_json(temporary / "manifest.json", {"head": dict(head), "files": files})
                try:
                    settle(temporary, folder)
                except FileExistsError:
                    return False
            return True

        return bool(team.share(team.together(finish)))
    finally:
        if team.first:
            shutil.rmtree(temporary, ignore_errors=True)


def open_folder(folder: Path, head: Mapping[str, Any]) -> list[BlockFile]:
    """
    The block files of a folder made by `write_folder`.

    Raises:
        `FileNotFoundError`: if the folder is not there.
        `DamagedFileError`, `BlockFileError`: if it is not what `head` says, or a file is not the one in its manifest.
    """
    manifest = read_json(folder / "manifest.json")
    if manifest.get("head") != dict(head):
        raise DamagedFileError(f"{folder / 'manifest.json'} describes {manifest.get('head')}, expected {dict(head)}")
    opened = []
    for entry in manifest["files"]:
        path = folder / entry["name"]
        size = os.stat(path).st_size if path.exists() else 0
        if size != entry["bytes"]:
            raise BlockFileError(f"{path} has {size} bytes, its manifest says {entry['bytes']}")
        file = BlockFile(path)
        if file.checksum() != entry["table_crc32"]:
            raise BlockFileError(f"{path} is not the file its manifest names: the checksum of its table does not fit")
        opened.append(file)
    return opened
