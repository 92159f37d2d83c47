"""What a launcher shows: the jobs' output with their names before it, and a table of the agents that stays current."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ram_trl.continual.export import round_report
from ram_trl.continual.hub import Hub, HubError
from ram_trl.continual.semantics import ages
from ram_trl.files import DamagedFileError, read_json
from ram_trl.runs.job import agent_folder
from ram_trl.runs.jobs import Plan

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
PLAIN_EVERY = 10.0
"""Seconds between two status lines where there is no terminal."""


class Board:
    """
    The view of a run. Use it as a context manager.

    Args:
        plan ([`Plan`]):
            The run.
        console ([`~rich.console.Console`]):
            Where it is shown; without a terminal, plain lines are printed.
    """

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._hub = Hub(plan.hub)
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        names = ["launcher", *(job.name for job in plan.jobs)]
        self._colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
        self._width = max(map(len, names))
        self._shown = 0.0
        self._last: list[str] = []

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, source: str, line: str) -> None:
        """Prints a line of a job, or of the launcher."""
        text = Text(f"[{source}]".ljust(self._width + 2), style=self._colours[source]).append(f" {line}", style="none")
        self._console.print(text, soft_wrap=True)

    def show(self, jobs: Mapping[str, str]) -> None:
        """Brings the table up to date, given the state of every job."""
        now = time.monotonic()
        if now - self._shown < (1.0 if self._live is not None else PLAIN_EVERY):
            return
        self._shown = now
        rows = agent_rows(self._plan, self._hub, jobs)
        if self._live is not None:
            self._live.update(_table(rows), refresh=True)
            return
        lines = [_sentence(row) for row in rows]
        for line in lines if lines != self._last else ():
            self.say("launcher", line)
        self._last = lines


def agent_rows(plan: Plan, hub: Hub, jobs: Mapping[str, str]) -> list[dict[str, str]]:
    """A row per agent: step, reward, round, density, λ, age, state; `-` for what is not known."""
    newest: dict[str, Any] = {}
    old: dict[str, int] = {}
    try:
        decisions = hub.decisions() if (hub.path / "hub.json").exists() else []
        if decisions:
            old = dict(ages(decisions[-1]))
            told = round_report(hub, len(decisions))
            newest = dict(told[1].agents) if told else {}
    except (HubError, DamagedFileError, OSError):
        decisions = []  # jobs say what is wrong with the hub
    rows = []
    for job in plan.jobs:
        for agent in job.agents:
            try:
                held = read_json(agent_folder(plan.out, agent) / "progress.json")
            except (FileNotFoundError, DamagedFileError):
                held = {}
            beat = hub.heartbeat(agent) or {}
            report = newest.get(agent)
            state = held.get("state", "starting") if jobs[job.name] == "running" else jobs[job.name]
            if hub.is_done(agent):
                state = "done" if hub.gave_up(agent) is None else "given up"
            lambda_ = None if report is None else report.lambda_
            reward = held.get("reward")
            rows.append({
                "agent": agent,
                "step": f"{held['step']}/{held['steps']}" if held.get("steps") else "-",
                "reward": "-" if reward is None else f"{reward:.3g}",
                "round": str(beat.get("round", "-")),
                "density": "-" if report is None else f"{report.density:.1%}",
                "lambda": "-" if lambda_ is None else f"{lambda_:.3f}",
                "age": str(old.get(agent, "-")),
                "state": state,
            })  # fmt: skip
    return rows


def _sentence(row: dict[str, str]) -> str:
    """A row without what is not known."""
    known = [f"{key} {value}" for key, value in row.items() if value != "-" and key not in ("agent", "state")]
    return f"agent '{row['agent']}': {', '.join([row['state'], *known])}"


def _table(rows: list[dict[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("agent", "state") else "right")
    for row in rows:
        table.add_row(*row.values())
    return table
