"""What goes on in a hub, read from its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from ram_trl.continual.export import round_report
from ram_trl.continual.heartbeat import Watch
from ram_trl.continual.hub import Hub
from ram_trl.continual.semantics import ages
from ram_trl.files import DamagedFileError, read_json


class AgentStatus(BaseModel):
    """
    An agent: steps made, round loaded, newest publication; it is `done`, `given up`, `alive`, `silent`, or just
    `joined`.
    """

    name: str
    state: str
    step: int
    round: int
    publication: int | None


class RoundStatus(BaseModel):
    """A round: whose publications went in, how old they were, what was counted, and whether it is exported."""

    round: int
    agents: dict[str, int]
    density: dict[str, float]
    lambda_: dict[str, float | None]
    sign_conflict: float | None
    scores: dict[str, float]
    exported: bool


class HubStatus(BaseModel):
    """A hub at one moment."""

    hub: Path
    run_id: str
    resync: str
    latest: int | None
    agents: list[AgentStatus]
    rounds: list[RoundStatus]


def hub_status(hub: Hub, alive: Sequence[str] | None = None) -> HubStatus:
    """
    Reads a hub.

    Args:
        hub (`Hub`):
            The hub.
        alive (`Sequence[str]`, *optional*):
            Agents whose heartbeat was seen to move; without it, that is not told.

    Raises:
        `HubError`, `DamagedFileError`: if it is not a hub, or cannot be trusted.
    """
    described = hub.described()
    return HubStatus(
        hub=hub.path,
        run_id=described["run_id"],
        resync=described["identity"]["resync"],
        latest=hub.latest(),
        agents=[_agent(hub, name, alive) for name in hub.agents()],
        rounds=[_round(hub, number) for number in range(1, len(hub.decisions()) + 1)],
    )


def _agent(hub: Hub, name: str, alive: Sequence[str] | None) -> AgentStatus:
    beat = hub.heartbeat(name) or {"step": 0, "round": 0}
    try:
        newest = hub.newest_publication(name)
    except DamagedFileError:
        newest = None  # agents refuse it by name; the table shows that there is none to use
    if hub.is_done(name):
        state = "done" if hub.gave_up(name) is None else "given up"
    elif alive is None:
        state = "joined"
    else:
        state = "alive" if name in alive else "silent"
    publication = newest.sequence if newest else None
    return AgentStatus(name=name, state=state, step=beat["step"], round=beat["round"], publication=publication)


def _round(hub: Hub, number: int) -> RoundStatus:
    decision = hub.decisions()[number - 1]
    told = round_report(hub, number)
    agents = told[1].agents if told else {}
    return RoundStatus(
        round=number,
        agents=dict(ages(decision)),
        density={name: agent.density for name, agent in agents.items()},
        lambda_={name: agent.lambda_ for name, agent in agents.items()},
        sign_conflict=told[1].sign_conflict if told else None,
        scores=_scores(hub, number),
        exported=hub.generalist_folder(number).exists(),
    )


def _scores(hub: Hub, number: int) -> dict[str, float]:
    held = [read_json(path) for path in sorted(hub.round_folder(number).glob("score-*.json"))]
    return {score["task"]: score["score"] for score in held}


def show_status(status: HubStatus, last: int = 10) -> RenderableType:
    """Tables of the agents and of the `last` rounds."""
    agents = Table("agent", "state", title=f"{status.hub}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("step", "round loaded", "publication"):
        agents.add_column(heading, justify="right")
    for agent in status.agents:
        agents.add_row(agent.name, agent.state, str(agent.step), str(agent.round), str(agent.publication or "-"))
    rounds = Table("round", "agents (age)", "density", "lambda", box=box.SIMPLE_HEAD)
    rounds.add_column("sign conflict", justify="right")
    rounds.add_column("scores")
    rounds.add_column("exported")
    for row in status.rounds[-last:]:
        rounds.add_row(
            str(row.round),
            ", ".join(name + (f" ({age})" if age else "") for name, age in row.agents.items()),
            ", ".join(f"{density:.1%}" for density in row.density.values()),
            ", ".join("-" if value is None else f"{value:.3f}" for value in row.lambda_.values()),
            "-" if row.sign_conflict is None else f"{row.sign_conflict:.1%}",
            ", ".join(f"{task} {score:.3g}" for task, score in row.scores.items()) or "-",
            ("latest" if row.round == status.latest else "yes") if row.exported else "no",
        )
    return Group(agents, rounds)


def watch(hub: Hub, console: Console, every: float, patience: float) -> None:
    """Shows the status until all agents are done or the user stops it."""
    seen = Watch(hub, patience)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = hub_status(hub, seen.alive(hub.agents()))
            live.update(show_status(status), refresh=True)
            if status.agents and all(agent.state == "done" for agent in status.agents):
                return
            time.sleep(every)
