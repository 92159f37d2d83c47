"""
What continual merging means: pure functions on publications, decisions and weights.

An agent publishes the active part of its update; a decision lists the publications that make a round; the state of
round k is the state of round k − 1 plus the merge of what was decided; loading it leaves with the agent whatever the
round did not consume. Everything else (files, trainers, processes) serves these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ram_trl.engine import elementwise

Resync = Literal["generalist", "none"]


class Publication(BaseModel):
    """
    The head of a publication: whose update, and against what.

    Args:
        agent (`str`):
            Name of the agent.
        sequence (`int`):
            Number of the publication, from 1, per agent.
        base_round (`int`):
            Round the agent had last loaded (b_t); its update is measured against that state.
        step (`int`):
            Optimizer steps the agent had made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str
    sequence: int = Field(ge=1)
    base_round: int = Field(ge=0)
    step: int = Field(ge=0)


class Decision(BaseModel):
    """
    What makes up a round. Once it exists, state and export of the round are pure functions of it.

    Args:
        round (`int`):
            Number of the round, from 1.
        publications (`tuple[Publication, ...]`):
            In sorted order of agent names, one per agent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: int = Field(ge=1)
    publications: tuple[Publication, ...]

    def of(self, agent: str) -> Publication | None:
        """The publication of an agent in this round."""
        return next((p for p in self.publications if p.agent == agent), None)


def last_consumed(agent: str, decisions: Iterable[Decision]) -> int:
    """The latest round that consumed a publication of the agent; 0 if none did."""
    return max((d.round for d in decisions if d.of(agent) is not None), default=0)


def consumable(newest: Iterable[Publication], decisions: Sequence[Decision], resync: Resync) -> list[Publication]:
    """
    The publications that the next round may take, by agent.

    A publication holds all of an agent's update since it loaded round `base_round`. If a later round has consumed an
    earlier publication of that agent, part of the update is in the state already, and taking it would count it twice:
    it has to wait until the agent has loaded that round and published again. In observe mode (`resync="none"`)
    nothing is ever consumed: every round takes the newest of every agent.

    Args:
        newest (`Iterable[Publication]`):
            The newest publication of each agent.
        decisions (`Sequence[Decision]`):
            All decisions so far.
        resync (`str`):
            `"generalist"` or `"none"`.
    """
    fresh = [p for p in newest if resync == "none" or last_consumed(p.agent, decisions) <= p.base_round]
    return sorted(fresh, key=lambda p: p.agent)


def loaded(theta: Tensor, before: Tensor, state: Tensor, consumed: Tensor | None, carry: bool) -> Tensor:
    """
    θ ← S_k + (θ − S_b − τ̂): what an agent trains on from, all float32 and of one shape.

    Where the state did not change and nothing was consumed, θ stays as it is, to the bit; where nothing is left of
    the agent's own update, it is S_k, to the bit.

    Args:
        theta (`Tensor`):
            The agent's weights now.
        before (`Tensor`):
            S_b, which it last loaded.
        state (`Tensor`):
            S_k, which it loads.
        consumed (`Tensor`, *optional*):
            τ̂, the part of its update that a round up to k consumed; `None` if none did.
        carry (`bool`):
            Keep what was not consumed. Otherwise the result is S_k.
    """
    if not carry:
        return state.clone()
    return elementwise.carry(theta, before, state, torch.zeros_like(theta) if consumed is None else consumed)


Restart = Literal["go on", "load and carry", "load and drop"]


def restart(agent: str, base_round: int, decisions: Sequence[Decision]) -> Restart:
    """
    What an agent does that comes back from a checkpoint taken when it had last loaded `base_round`.

    With no newer round it goes on as it is. If a newer round consumed a publication of it, its checkpoint may hold
    what that publication held, in a form nobody can tell apart: it loads the newest state and drops its own update.
    Otherwise it loads the newest state and carries its update.
    """
    newest = max((d.round for d in decisions), default=0)
    if newest <= base_round:
        return "go on"
    return "load and drop" if last_consumed(agent, decisions) > base_round else "load and carry"


def ages(decision: Decision) -> Mapping[str, int]:
    """How many rounds behind each publication's base is: 0 for an agent that had loaded the round before."""
    return {p.agent: decision.round - 1 - p.base_round for p in decision.publications}
