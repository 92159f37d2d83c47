"""
Several trainers in one process: each agent's trainer runs in its own thread, and one thread at a time has the baton.

An agent hands the baton over when it waits for a round. Whatever is process-wide and a trainer must not share with
another (random number generators, the singletons of accelerate and transformers) is put back before it goes on, so
that every agent computes what it would compute alone. In a job of several ranks all of them hand over at the same
points, because an agent rests only where all ranks heard that it waits; so collectives of two agents never meet.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from transformers.integrations import deepspeed as deepspeed_integration

from ram_trl.training.parking import Parked

Result = TypeVar("Result")

IDLE = 0.05
"""Seconds. A cycle of turns all shorter than this was spent waiting for other jobs; they are not polled harder."""

_current = threading.local()


class _Stopped(BaseException):
    """Unwinds a resting agent when another has failed."""


@dataclass(frozen=True)
class _ProcessState:
    """What is process-wide and belongs to the agent that is running."""

    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    accelerator: dict[str, Any]
    gradient: dict[str, Any]
    deepspeed: Any

    @classmethod
    def seen(cls) -> _ProcessState:
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            dict(AcceleratorState._shared_state),
            dict(GradientState._shared_state),
            deepspeed_integration._hf_deepspeed_config_weak_ref,
        )

    def show(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        for singleton, held in ((AcceleratorState, self.accelerator), (GradientState, self.gradient)):
            singleton._shared_state.clear()
            singleton._shared_state.update(held)
        deepspeed_integration._hf_deepspeed_config_weak_ref = self.deepspeed


class _Agent(threading.Thread, Generic[Result]):
    def __init__(
        self,
        name: str,
        work: Callable[[], Result],
        state: _ProcessState,
        flush_denormal: bool,
        common: dict[Hashable, Any],
    ) -> None:
        super().__init__(daemon=True, name=f"agent-{name}")
        self.common = common
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.over = False
        self.alone = False
        self.given = 0.0
        self.idle = False
        self._work = work
        self._state = state
        self._flush_denormal = flush_denormal
        self._halted = False
        self._mine, self._yours = threading.Semaphore(0), threading.Semaphore(0)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.start()

    def run(self) -> None:
        self._mine.acquire()
        try:
            if not self._halted:
                _current.agent = self
                if self._device is not None:
                    torch.cuda.set_device(self._device)  # the current device is a thread's own
                torch.set_flush_denormal(self._flush_denormal)
                self.result = self._work()
        except BaseException as error:  # raised again by the main thread
            self.error = error
        self.over = True
        self._yours.release()

    def turn(self) -> float:
        """Main thread: lets the agent run until it rests or is over; returns the seconds that it did not just wait."""
        began = time.monotonic()
        self._state.show()
        self._mine.release()
        self._yours.acquire()
        self._state = _ProcessState.seen()
        took = time.monotonic() - began
        self.idle = took < IDLE
        if self.error is not None and not self._halted:
            raise self.error
        return 0.0 if self.idle else took

    def rest(self) -> None:
        """Agent's thread: gives the baton away until the next turn."""
        self._yours.release()
        self._mine.acquire()
        if self._halted:
            raise _Stopped

    def halt(self) -> None:
        """Main thread: unwinds the agent."""
        if not self.over:
            self._halted = True
            self._mine.release()
            self._yours.acquire()


def rest(seconds: float) -> None:
    """Waits: hands over to the other agents of this process, or sleeps if it has no turns to wait for."""
    agent = _agent()
    if agent is None:
        time.sleep(seconds)
    else:
        agent.rest()


def taking_turns() -> bool:
    """Whether the calling thread is that of an agent that takes turns."""
    return _agent() is not None


def given() -> float:
    """Seconds that other agents of this process had while the calling one waited, so far; 0 without turns."""
    agent = _agent()
    return 0.0 if agent is None else agent.given


def in_common(key: Hashable, make: Callable[[], Result]) -> Result | None:
    """What all agents of this process share under a key; the first one to ask makes it. `None` without turns."""
    agent = _agent()
    if agent is None:
        return None
    if key not in agent.common:
        agent.common[key] = make()
    shared: Result = agent.common[key]
    return shared


@contextmanager
def parked(*roots: Any, keep: Iterable[Tensor] = ()) -> Iterator[None]:
    """
    Within it the calling agent waits; what is reachable from `roots` is off its device if others may need it.

    Tensors to `keep` stay where they are: other agents use them, too.
    """
    agent = _agent()
    away = Parked(*roots, keep=keep) if agent is not None and not agent.alone else None
    try:
        yield
    finally:
        if away is not None:
            away.back()


def _agent() -> _Agent[Any] | None:
    return getattr(_current, "agent", None)


def take_turns(works: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
    """
    Runs several agents in this process, one at a time; they change over when they wait for a round.

    Every agent is a function that builds its trainer, with a [`RAMCallback`], and trains it. It must build everything
    it changes itself; nothing may be shared between agents but what is only read. Collective: in a job of several
    ranks every rank calls it, with the same agents in the same order.

    Args:
        works (`Mapping[str, Callable[[], Result]]`):
            The agents' functions by name, called in this order.

    Returns:
        `dict[str, Result]`: what the functions returned, by name.

    Raises:
        The error of the first agent that fails; the others are unwound.
    """
    first = _ProcessState.seen()
    flush_denormal = float(np.float32(1e-40)) == 0
    common: dict[Hashable, Any] = {}
    agents = {name: _Agent(name, work, first, flush_denormal, common) for name, work in works.items()}
    try:
        while running := [agent for agent in agents.values() if not agent.over]:
            for agent in running:
                agent.alone = len(running) == 1
                took = agent.turn()
                for other in running:
                    other.given += took if other is not agent else 0.0
            if all(agent.idle for agent in running if not agent.over):
                time.sleep(IDLE)
    finally:
        for agent in agents.values():
            agent.halt()
        first.show()
    return {name: agent.result for name, agent in agents.items()}  # type: ignore[misc]  # none failed
