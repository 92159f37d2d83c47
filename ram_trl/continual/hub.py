"""
The shared folder in which jobs meet: files, renames, decisions. It knows nothing of models.

What happens when a process dies at any moment: a publication, state or export that was being made stays a
`.partial-` folder that nobody reads; a decision exists or does not. Decisions are made with a hard link, so that of
several closers the first wins and a late one changes nothing. Whatever a decision asks for can be made again by
anyone, with the same bytes. Hosts' clocks are never compared: an agent is alive if its heartbeat counter moved while
somebody watched.

A folder with the semantics of a POSIX file system is needed (a local disk, NFS, Lustre).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ram_trl.config import AGENT_NAME
from ram_trl.continual.semantics import Decision, Publication, last_consumed
from ram_trl.files import PARTIAL, DamagedFileError, link_json, partial, read_json, write_json

FORMAT = 1

logger = logging.getLogger(__name__)


class HubError(RuntimeError):
    """The hub cannot be used as asked; the message names the file or agent, and what to do."""


class Hub:
    """
    A hub folder.

    Args:
        path (`Path`):
            The folder. `create_or_join` makes it; opening alone reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- identity -----------------------------------------------------------------------------------------------

    def create_or_join(self, identity: Mapping[str, Any], founding: Mapping[str, Any]) -> dict[str, Any]:
        """
        Makes the hub if it is not there, else checks that this job belongs to its run.

        Args:
            identity (`Mapping[str, Any]`):
                What all jobs of a run must agree on, as JSON.
            founding (`Mapping[str, Any]`):
                What the first job settles for all.

        Returns:
            `dict[str, Any]`: the content of `hub.json`: `identity`, `founding` and `run_id`.

        Raises:
            `HubError`: if the folder lacks hard links, or belongs to a run with another identity; all differences are
            listed with both values.
        """
        for folder in ("agents", "rounds", "state", "generalist"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
            if not (self.path / "hub.json").exists() and any((self.path / folder).iterdir()):
                raise HubError(
                    f"{self.path / 'hub.json'} is missing, though {self.path / folder} holds a run; restore it, or "
                    "name another hub folder"
                )
        settled = {"identity": dict(identity), "founding": dict(founding)}
        content = {"format": FORMAT, "run_id": uuid.uuid4().hex} | settled
        try:
            link_json(self.path / "hub.json", content)
        except OSError as error:
            raise HubError(
                f"{self.path}: cannot make a hard link ({error}); the hub needs a POSIX file system (local disk, NFS, "
                "Lustre), object-store mounts will not do"
            ) from error
        held = self.described()
        differing = _differences(held["identity"], identity)
        if differing:
            raise HubError(f"{self.path} belongs to another run: {'; '.join(differing)}. Name another hub folder")
        return held

    def described(self) -> dict[str, Any]:
        """
        The content of `hub.json`.

        Raises:
            `HubError`: if this is not a hub, or of another format.
        """
        try:
            held = read_json(self.path / "hub.json")
        except FileNotFoundError as error:
            raise HubError(f"{self.path} is not a hub: it has no hub.json") from error
        if held.get("format") != FORMAT:
            raise HubError(f"{self.path / 'hub.json'} is of format {held.get('format')}, expected {FORMAT}")
        return held

    # ---- agents -------------------------------------------------------------------------------------------------

    def agents(self) -> list[str]:
        """Names of all agents that ever joined, sorted."""
        return sorted(
            path.name
            for path in (self.path / "agents").iterdir()
            if AGENT_NAME.fullmatch(path.name) and (path / "heartbeat.json").exists()
        )

    def agent_folder(self, agent: str) -> Path:
        """The folder an agent writes to."""
        return self.path / "agents" / agent

    def heartbeat(self, agent: str) -> dict[str, Any] | None:
        """The agent's last heartbeat: `session`, `counter`, `round`, `step`; `None` if there is no readable one."""
        try:
            beat = read_json(self.agent_folder(agent) / "heartbeat.json")
        except (FileNotFoundError, DamagedFileError):
            return None  # the next beat replaces it
        return beat if beat.keys() == {"session", "counter", "round", "step"} else None

    def is_done(self, agent: str) -> bool:
        """Whether the agent finished training."""
        return (self.agent_folder(agent) / "done.json").exists()

    def finish(self, agent: str, step: int) -> None:
        """Notes that the agent is done, durably."""
        write_json(self.agent_folder(agent) / "done.json", {"step": step})

    def give_up(self, agent: str, why: str) -> None:
        """Notes, durably, that the agent will not come back: nobody waits for it any more. It may still return."""
        self.agent_folder(agent).mkdir(parents=True, exist_ok=True)
        write_json(self.agent_folder(agent) / "done.json", {"gave_up": why})

    def gave_up(self, agent: str) -> str | None:
        """Why the agent was given up; `None` if it was not."""
        try:
            return read_json(self.agent_folder(agent) / "done.json").get("gave_up")
        except (FileNotFoundError, DamagedFileError):
            return None

    def unfinish(self, agent: str) -> None:
        """Takes `finish` back: the agent trains on."""
        (self.agent_folder(agent) / "done.json").unlink(missing_ok=True)

    def times_file(self, agent: str) -> Path:
        """Where the agent notes, line by line, what its merge points took."""
        return self.agent_folder(agent) / "times.jsonl"

    # ---- publications -------------------------------------------------------------------------------------------

    def publication_folder(self, agent: str, sequence: int) -> Path:
        """Where a publication is, or would be."""
        return self.agent_folder(agent) / f"publication-{sequence:06d}"

    def tidy(self, agent: str) -> None:
        """Removes what a killed process of the agent left half made; for its successor, once it has the name."""
        for path in self.agent_folder(agent).glob(f".*{PARTIAL}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def next_sequence(self, agent: str) -> int:
        """The number of the agent's next publication; numbers that a decision names are never used again."""
        decided = [p.sequence for d in self.decisions() if (p := d.of(agent)) is not None]
        return max([0, *decided, *_numbered(self.agent_folder(agent), "publication")]) + 1

    def newest_publication(self, agent: str) -> Publication | None:
        """
        The head of the agent's newest publication; `None` if there is none.

        Raises:
            `DamagedFileError`: if its manifest cannot be trusted.
        """
        numbers = _numbered(self.agent_folder(agent), "publication")
        return self.publication(agent, max(numbers)) if numbers else None

    def publication(self, agent: str, sequence: int) -> Publication:
        """
        The head of a publication, as its manifest has it.

        Raises:
            `DamagedFileError`: if the manifest is damaged or belongs elsewhere.
        """
        path = self.publication_folder(agent, sequence) / "manifest.json"
        try:
            head = Publication(**read_json(path)["head"])
        except (FileNotFoundError, KeyError, TypeError, ValidationError) as error:
            raise DamagedFileError(f"{path} is missing or damaged: {error}") from error
        if (head.agent, head.sequence) != (agent, sequence):
            raise DamagedFileError(f"{path} is of agent '{head.agent}', number {head.sequence}: it was moved here")
        return head

    # ---- rounds -------------------------------------------------------------------------------------------------

    def round_folder(self, number: int) -> Path:
        """Where decision and reports of a round are."""
        return self.path / "rounds" / f"round-{number:04d}"

    def state_folder(self, number: int) -> Path:
        """Where the state of a round is, or would be."""
        return self.path / "state" / f"round-{number:04d}"

    def made_rounds(self) -> list[int]:
        """The rounds whose states are there, oldest first; 0 is the base."""
        return _numbered(self.path / "state", "round")

    def making_of_state(self, number: int) -> tuple[tuple[str, int], ...]:
        """What there is of a state that is not made yet: changes as long as somebody works on it."""
        files = [self.round_folder(number) / "report.json"]  # written before the state
        files += (self.path / "state").glob(f".{self.state_folder(number).name}{PARTIAL}*/*")
        found = []
        for path in sorted(files):
            with suppress(OSError):
                found.append((str(path), path.stat().st_size))
        return tuple(found)

    def generalist_folder(self, number: int) -> Path:
        """Where the exported generalist of a round is, or would be."""
        return self.path / "generalist" / f"round-{number:04d}"

    def decisions(self) -> list[Decision]:
        """
        All decisions, in order.

        Raises:
            `DamagedFileError`: if one cannot be trusted, or one between others is missing.
        """
        made = []
        for number in _numbered(self.path / "rounds", "round"):
            path = self.round_folder(number) / "decision.json"
            try:
                decision = Decision(**read_json(path))
            except FileNotFoundError:
                continue  # the folder is made before the decision
            except (TypeError, ValidationError) as error:
                raise DamagedFileError(f"{path} is damaged: {error}") from error
            if decision.round != number:
                raise DamagedFileError(f"{path} is of round {decision.round}: it was moved here")
            made.append(decision)
        numbers = [decision.round for decision in made]
        if numbers != list(range(1, len(made) + 1)):
            raise DamagedFileError(
                f"{self.path / 'rounds'}: decisions of rounds {numbers} are there, some are missing"
            )
        # A state or an export is made after its decision, never before.
        outcomes = [*_numbered(self.path / "state", "round"), *_numbered(self.path / "generalist", "round")]
        if max(outcomes, default=0) > len(made):
            lost = self.round_folder(max(outcomes)) / "decision.json"
            raise DamagedFileError(f"{lost} is missing, though what was made of it is there; restore it")
        return made

    def decide(self, decision: Decision) -> bool:
        """
        Makes a decision, unless another has been made for that round.

        Returns:
            `bool`: whether this call made it; if not, the one that counts is in `decisions()`.
        """
        folder = self.round_folder(decision.round)
        folder.mkdir(parents=True, exist_ok=True)
        return link_json(folder / "decision.json", decision.model_dump(mode="json"))

    def latest(self) -> int | None:
        """
        The round whose exported generalist is the newest; `None` before the first export.

        Raises:
            `DamagedFileError`: if the pointer cannot be trusted.
        """
        path = self.path / "generalist" / "latest.json"
        try:
            held = read_json(path)
        except FileNotFoundError:
            return None
        if held.keys() != {"round", "folder"}:
            raise DamagedFileError(f"{path} is damaged: it holds {sorted(held)}")
        return int(held["round"])

    def point_latest(self, number: int) -> None:
        """Points `generalist/latest.json` to a round, unless it points to a newer one, or a newer one is there."""
        while True:
            try:
                newest = self.latest()
            except DamagedFileError:
                newest = None  # replaced by a good one
            if newest is not None and newest >= number:
                return
            folder = self.generalist_folder(number).name
            write_json(self.path / "generalist" / "latest.json", {"round": number, "folder": folder})
            # Another exporter may have pointed to a newer one between the look and the write.
            exported = max(_numbered(self.path / "generalist", "round"), default=number)
            if exported <= number:
                return
            number = exported

    # ---- housekeeping -------------------------------------------------------------------------------------------

    def sweep(self, keep: int, living: Sequence[str]) -> None:
        """
        Removes what nobody needs any more.

        Kept are the base (state 0); states and exports of the last `keep` rounds; every state that a living agent may
        still have loaded, or that a publication still to be merged is measured against; of publications, the newest
        of each agent, those of rounds whose state is not made yet, and those that a living agent has yet to load past.
        A file that cannot be removed is left for the next time.

        Args:
            keep (`int`):
                Rounds to keep, at least 1.
            living (`Sequence[str]`):
                Agents that train on.
        """
        decisions = self.decisions()
        newest, observing = len(decisions), self.described()["identity"]["resync"] == "none"
        rounds = {agent: beat["round"] for agent in living if (beat := self.heartbeat(agent)) is not None}
        loaded = [] if observing else list(rounds.values())
        unmade = [d for d in decisions if not self.state_folder(d.round).exists() and d.round > newest - keep]
        unloaded = [d for d in decisions if d.round > min(loaded, default=newest)]
        wanted = {(p.agent, p.sequence) for d in (*unmade, *unloaded) for p in d.publications}
        bases = [base for d in unmade for base in (d.round - 1, *(p.base_round for p in d.publications))]
        doomed = []
        for agent in self.agents():
            numbers = _numbered(self.agent_folder(agent), "publication")
            doomed += [self.publication_folder(agent, n) for n in numbers[:-1] if (agent, n) not in wanted]
            try:
                head = self.newest_publication(agent)
            except (DamagedFileError, OSError):
                continue  # it is refused by name when a round closes
            if head is not None and last_consumed(agent, decisions) <= head.base_round:
                bases.append(head.base_round)
        oldest = min([newest - keep + 1, *loaded, *([] if observing else bases)])
        doomed += [self.state_folder(n) for n in self.made_rounds() if 0 < n < oldest]
        try:
            pointed = self.latest()
        except DamagedFileError:
            pointed = None  # the next export mends it
        exports = _numbered(self.path / "generalist", "round")
        doomed += [self.generalist_folder(n) for n in exports[:-keep] if n != pointed]
        # Half-made folders of rounds so old belong to processes that were killed.
        doomed += [
            path
            for kind in ("state", "generalist")
            for path in (self.path / kind).glob(f".round-*{PARTIAL}*")
            if (number := re.match(r"\.round-(\d+)", path.name)) and int(number[1]) < oldest
        ]
        for folder in doomed:
            # Renamed first: a folder that is half removed must not be seen.
            with suppress(OSError):
                away = partial(folder)
                os.rename(folder, away)
                shutil.rmtree(away)


def _numbered(folder: Path, kind: str) -> list[int]:
    """Numbers of the finished `kind-NUMBER` entries of a folder, sorted."""
    if not folder.is_dir():
        return []
    pattern = re.compile(rf"{kind}-(\d+)")
    found = [pattern.fullmatch(name) for name in os.listdir(folder) if PARTIAL not in name]
    return sorted(int(match[1]) for match in found if match)


def _differences(held: Any, given: Any, where: str = "") -> list[str]:
    if isinstance(held, dict) and isinstance(given, Mapping):
        keys = sorted(held.keys() | given.keys())
        return [d for key in keys for d in _differences(held.get(key), given.get(key), f"{where}.{key}".lstrip("."))]
    return [] if held == given else [f"{where} is {given!r} here, {held!r} there"]
