"""
Checks before any work: what must agree between base and agents, found from names, shapes and headers alone.

Every check returns problems instead of raising, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from ram_trl.config import AGENT_NAME, MergeConfig
from ram_trl.problems import Problem, agent_place
from ram_trl.weights import MERGEABLE, Span, Store, cut, entries
from ram_trl.weights.naming import hints

MOST_AGENTS = 255
"""Agents that are active in an entry are counted in 8 bits."""

COMPARE_CHUNK = 1 << 20


def check_names(agents: Iterable[str], config: MergeConfig) -> list[Problem]:
    """Problems with the agents' names, and with weights for agents that are not there."""
    agents = sorted(agents, key=str)
    problems = []
    if not agents:
        problems.append(Problem("config", "no agents are given; name at least one"))
    if len(agents) > MOST_AGENTS:
        problems.append(Problem("config", f"{len(agents)} agents are given; at most {MOST_AGENTS} merge at once"))
    for agent in agents:
        if not AGENT_NAME.fullmatch(str(agent)):
            what = "the name may hold letters, digits, '.', '_' and '-' only and starts with a letter or digit"
            problems.append(Problem(agent_place(agent), what))
    for agent in sorted(config.weights.keys() - set(agents)):
        what = f"a weight is given for agent '{agent}', which is not among the agents ({', '.join(agents)})"
        problems.append(Problem("config", what))
    return problems


def check_layout(base: Store, agent: Store, where: str, unreadable: Iterable[str] = ()) -> list[Problem]:
    """
    Problems that keep `agent` from being compared with `base` tensor by tensor; tensors that are `unreadable` in
    either have been told about.
    """
    ours, theirs = set(base.names()) - set(unreadable), set(agent.names()) - set(unreadable)
    problems = [Problem(where, hint) for hint in hints(ours, theirs)]
    for name in sorted(ours - theirs):
        if name in agent.aliases:
            what = (
                f"'{name}' is tied to '{agent.aliases[name]}' here, but is a tensor of its own in the base; "
                "save both with the same `tie_word_embeddings`"
            )
            problems.append(Problem(where, what, name, "tied"))
        else:
            what = f"'{name}' {_described(base, name)} is missing; save the agent with the base's architecture"
            problems.append(Problem(where, what, name, "missing tensor"))
    for name in sorted(theirs - ours):
        tied_to = base.aliases.get(name)
        if tied_to is None:
            what = (
                f"'{name}' {_described(agent, name)} is not in the base; save the agent with the base's architecture"
            )
            problems.append(Problem(where, what, name, "extra tensor"))
        elif tied_to not in theirs:
            what = f"'{tied_to}', to which '{name}' is tied in the base, is missing; save the agent as the base is"
            problems.append(Problem(where, what, tied_to, "tied"))
        elif not same_entries(agent, name, tied_to):
            what = (
                f"'{name}' is tied to '{tied_to}' in the base, but has values of its own here; "
                "save both with the same `tie_word_embeddings`"
            )
            problems.append(Problem(where, what, name, "tied"))
    for name in sorted(ours & theirs):
        problems += _check_tensor(base, agent, name, where)
    return problems


def _check_tensor(base: Store, agent: Store, name: str, where: str) -> list[Problem]:
    if base.shape(name) != agent.shape(name):
        what = f"'{name}' has shape {_shape(agent, name)}, the base has {_shape(base, name)}"
        if base.shape(name)[1:] == agent.shape(name)[1:] and len(base.shape(name)) == 2:
            what += (
                f"; {agent.shape(name)[0]} rows against {base.shape(name)[0]}: if it is an embedding, the vocabulary "
                "was resized - train from the base as it is, or resize the base the same way"
            )
        return [Problem(where, what, name, "shape")]
    if prod(base.shape(name)) == 0:
        what = (
            f"'{name}' has no entries (shape {_shape(base, name)}): it was saved from a sharded model, gather it first"
        )
        return [Problem(where, what, name, "empty tensor")]
    kinds = base.dtype(name) in MERGEABLE, agent.dtype(name) in MERGEABLE
    if kinds == (True, True):
        return []
    if base.dtype(name) != agent.dtype(name):
        what = f"'{name}' is stored as {agent.dtype(name)}, the base as {base.dtype(name)}; these cannot be merged"
        return [Problem(where, what, name, "dtype")]
    if not same_bits(base, agent, name):
        what = (
            f"'{name}' ({base.dtype(name)}) is not a weight to merge but differs from the base's; "
            "it must be the same in base and agents"
        )
        return [Problem(where, what, name, "buffer")]
    return []


def same_entries(store: Store, name: str, other: str) -> bool:
    """Whether two tensors of a store are equal, bit for bit up to the sign of zero."""
    if store.shape(name) != store.shape(other):
        return False
    return all(
        torch.equal(store.read(name, span.start, span.stop), store.read(other, span.start, span.stop))
        for span in cut([Span(name, 0, entries(store, name))], COMPARE_CHUNK)
    )


def same_bits(store: Store, other: Store, name: str) -> bool:
    """Whether a tensor is the same in two stores, bit for bit; NaN equals itself."""
    if store.dtype(name) != other.dtype(name):
        return False
    return all(
        torch.equal(*(s.read(name, span.start, span.stop).contiguous().view(torch.uint8) for s in (store, other)))
        for span in cut([Span(name, 0, entries(store, name))], COMPARE_CHUNK)
    )


def _described(store: Store, name: str) -> str:
    return f"(shape {_shape(store, name)})"


def _shape(store: Store, name: str) -> str:
    return str(list(store.shape(name)))
