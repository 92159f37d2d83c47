"""
An agent in a hub: joins, publishes, closes rounds with others, loads, finishes, comes back.

This is the life of an agent without any trainer: `callback.py` calls it at the right moments, tests drive it directly.
Every method is collective: all ranks of the job, in the same order.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ram_trl.config import ContinualConfig
from ram_trl.continual.closing import Closer
from ram_trl.continual.founding import compare_with_base, write_base_state
from ram_trl.continual.heartbeat import Heartbeat
from ram_trl.continual.hub import Hub, HubError
from ram_trl.continual.rounds import Rounds
from ram_trl.continual.semantics import Decision, Publication, ages, last_consumed, loaded, restart
from ram_trl.engine.counting import make_plan
from ram_trl.engine.criterion import active
from ram_trl.engine.digest import Digest
from ram_trl.engine.plan import Counts
from ram_trl.engine.workers import Workers
from ram_trl.files import DamagedFileError, read_json, write_json
from ram_trl.weights import Span, Store, cut
from ram_trl.weights.block_folders import write_folder
from ram_trl.weights.live.lora import Live
from ram_trl.weights.sparse import BLOCK, Blocks, BlockWriter, blocks

logger = logging.getLogger(__name__)

SAY_EVERY = 10.0
"""Seconds between two signs of rank 0 to the other ranks while it waits: no collective may time out."""


class MemberState(BaseModel):
    """
    What a training checkpoint has to carry so that the agent can come back.

    Args:
        run_id (`str`):
            The hub's run.
        agent (`str`):
            The agent.
        round (`int`):
            The round it had last loaded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    agent: str
    round: int = Field(ge=0)


class Met(BaseModel):
    """
    What came of a merge point.

    Args:
        published (`bool`):
            Whether the agent's update was published.
        round (`int`, *optional*):
            The round that was loaded (in observe mode: closed); `None` if there was none.
        density (`float`, *optional*):
            Active share of the agent's entries in what it published.
        exchange_mb (`float`):
            Megabytes published by the job.
        train_s (`float`):
            Seconds since the merge point before.
        turns_s (`float`):
            Seconds that agents of the same process had their turns.
        wait_s, merge_s, publish_s (`float`):
            Seconds waited for other agents beyond that, seconds of own work, and those of it spent in publishing.
        report (`dict[str, Any]`, *optional*):
            The report of the round, as in the hub.
        age (`int`, *optional*):
            Rounds between what the agent's publication was measured against and the round that consumed it, less 1.
    """

    published: bool = False
    round: int | None = None
    density: float | None = None
    exchange_mb: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    turns_s: float = 0.0
    wait_s: float = 0.0
    merge_s: float = 0.0
    report: dict[str, Any] | None = None
    age: int | None = None


class Member:
    """
    An agent in a hub.

    If its process dies, the others go on without it after `patience` seconds; what it had published stays in the hub
    and is merged once. When it comes back from a checkpoint it loads the newest state and carries its own update,
    unless part of that update was merged meanwhile (`continual.restart`).

    Args:
        hub (`Hub`):
            The hub; made by the first agent that joins.
        agent (`str`):
            Its name.
        base (`Path`):
            Folder of the checkpoint that training starts from.
        live (`LiveWeights` or `LoraWeights`):
            The model's weights.
        config (`ContinualConfig`):
            How it merges.
        export (`Callable[[int], None]`, *optional*):
            Called on rank 0 of the job that closed a round, with its number, once its state is made.
        rest (`Callable[[float], None]`, *optional*):
            Called on every rank while waiting, with seconds to wait; agents that take turns hand over here.
        look_for (`float`, *optional*):
            Seconds that rank 0 looks for a round before it tells the others and all rest; 0 for agents that take
            turns.
        aside (`Callable[[], AbstractContextManager[None]]`, *optional*):
            Entered on every rank around waiting, in which no weight is touched.
        given (`Callable[[], float]`, *optional*):
            Seconds that this agent gave to others of its process so far.
        goes_on (`Callable[[], bool]`, *optional*):
            Asked from another thread whether the agent still trains; if not, its heartbeat ends.
    """

    def __init__(
        self,
        hub: Hub,
        agent: str,
        base: Path,
        live: Live,
        config: ContinualConfig,
        *,
        export: Callable[[int], None] = lambda number: None,
        rest: Callable[[float], None] = time.sleep,
        look_for: float = SAY_EVERY,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
        given: Callable[[], float] = lambda: 0.0,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self.hub = hub
        self.agent = agent
        self.round = 0
        self.run_id = ""
        self._base = base
        self._live = live
        self._config = config
        self._export = export
        self._rest = rest
        self._look_for = look_for
        self._aside = aside
        self._given = given
        self._goes_on = goes_on
        self._pause = min(0.2, config.heartbeat / 4)
        self._team = live.team
        self._heartbeat: Heartbeat | None = None
        self._rounds: Rounds
        self._closer: Closer

    @property
    def observes(self) -> bool:
        """Whether agents only publish and never load."""
        return self._config.resync == "none"

    def state_of(self, number: int) -> Blocks:
        """The state of a round that has been made, as a store. Not collective."""
        return self._rounds.state(number)

    def state(self) -> MemberState:
        """What a checkpoint taken now has to carry. Not collective."""
        return MemberState(run_id=self.run_id, agent=self.agent, round=self.round)

    # ---- joining ------------------------------------------------------------------------------------------------

    def join(self, step: int, checkpoint: MemberState | None, resume: bool) -> str:
        """
        Joins the run, and loads its newest state.

        Args:
            step (`int`):
                Optimizer steps made.
            checkpoint (`MemberState`, *optional*):
                From the checkpoint that training goes on from; `None` for a fresh start, when the weights have to be
                the base's.
            resume (`bool`):
                Allow a name that has been in this hub before.

        Returns:
            `str`: a sentence about what was loaded and carried.

        Raises:
            `HubError`: if the hub is another run's, or the agent's name is taken.
            `MergeInputError`: if the weights are not the base's, naming tensors and both values.
        """
        self._live.refresh()
        rounded, fingerprint = compare_with_base(self._live, self._base, self.agent, checkpoint is not None)
        identity = {
            "shapes": {name: list(self._live.shape(name)) for name in self._live.names()},
            "base": fingerprint,
            "merge": self._config.merge.settled(),
            "resync": self._config.resync,
        }
        if self._config.export_rank is not None:
            identity["export_rank"] = self._config.export_rank

        def enter() -> dict[str, Any]:
            if not self._team.first:
                return {}
            described = self.hub.create_or_join(identity, {"rounded": rounded})
            self._enter_by_name(checkpoint, resume or checkpoint is not None, described["run_id"])
            return described

        described = self._team.share(self._team.together(enter))
        self.run_id = described["run_id"]
        self._rounds = Rounds(self.hub, self._team, described["identity"])
        self._closer = Closer(self.hub, self._rounds, self.agent, self._config)
        write_base_state(self._live, self._base, self.hub, described["founding"]["rounded"])
        told = self._load_on_joining(checkpoint)
        self._tell(step)
        self._went_on = time.monotonic()
        return told

    def _enter_by_name(self, checkpoint: MemberState | None, resume: bool, run_id: str) -> None:
        if checkpoint is not None and (checkpoint.run_id, checkpoint.agent) != (run_id, self.agent):
            raise HubError(
                f"the checkpoint is of agent '{checkpoint.agent}' in run {checkpoint.run_id}, but {self.hub.path} is "
                f"run {run_id} and this is agent '{self.agent}'; resume from a checkpoint of this run"
            )
        if self.agent in self.hub.agents() and not resume:
            raise HubError(
                f"agent '{self.agent}' has been in {self.hub.path} before; pass resume=True (or resume from a "
                "checkpoint) to go on under that name, or name another hub folder"
            )
        self._heartbeat = Heartbeat(self.hub, self.agent, self._config.heartbeat, self._goes_on)
        self._heartbeat.start()
        self.hub.tidy(self.agent)
        self.hub.unfinish(self.agent)

    def _load_on_joining(self, checkpoint: MemberState | None) -> str:
        decisions = self._decisions()
        if checkpoint is not None:
            self.round = checkpoint.round
        if self.observes:
            return f"agent '{self.agent}' observes; it publishes and never loads"
        if checkpoint is None:
            self.round = len(decisions)
            state = self._made_state(decisions)
            self._overwrite(lambda span: span.of(state))
            return f"agent '{self.agent}' starts from round {self.round}"
        verdict = restart(self.agent, checkpoint.round, decisions)
        if verdict == "go on":
            return f"agent '{self.agent}' goes on from round {self.round}, which is still the newest"
        newest = self._made_state(decisions)
        if verdict == "load and carry" and self._team.ask(self.hub.state_folder(self.round).exists):
            self._move(newest, None, len(decisions))
            return f"agent '{self.agent}' loads round {self.round} and carries its own update"
        why = "part of it was merged meanwhile" if verdict == "load and drop" else "its old state was removed"
        return self._load_and_drop(decisions, why)

    def _load_and_drop(self, decisions: list[Decision], why: str) -> str:
        newest = self._made_state(decisions)
        lost, since = self._residual_norm(), self.round
        self.round = len(decisions)
        self._overwrite(lambda span: span.of(newest))
        dropped = f"drops its own update since round {since} (norm {lost})"
        return f"agent '{self.agent}' loads round {self.round} and {dropped}: {why}"

    def _residual_norm(self) -> str:
        if not self._team.ask(self.hub.state_folder(self.round).exists):
            return "unknown"
        before = self._rounds.state(self.round)

        def square_here() -> float:
            taus = (span.of(self._live) - span.of(before) for span in cut(self._live.owned(), BLOCK))
            return sum(float(tau.dot(tau)) for tau in taus)

        square = self._team.together(square_here)
        return f"{float(self._team.reduce(torch.tensor([square], dtype=torch.float64), 'sum')) ** 0.5:.4g}"

    # ---- a merge point ------------------------------------------------------------------------------------------

    def meet(self, step: int) -> Met:
        """
        A merge point: publish, wait for the round, load it.

        Raises:
            `HubError`, `MergeInputError`, `BlockFileError`, `DamagedFileError`: what cannot be right is never merged.
            `OSError`: if the hub cannot be read or written, with `on_hub_error="raise"`.
        """
        self._check_intruder()
        started, given = time.monotonic(), self._given()
        met = Met(train_s=started - self._went_on)
        try:
            self.catch_up()
            caught_up = time.monotonic()
            counts, size = self.publish(step)
            met.publish_s = time.monotonic() - caught_up
            met.published = True
            met.density = int(counts.active[0]) / counts.entries
            met.exchange_mb = size / 1e6
            published, before = time.monotonic(), self._given()
            closed = self.close(late=False) if self.observes else self._wait_for_round()
            decisions = self._decisions()
            met.wait_s = time.monotonic() - published - (self._given() - before)
            if closed or len(decisions) > self.round:
                self._finish_round(decisions, closed, met)
        except OSError as error:
            if self._config.on_hub_error == "raise":
                raise
            logger.warning(
                "agent '%s' goes on without merging at step %d: the hub failed (%s)", self.agent, step, error
            )
        met.turns_s = self._given() - given
        met.merge_s = time.monotonic() - started - met.wait_s - met.turns_s
        self._tell(step)
        self._note_times(step, met)
        return met

    def catch_up(self) -> None:
        """
        Loads the newest round where publishing makes no sense before: if a publication of this agent was consumed
        since the last load, or if the state it had loaded was removed while it stalled (its update is dropped then).
        """
        self._live.refresh()
        decisions = self._decisions()
        if self.observes:
            return
        if not self._team.ask(self.hub.state_folder(self.round).exists):
            logger.warning(self._load_and_drop(decisions, "its old state was removed"))
        elif last_consumed(self.agent, decisions) > self.round:
            self.load(decisions)

    def publish(self, step: int) -> tuple[Counts, int]:
        """
        Publishes what the criterion counts as changed since the last load (in observe mode: since the base).

        Returns:
            `tuple[Counts, int]`: what was counted in the whole model, and bytes published by the job.

        Raises:
            `MergeInputError`: if a weight is NaN or Inf.
            `OSError`: if the hub cannot be written; nothing of the publication is visible then.
        """
        self._live.refresh()
        base_round = 0 if self.observes else self.round
        merge, names, owned = self._config.merge, self._live.names(), list(blocks(self._live.owned()))
        dtypes = {name: torch.bfloat16 if merge.ulp else self._live.dtype(name) for name in names}
        before = self._team.together(lambda: self._rounds.state(base_round))
        live: Mapping[str, Store] = {self.agent: self._live}
        with Workers() as workers:
            plan = self._team.together(
                lambda: make_plan(before, live, merge, workers, spans=owned, reduce=self._team.reduce, chunk=BLOCK)
            )

            def write(writer: BlockWriter) -> None:
                for span in owned:
                    theta, reference = span.of(self._live), span.of(before)
                    tau, threshold = theta - reference, plan.thresholds[0]
                    mask, _ = active(theta, reference, tau, merge, threshold, torch.float32)
                    kept = theta if merge.ulp else self._live.stored(span.name, span.start, span.stop)
                    writer.add(span, kept.to(dtypes[span.name]), mask)

            sequence = self._team.ask(lambda: self.hub.next_sequence(self.agent))
            head = Publication(agent=self.agent, sequence=sequence, base_round=base_round, step=step)
            folder = self.hub.publication_folder(self.agent, sequence)
            write_folder(self._team, folder, head.model_dump(), dtypes, write)
        return plan.total, self._team.ask(lambda: self._size_of(folder))

    def _size_of(self, folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.iterdir())

    def _finish_round(self, decisions: list[Decision], closed: bool, met: Met) -> None:
        self._made_state(decisions, closer=closed)
        if self.observes:
            self.round = len(decisions)
        else:
            self.load(decisions)
        met.round = self.round
        own = decisions[-1].of(self.agent)
        met.age = ages(decisions[-1])[self.agent] if own is not None else None
        met.report = self._round_report(met.round)
        if closed:
            self._team.ask(partial(self._export, self.round))
            self._team.ask(self._sweep)

    # ---- closing rounds -----------------------------------------------------------------------------------------

    def _wait_for_round(self) -> bool:
        """Waits until there is a round newer than what is loaded, or for too long; whether this job closed it."""
        deadline = time.monotonic() + self._config.timeout
        outcome = "waiting"
        with self._aside():
            while outcome == "waiting":
                outcome = self._team.share(self._team.together(lambda: self._watch_for_round(deadline)))
                if outcome == "waiting":
                    self._rest(self._pause)
        return outcome == "closed"

    def _watch_for_round(self, deadline: float) -> str:
        """Rank 0 watches for some seconds: `"decided"`, `"closed"` (by this job), `"nothing"` or `"waiting"`."""
        if not self._team.first:
            return ""
        until = time.monotonic() + self._look_for
        while True:
            decisions = self.hub.decisions()
            if len(decisions) > self.round:
                return "decided"
            late = time.monotonic() > deadline
            if self._closer.close(decisions, late):
                return "closed"
            if late:
                return "nothing"
            if self._heartbeat is not None:
                self._heartbeat.check()
            if time.monotonic() >= until:
                return "waiting"
            time.sleep(self._pause)

    def close(self, late: bool) -> bool:
        """
        Closes a round if the wait policy is met, or if it is `late` and there is anything to merge; makes its state.

        Returns:
            `bool`: whether a round was closed by this call.
        """
        closed = self._team.ask(lambda: self._closer.close(self.hub.decisions(), late))
        if closed:
            self._made_state(self._decisions(), closer=True)
        return closed

    def _made_state(self, decisions: list[Decision], closer: bool = False) -> Blocks:
        """The newest state; waits for the job that closed the round to make it, or makes it in its place."""
        for decision in decisions[-1:] if self.observes else self._unmade(decisions):
            folder = self.hub.state_folder(decision.round)
            seen, moved = None, time.monotonic()
            with self._aside() if not closer and not self._team.ask(folder.exists) else nullcontext():
                while not self._team.ask(folder.exists):
                    # Patience is for a job that died, not for one that has much to write.
                    made = self._team.ask(partial(self.hub.making_of_state, decision.round))
                    if made != seen:
                        seen, moved = made, time.monotonic()
                    if self._team.share(closer or time.monotonic() - moved > self._config.patience):
                        with Workers() as workers:
                            self._rounds.make_state(decision, self._live.owned(), workers)
                    else:
                        self._rest(self._pause)
        return self._team.together(lambda: self._rounds.state(len(decisions)))

    def _unmade(self, decisions: list[Decision]) -> list[Decision]:
        """The newest run of decisions without a state, oldest first."""
        unmade: list[Decision] = []
        for decision in reversed(decisions):
            if self._team.ask(self.hub.state_folder(decision.round).exists):
                break
            unmade.insert(0, decision)
        return unmade

    # ---- loading ------------------------------------------------------------------------------------------------

    def load(self, decisions: list[Decision]) -> None:
        """θ ← S_k + (θ − S_b − τ̂ if consumed), b ← k, for the newest round k."""
        self._live.refresh()
        state = self._made_state(decisions)
        taken = next((p for d in decisions[self.round :] if (p := d.of(self.agent)) is not None), None)
        self._move(state, taken, len(decisions))

    def _move(self, state: Blocks, taken: Publication | None, number: int) -> None:
        def opened() -> tuple[Blocks, tuple[Blocks, Blocks] | None]:
            own = (self._rounds.publication(taken), self._rounds.reference(taken)) if taken is not None else None
            return self._rounds.state(self.round), own

        before, own = self._team.together(opened)

        def target(span: Span) -> Tensor:
            theta = self._live.read(span.name, span.start, span.stop)
            last, new = span.of(before), span.of(state)
            consumed = None
            if taken is not None and own is not None:
                against = last if taken.base_round == self.round else span.of(own[1])
                consumed = own[0].over(span, against) - against
            digest.add(span, new)
            return loaded(theta, last, new, consumed, self._config.carry)

        digest = Digest(self._live.names())
        self._overwrite(target)
        self.round = number
        self._compare_digest(number, digest)

    def _overwrite(self, target: Callable[[Span], Tensor]) -> None:
        def write() -> None:
            with Workers():
                for span in blocks(self._live.held()):
                    self._live.write(span.name, span.start, target(span))

        self._team.together(write)
        self._live.commit()

    def _compare_digest(self, number: int, digest: Digest) -> None:
        """Stops if another job loaded other numbers for this round."""
        shares = [] if self._live.replicated else self._team.collect(digest.share())
        own = digest.sums(share for rank, share in enumerate(shares) if rank != self._team.rank)

        def compare() -> None:
            if not self._team.first:
                return
            folder = self.hub.round_folder(number)
            write_json(folder / f"digest-{self.agent}.json", own, durable=False)
            for path in sorted(folder.glob("digest-*.json")):
                try:
                    other = read_json(path)
                except (DamagedFileError, FileNotFoundError):
                    continue  # it is rewritten when that agent loads again
                differing = [name for name in sorted(own) if other.get(name) != own[name]]
                if differing:
                    raise HubError(
                        f"agent '{self.agent}' and agent '{path.stem.removeprefix('digest-')}' loaded different "
                        f"weights for round {number}; the first tensor that differs is '{differing[0]}'"
                    )

        self._team.together(compare)

    def as_generalist(self, work: Callable[[], float]) -> float:
        """
        Runs `work` with the weights set to the newest state, then puts the agent's own back, to the bit.

        Needs memory for a copy of what this rank holds, on the CPU.
        """
        state = self._team.together(lambda: self._rounds.state(self.round))
        with self._live.showing(lambda span: span.of(state)):
            return work()

    def note_score(self, task: str, score: float) -> None:
        """Writes the score of the newest generalist to the hub, for the status. Rank 0 alone."""
        path = self.hub.round_folder(self.round) / f"score-{self.agent}.json"
        write_json(path, {"task": task, "score": score}, durable=False)

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self, step: int) -> Met:
        """
        The end of training: publishes what is left and is waited for no more; the last agent closes a final round.
        """
        started = time.monotonic()
        met = Met(train_s=started - self._went_on)
        try:
            self.catch_up()
            counts, size = self.publish(step)
            met.published, met.density, met.exchange_mb = True, int(counts.active[0]) / counts.entries, size / 1e6
            met.publish_s = time.monotonic() - started
            self._team.ask(lambda: self.hub.finish(self.agent, step))
            if self._team.ask(self._closer.close_the_last):
                decisions = self._decisions()
                self._made_state(decisions, closer=True)
                met.round = len(decisions)
                met.report = self._round_report(met.round)
                self._team.ask(partial(self._export, met.round))
        except OSError as error:
            if self._config.on_hub_error == "raise":
                raise
            logger.warning("agent '%s': its last update was not published: the hub failed (%s)", self.agent, error)
        finally:
            met.merge_s = time.monotonic() - started
            self._tell(step)
            self._note_times(step, met)
            self.leave()
        return met

    def leave(self) -> None:
        """Stops the heartbeat. Not collective."""
        if self._heartbeat is not None:
            self._heartbeat.close()

    def tidy_up(self) -> None:
        """Once all that this job exports is there: removes what is not kept. Not collective."""
        if not self._team.first:
            return
        try:
            self._sweep()
        except (OSError, DamagedFileError) as error:
            logger.warning("agent '%s': old rounds were left in the hub (%s)", self.agent, error)

    def _sweep(self) -> None:
        living = self._closer.watch.alive([name for name in self.hub.agents() if not self.hub.is_done(name)])
        self.hub.sweep(self._config.keep_rounds, living)

    # ---- small things -------------------------------------------------------------------------------------------

    def _decisions(self) -> list[Decision]:
        return self._team.ask(self.hub.decisions)

    def _round_report(self, number: int) -> dict[str, Any] | None:
        def read() -> dict[str, Any] | None:
            try:
                return read_json(self.hub.round_folder(number) / "report.json")
            except (FileNotFoundError, DamagedFileError):
                return None  # a report is for people; the round does not depend on it

        return self._team.ask(read)

    def _note_times(self, step: int, met: Met) -> None:
        """Notes in the hub what a merge point took, for the report of the run."""
        self._went_on = time.monotonic()
        if not self._team.first:
            return
        kept = {"round", "train_s", "publish_s", "turns_s", "wait_s", "exchange_mb"}
        line = json.dumps({"step": step} | met.model_dump(include=kept) | {"merge_s": met.merge_s - met.publish_s})
        try:
            with self.hub.times_file(self.agent).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            logger.warning("agent '%s': its times were not noted (%s)", self.agent, error)

    def _tell(self, step: int) -> None:
        if self._heartbeat is not None:
            self._heartbeat.tell(self.round, step)

    def _check_intruder(self) -> None:
        self._team.together(lambda: self._heartbeat.check() if self._heartbeat is not None else None)
