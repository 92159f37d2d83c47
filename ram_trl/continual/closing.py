"""Who is waited for, what can be merged, and when a round closes. Runs on rank 0 of a job; enters no collective."""

from __future__ import annotations

import logging

import torch

from ram_trl.config import ContinualConfig
from ram_trl.continual.heartbeat import Watch
from ram_trl.continual.hub import Hub
from ram_trl.continual.rounds import Rounds
from ram_trl.continual.semantics import Decision, Publication, consumable
from ram_trl.files import DamagedFileError
from ram_trl.weights.sparse import BlockFileError

logger = logging.getLogger(__name__)


class Closer:
    """
    Closes rounds for one agent's job. Of several that try, one makes the decision.

    Args:
        hub (`Hub`):
            The hub.
        rounds (`Rounds`):
            Its states and publications.
        agent (`str`):
            The agent.
        config (`ContinualConfig`):
            The wait policy.
    """

    def __init__(self, hub: Hub, rounds: Rounds, agent: str, config: ContinualConfig) -> None:
        self.watch = Watch(hub, config.patience)
        self._hub = hub
        self._rounds = rounds
        self._agent = agent
        self._config = config
        self._good: set[tuple[str, int]] = set()
        self._refused: set[tuple[str, int]] = set()
        self._told: set[tuple[str, int]] = set()
        self._sound_states: set[int] = set()

    def close(self, decisions: list[Decision], late: bool) -> bool:
        """Makes the next decision if the wait policy is met, or if it is `late` and there is anything to merge."""
        ready = self._consumable(decisions)
        names = {head.agent for head in ready}
        if self._config.resync == "none":
            # What stood in the last round may stand again, but alone it is no reason for a new one.
            before = {(p.agent, p.sequence) for p in decisions[-1].publications} if decisions else set()
            names = {head.agent for head in ready if (head.agent, head.sequence) not in before}
        missing = [agent for agent in self._expected() if agent not in names]
        wait = self._config.wait
        enough = len(names) >= wait if isinstance(wait, int) else wait == "available" or not missing
        if not names or not (enough or late):
            return False
        if not enough:
            told = ", ".join(missing) or "more agents"
            logger.warning("agent '%s' closes round %d without %s", self._agent, len(decisions) + 1, told)
        return self._hub.decide(Decision(round=len(decisions) + 1, publications=tuple(ready)))

    def _expected(self) -> list[str]:
        """Agents a round waits for: alive, not done; those named in the config even before they join."""
        joined = self._hub.agents()
        running = [agent for agent in joined if not self._hub.is_done(agent)]
        to_come = {agent for agent in self._config.agents if agent not in joined and not self._hub.is_done(agent)}
        return sorted({*self.watch.alive(running), *to_come})

    def _consumable(self, decisions: list[Decision]) -> list[Publication]:
        """What the next round may take, checked; what cannot be trusted is refused by name and left out."""
        heads = []
        for agent in self._hub.agents():
            try:
                head = self._hub.newest_publication(agent)
            except (DamagedFileError, OSError) as error:
                self._refuse(agent, 0, error)
                continue
            if head is not None:
                heads.append(head)
        fresh = consumable(heads, decisions, self._config.resync)
        return [head for head in fresh if self._trusted(head, len(decisions))]

    def _trusted(self, head: Publication, newest: int) -> bool:
        key = (head.agent, head.sequence)
        if key in self._good or key in self._refused:
            return key in self._good
        try:
            for span, values in self._rounds.publication(head).contents():
                if not torch.isfinite(values).all():
                    raise BlockFileError(f"'{span.name}' holds NaN or Inf within entries {span.start}-{span.stop}")
            # The newest state is read by all; of an older one, nobody but this agent may have seen that it is damaged.
            older = head.base_round if not self._rounds.observes and head.base_round != newest else None
            if older is not None and older not in self._sound_states:
                for _ in self._rounds.state(older).contents():
                    pass
                self._sound_states.add(older)
        except (DamagedFileError, BlockFileError, OSError) as error:
            self._refuse(*key, error)
            return False
        self._good.add(key)
        return True

    def _refuse(self, agent: str, sequence: int, error: Exception) -> None:
        if (agent, sequence) not in self._told:
            logger.warning("agent '%s': its publication is refused, rounds go on without it: %s", agent, error)
        self._told.add((agent, sequence))
        if not isinstance(error, OSError):  # a file system may come back, a damaged file does not
            self._refused.add((agent, sequence))

    def close_the_last(self) -> bool:
        """Makes a final decision if all agents are done and something is left to merge."""
        if not all(self._hub.is_done(agent) for agent in {*self._hub.agents(), *self._config.agents}):
            return False
        decisions = self._hub.decisions()
        ready = self._consumable(decisions)
        if self._config.resync == "none":
            # Agents never load, so those that made no step since have nothing new.
            before = {(p.agent, p.step) for d in decisions[-1:] for p in d.publications}
            left = [head for head in ready if (head.agent, head.step) not in before]
        else:
            left = [head for head in ready if self._rounds.publication(head).stored()]
        return bool(left) and self._hub.decide(Decision(round=len(decisions) + 1, publications=tuple(ready)))
