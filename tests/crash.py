"""
Processes that die at a chosen system call, and what has to be true of a hub afterwards.

`forked` runs work in a child made by `os.fork`, so that a case costs milliseconds: the child has everything loaded,
and what it changes in memory is gone with it.
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ram_trl.continual.hub import Hub
from ram_trl.continual.rounds import Rounds
from ram_trl.continual.semantics import Decision
from ram_trl.files import PARTIAL
from ram_trl.team import Team
from tests.models import contents
from tests.simulator import Agent, Published, Simulator

CALLS = ("write", "pwrite", "fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir", "ftruncate", "sendfile")
"""The functions of `os` that change a disk, as far as the hub uses them."""

WRITES = ("write", "pwrite")
DIED = object()
"""What `forked` returns for a child that was killed."""

Work = Callable[[], Any]


def forked(work: Work, fatal: int | None = None, when: str = "before") -> Any:
    """
    The result of `work` in a child process, or `DIED`.

    The child kills itself with SIGKILL at its call number `fatal` of those in `CALLS`: `before` or `after` it, or when
    `half` of it is written.
    """
    readable, writable = os.pipe()
    gc.freeze()  # a collection in the child would touch, and so copy, every page
    child = os.fork()
    if child == 0:
        gc.disable()
        write, calls = os.write, []
        os.close(readable)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        try:
            if fatal is not None:
                _arm(calls, fatal, when)
            told = ("result", work())
        except BaseException:
            told = ("error", traceback.format_exc())
        sent = memoryview(pickle.dumps(told))
        while sent:
            sent = sent[write(writable, sent) :]
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return DIED
    kind, value = pickle.loads(told)
    assert kind == "result", f"in the child:\n{value}"
    return value


def calls_of(work: Work) -> list[str]:
    """The names of the calls of `CALLS` that `work` makes, in order."""

    def traced() -> list[str]:
        calls: list[str] = []
        _arm(calls, -1, "before")
        work()
        return list(calls)

    return forked(traced)


def _arm(calls: list[str], fatal: int, when: str) -> None:
    lock = threading.Lock()

    def armed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("heartbeat"):
                return real(*args, **kwargs)  # these come when they like; the main thread's beats are counted
            with lock:
                number = len(calls)
                calls.append(name)
            if number == fatal:
                if when == "after":
                    with suppress(OSError):
                        real(*args, **kwargs)
                elif when == "half" and name in WRITES:
                    content = memoryview(args[1])
                    real(args[0], content[: len(content) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, armed(name, getattr(os, name)))


def restore(folder: Path, template: Path) -> None:
    """Makes `folder` a copy of `template` again."""
    shutil.rmtree(folder, ignore_errors=True)
    if template.exists():
        shutil.copytree(template, folder)


def visible(hub: Path) -> dict[str, bytes]:
    """Every file that a reader may look at: nothing below a `.partial-` name."""
    return {name: content for name, content in contents(hub).items() if PARTIAL not in name}


def made_things(hub: Path) -> dict[str, dict[str, bytes]]:
    """The files of every publication, state, export and decision, by folder."""
    found: dict[str, dict[str, bytes]] = {}
    for pattern in ("agents/*/publication-*", "state/round-*", "generalist/round-*"):
        for folder in hub.glob(pattern):
            found[str(folder.relative_to(hub))] = visible(folder)
    for path in hub.glob("rounds/round-*/decision.json"):
        found[str(path.relative_to(hub))] = {"": path.read_bytes()}
    return found


def check_latest(hub: Hub, base: Path) -> None:
    """`latest.json`, if there, names an export that loads, with every tensor of the base, equal to the state."""
    number = hub.latest()
    if number is None:
        return
    state = stores(hub).state(number)
    loaded = load_file(hub.generalist_folder(number) / "model.safetensors")
    assert loaded.keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor.flatten(), state.read(name, 0, tensor.numel())), name


def stores(hub: Hub) -> Rounds:
    """States and publications of a hub."""
    return Rounds(hub, Team(), hub.described()["identity"])


def check_consumed_once(decisions: list[Decision]) -> None:
    """No publication is in two rounds, and none holds what an earlier round has taken already."""
    last: dict[str, int] = {}
    seen = set()
    for decision in decisions:
        for head in decision.publications:
            assert (head.agent, head.sequence) not in seen, f"{head} is merged twice"
            assert last.get(head.agent, 0) <= head.base_round < decision.round, f"{head} holds what was merged"
            seen.add((head.agent, head.sequence))
            last[head.agent] = decision.round


def merged(base: Mapping[str, torch.Tensor], taken: list[list[tuple[str, Published]]]) -> list[dict[str, Any]]:
    """The states that rounds of these publications make, by the simulator."""
    simulator = Simulator(dict(base))
    for publications in taken:
        simulator.agents = {agent: Agent({}, 0, published) for agent, published in publications}
        simulator.close()
    return simulator.states


def published(hub: Hub, decision: Decision) -> list[tuple[str, Published]]:
    """The publications of a decision, decoded."""
    opened = stores(hub)
    found = []
    for head in decision.publications:
        store = opened.publication(head)
        theta = {n: store.read(n, 0, torch.Size(s).numel()).reshape(s) for n, s in opened.shapes.items()}
        found.append((head.agent, Published(head.base_round, theta)))
    return found


def replay(hub: Hub, base: Mapping[str, torch.Tensor]) -> None:
    """Every state that is made is what the decisions say, bit for bit; nothing was merged twice."""
    decisions = hub.decisions()
    check_consumed_once(decisions)
    states = merged(base, [published(hub, decision) for decision in decisions])
    opened = stores(hub)
    for number, expected in enumerate(states):
        if hub.state_folder(number).exists():
            state = opened.state(number)
            for name, tensor in expected.items():
                assert torch.equal(state.read(name, 0, tensor.numel()), tensor.flatten()), (number, name)
