"""
A merge of folders that can be killed at any moment and taken up again.

Beside the output folder `out` lies, while it is being made, `.out.partial-…`:

    inputs.json                       what is merged, how and into what
    plan.json                         what was counted
    finished/model-00001-of-….json    one for each weight file that is complete and on disk
    model/                            becomes `out`
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ram_trl.config import MergeConfig
from ram_trl.engine.plan import Counts, Plan
from ram_trl.files import PARTIAL, DamagedFileError, read_json, settle, write_json
from ram_trl.problems import MergeInputError, Problem
from ram_trl.weights.adapter import Adapter
from ram_trl.weights.checkpoint import Checkpoint
from ram_trl.weights.writer import FinishedFile

logger = logging.getLogger(__name__)


class Unfinished:
    """
    The folder in which a merge is made; a context manager.

    Left well, after `settle`, nothing of it remains. Left by an error it is removed, unless weight files are finished
    that `resume` can use and the input is not to blame. Killed, it stays as it is; the next merge into the same folder
    takes it up with `resume`, and removes it without.

    Args:
        out (`Path`):
            The folder to be made.
        identity (`Mapping[str, str]`):
            What is merged, how and into what, by names that a user understands; equal for merges with equal results.
        resume (`bool`):
            Take up what is there.

    Raises:
        `MergeInputError`: if another process is making `out`, or `resume` finds another merge; naming what differs.
    """

    def __init__(self, out: Path, identity: Mapping[str, str], resume: bool) -> None:
        self._out = out
        self._identity = dict(identity)
        self._resume = resume
        self.folder = workshop(out)
        self.model = self.folder / "model"
        self.finished: list[FinishedFile] = []
        self.differs = False
        """Whether a finished file of an earlier run differs from the base."""

    def __enter__(self) -> Unfinished:
        self._made = [parent for parent in self._out.parents if not parent.exists()]
        self._lock = self._locked()
        try:
            if self._resume and self._found():
                self._keep_finished()
            else:
                self._start_afresh()
            self.model.mkdir(exist_ok=True)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _locked(self) -> int:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.folder.mkdir(exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                what = f"another process is making {self._out} (in {self.folder}); wait for it, or stop it"
                raise MergeInputError([Problem("output", what)]) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self.folder)):
                    return descriptor
            os.close(descriptor)  # the one who held it has removed it

    def _found(self) -> bool:
        """Whether there is a merge to go on with."""
        try:
            held = read_json(self.folder / "inputs.json")
        except (FileNotFoundError, DamagedFileError):
            return False
        differing = sorted(
            key for key in held.keys() | self._identity.keys() if held.get(key) != self._identity.get(key)
        )
        if differing:
            told = "; ".join(
                f"{key} is {self._identity.get(key, 'not there')}, was {held.get(key, 'not there')}"
                for key in differing
            )
            what = (
                f"what lies unfinished in {self.folder} is another merge: {told}; give what was given then, or merge "
            )
            raise MergeInputError([Problem("output", what + "without resume, which starts afresh")])
        return True

    def _keep_finished(self) -> None:
        for entry in sorted((self.folder / "finished").glob("*.json")):
            try:
                held = read_json(entry)
            except DamagedFileError:
                continue
            file = FinishedFile(**held["file"])
            if _sum(self.model / file.name) == file.sha256:
                self.finished.append(file)
                self.differs |= held["differs"]
            else:
                logger.warning("%s in %s is not as it was finished; it is made again", file.name, self.model)
        if self.model.exists():
            for path in self.model.iterdir():
                if path.name not in {file.name for file in self.finished}:
                    _remove(path)

    def _start_afresh(self) -> None:
        earlier = sorted(path.stem for path in (self.folder / "finished").glob("*.json"))
        if earlier:
            logger.warning("removing an unfinished merge (%d weight files) in %s", len(earlier), self.folder)
        for path in self.folder.iterdir():
            _remove(path)
        (self.folder / "finished").mkdir()
        write_json(self.folder / "inputs.json", self._identity)

    def plan(self, config: MergeConfig) -> Plan | None:
        """The plan of the earlier run, if it came that far."""
        with suppress(FileNotFoundError, DamagedFileError, KeyError, TypeError):
            held = read_json(self.folder / "plan.json")
            counts = {name: _counts(values) for name, values in held["counts"].items()}
            return Plan(config, tuple(held["agents"]), tuple(held["thresholds"]), counts)
        return None

    def keep_plan(self, plan: Plan) -> None:
        """Keeps what was counted."""
        counts = {name: _plain(counts) for name, counts in plan.counts.items()}
        held = {"agents": plan.agents, "thresholds": plan.thresholds, "counts": counts}
        write_json(self.folder / "plan.json", held)

    def keep(self, file: FinishedFile, differs: bool) -> None:
        """Keeps that a weight file is complete and on disk, and whether anything so far differs from the base."""
        write_json(self.folder / "finished" / f"{file.name}.json", {"file": asdict(file), "differs": differs})

    def settle(self) -> None:
        """
        Gives the model its name, durably.

        Raises:
            `FileExistsError`: if `out` exists by then.
        """
        settle(self.model, self._out)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = len(list((self.folder / "finished").glob("*.json")))
        if error is not None and finished and not isinstance(error, ValueError):
            logger.warning(
                "%d weight files are finished in %s: go on with resume (--resume), or remove it", finished, self.folder
            )
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in self._made if error is not None else ():
                with suppress(OSError):  # somebody else uses it by now
                    parent.rmdir()
        os.close(self._lock)


def workshop(out: Path) -> Path:
    """Where a merge into `out` is made."""
    # Names may have 255 bytes; the number makes up for what is cut off.
    return out.parent / f".{out.name[:60]}{PARTIAL}{zlib.crc32(os.fsencode(out.name)):08x}"


def fingerprint(store: Checkpoint | Adapter) -> dict[str, str]:
    """What tells whether a checkpoint is still the same: size, time of change and header of each weight file."""
    told = {"folder": str(store.folder.resolve())}
    for config in (store.folder / "config.json", store.folder / "adapter_config.json"):
        if config.exists():
            told[config.name] = hashlib.sha256(config.read_bytes()).hexdigest()[:16]
    for file in store.files:
        with file.open("rb") as opened:
            length = opened.read(8)
            header = hashlib.sha256(length + opened.read(int.from_bytes(length, "little"))).hexdigest()[:16]
        stat = file.stat()
        name = str(file.relative_to(store.folder))
        told[name] = f"{stat.st_size} bytes of time {stat.st_mtime_ns} with header {header}"
    return told


def _counts(values: Mapping[str, Any]) -> Counts:
    held: dict[str, Any] = {n: np.array(*v) if isinstance(v, list) else v for n, v in values.items()}
    return Counts(**held)


def _plain(counts: Counts) -> dict[str, Any]:
    """Counts as JSON, arrays with their dtype; numbers come back to the bit."""
    values = {field.name: getattr(counts, field.name) for field in fields(counts)}
    return {n: [v.tolist(), v.dtype.name] if isinstance(v, np.ndarray) else v for n, v in values.items()}


def _sum(path: Path) -> str | None:
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
