"""
A round's generalist as a `save_pretrained` folder, of a model or of an adapter, made in a process of its own while
training goes on.

    python -m ram_trl.continual.export HUB BASE SHARD_SIZE

reads round numbers from standard input, one per line, and exports each, until the input ends.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor

from ram_trl.config import MergeConfig
from ram_trl.continual.hub import Hub
from ram_trl.continual.rounds import Rounds
from ram_trl.continual.semantics import Decision, Publication
from ram_trl.engine.counting import CHUNK
from ram_trl.engine.low_rank import LARGE_ERROR
from ram_trl.engine.workers import Workers
from ram_trl.files import DamagedFileError, folder_in_one_piece, partial, read_json
from ram_trl.folders.adapters import merge_low_rank
from ram_trl.folders.assembly import AdapterReport
from ram_trl.folders.offline import SHARD_SIZE, write_like
from ram_trl.problems import MergeInputError
from ram_trl.team import Team
from ram_trl.telling.card import model_card
from ram_trl.telling.report import MergeReport
from ram_trl.weights import cut, whole
from ram_trl.weights.anatomy import Anatomy
from ram_trl.weights.checkpoint import Checkpoint, open_checkpoint
from ram_trl.weights.sparse import Blocks

logger = logging.getLogger(__name__)


class Overlay:
    """A checkpoint with the tensors of a state in place of its own, as a store."""

    def __init__(self, base: Checkpoint, state: Blocks) -> None:
        self.aliases = base.aliases
        self._base = base
        self._state = state
        self._trained = set(state.names())

    def names(self) -> list[str]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._base.dtype(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return (self._state if name in self._trained else self._base).read(name, start, stop)


def export_round(hub: Hub, number: int, base: Path, max_shard_size: int | str = SHARD_SIZE) -> Path:
    """
    Exports a round and points `latest.json` to it; does nothing if the export is there.

    Args:
        hub (`Hub`):
            The hub.
        number (`int`):
            The round; its state has to be made.
        base (`Path`):
            Folder of the base: dtypes, weights that are not trained, and side files.
        max_shard_size (`int` or `str`, *optional*):
            Largest size of one weight file.

    Returns:
        `Path`: the folder.

    Raises:
        `MergeInputError`: if the base cannot be read, or an entry overflows the base's dtype.
        `BlockFileError`, `DamagedFileError`, `OSError`: if the state cannot be read, or the hub not be written.
    """
    folder = hub.generalist_folder(number)
    if folder.exists() and not _is_of(folder):
        logger.warning("%s is another round's export that was moved here; it is made again", folder)
        away = partial(folder)
        os.rename(folder, away)
        shutil.rmtree(away)
    if not folder.exists():
        try:
            save_generalist(hub, number, base, folder, hub.described()["identity"].get("export_rank"), max_shard_size)
        except FileExistsError:
            logger.info("round %d was exported by another process meanwhile", number)
    hub.point_latest(number)
    return folder


def save_generalist(
    hub: Hub, number: int, base: Path, out: Path, rank: int | None, max_shard_size: int | str = SHARD_SIZE
) -> None:
    """
    Writes the generalist of a round.

    Args:
        hub (`Hub`):
            The hub.
        number (`int`):
            The round; its state has to be there. State 0 is the base as agents started from it.
        base (`Path`):
            Folder of the base.
        out (`Path`):
            Folder to make.
        rank (`int`, *optional*):
            Of a LoRA adapter: the best fit of what the round changes of the base. A model if it is `None`.
        max_shard_size (`int` or `str`, *optional*):
            Largest size of one weight file of a model.

    Raises:
        `FileExistsError`: if `out` exists.
        `MergeInputError`: if the base cannot be read, or an entry overflows the base's dtype.
        `BlockFileError`, `DamagedFileError`, `OSError`: if the state cannot be read, or `out` not be written.
    """
    opened = open_checkpoint(base, "base")
    if opened.problems:
        raise MergeInputError(opened.problems)
    with folder_in_one_piece(out) as temporary, Workers(1) as workers:
        fit = _write(hub, number, opened.store, temporary, workers, rank, max_shard_size)
        report = round_report(hub, number)
        if report is not None:
            sources = {p.agent: _told(p) for p in report[0].publications}
            merged = report[1].model_copy(update={"base": base, "out": out, "sources": sources})
            (temporary / "merge_report.json").write_text(merged.to_json(), encoding="utf-8")
            card = model_card(merged, opened.store.config, fit=fit)
            (temporary / "README.md").write_text(card, encoding="utf-8")


def _write(
    hub: Hub,
    number: int,
    base: Checkpoint,
    folder: Path,
    workers: Workers,
    rank: int | None,
    max_shard_size: int | str,
) -> AdapterReport | None:
    """Writes the weights; returns what an adapter misses."""
    rounds = Rounds(hub, Team(), hub.described()["identity"])
    generalist = Overlay(base, rounds.state(number))
    if rank is None:
        spans = cut(whole(base), CHUNK)
        write_like(
            base, folder, max_shard_size, lambda write: workers.map(lambda s: write(s, s.of(generalist)), spans)
        )
        return None
    # Agents trained from state 0, which is the base, or the base rounded as their models were.
    start, config = Overlay(base, rounds.state(0)), MergeConfig(epsilon=0)
    merged = merge_low_rank(start, {"generalist": generalist}, config, workers, Anatomy(base.config, base), rank=rank)
    merged.save(folder, str(base.folder.resolve()))
    (folder / "adapter_report.json").write_text(merged.report.to_json(), encoding="utf-8")
    if merged.report.error > LARGE_ERROR:
        logger.warning(
            "%s: with rank %d the adapter misses %.1f %% of what round %d changes; a higher rank misses less",
            folder.parent, rank, 100 * merged.report.error, number,
        )  # fmt: skip
    return merged.report


def _told(head: Publication) -> str:
    # Not its folder: publications are removed once nobody needs them.
    return f"publication {head.sequence}, of step {head.step}, against round {head.base_round}"


def _is_of(folder: Path) -> bool:
    """Whether an export says that it was made for this folder; without a report it is taken at its name."""
    path = folder / "merge_report.json"
    if not path.exists():
        return True
    try:
        out = json.loads(path.read_text(encoding="utf-8")).get("out")
    except ValueError:
        return False
    return out is not None and Path(out).name == folder.name


def round_report(hub: Hub, number: int) -> tuple[Decision, MergeReport] | None:
    """The decision and the report of a round; `None` if the job that made its state died before it wrote them."""
    try:
        held = read_json(hub.round_folder(number) / "report.json")
    except FileNotFoundError:
        return None
    try:
        return Decision(**held.pop("decision")), MergeReport(**held)
    except (KeyError, TypeError, ValidationError) as error:
        raise DamagedFileError(f"{hub.round_folder(number) / 'report.json'} is damaged: {error}") from error


class Exporter:
    """
    Exports rounds in a process of its own, one after another. If that process dies, the next round starts a new one.

    Agents that take turns in this process share one exporter per hub: each takes seconds to start.

    Args:
        hub (`Path`):
            The hub's folder.
        base (`Path`):
            Folder of the base.
        max_shard_size (`str`, *optional*):
            Largest size of one weight file.
    """

    _shared: ClassVar[dict[tuple[Path, Path], Exporter]] = {}

    def __init__(self, hub: Path, base: Path, max_shard_size: str = SHARD_SIZE) -> None:
        self._command = [sys.executable, "-m", "ram_trl.continual.export", str(hub), str(base), max_shard_size]
        self._process: subprocess.Popen[bytes] | None = None
        self._users: set[str] = set()

    @classmethod
    def shared_by(cls, agent: str, hub: Path, base: Path) -> Exporter:
        """The exporter of this process for a hub; `agent` uses it until it calls `leave`."""
        key = (hub.resolve(), base.resolve())
        exporter = cls._shared.setdefault(key, cls(*key))
        exporter._users.add(agent)
        return exporter

    def leave(self, agent: str) -> None:
        """The agent needs it no more; the last one waits until everything queued is exported."""
        self._users.discard(agent)
        if not self._users:
            self.close()

    def start(self, number: int) -> None:
        """Queues a round."""
        if self._process is None or self._process.poll() is not None:
            # Not one of the job's ranks: it must not join its process group, nor take its GPU.
            environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
            environment["CUDA_VISIBLE_DEVICES"] = ""
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=environment)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Waits until everything queued is exported."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            if self._process.wait():
                logger.warning("exporting a generalist failed; see the messages above")
            self._process = None


def main() -> int:
    """Exports the rounds named on standard input; the exit code tells whether all went well."""
    hub, base, max_shard_size = Hub(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
    failed = False
    for line in sys.stdin:
        number = int(line)
        try:
            export_round(hub, number, base, max_shard_size)
        except (ValueError, OSError) as error:  # a round that cannot be exported must not keep others from it
            if not hub.state_folder(number).exists() and len(hub.decisions()) > number:
                # Rounds came faster than exports, and were swept: `keep_rounds`.
                print(f"ram_trl: round {number} is no longer kept, so it is not exported", file=sys.stderr, flush=True)
                continue
            print(f"ram_trl: round {number} was not exported: {error}", file=sys.stderr, flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
