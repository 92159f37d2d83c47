"""A run told from its hub: tables and plots of agents and rounds, as one HTML file and as Markdown."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ram_trl.continual.export import round_report
from ram_trl.continual.hub import Hub
from ram_trl.continual.semantics import ages
from ram_trl.continual.status import AgentStatus, hub_status
from ram_trl.telling.plots import Line, Panel, plot_panels
from ram_trl.telling.report import MergeReport


class Times(BaseModel):
    """
    A merge point of an agent, as it noted it in the hub.

    Args:
        step (`int`), round (`int`, *optional*):
            Its optimizer step, and the round it loaded.
        train_s, publish_s, turns_s, wait_s, merge_s (`float`):
            Seconds since the merge point before, of publishing, in which others of its job had their turns, of waiting
            for agents beyond that, of merging and loading.
        exchange_mb (`float`):
            Megabytes published.
    """

    step: int
    round: int | None
    train_s: float
    publish_s: float
    turns_s: float
    wait_s: float
    merge_s: float
    exchange_mb: float


@dataclass(frozen=True)
class Round:
    """A round: its number, how old each publication in it was, its report if there is one, scores by task."""

    number: int
    ages: dict[str, int]
    report: MergeReport | None
    scores: dict[str, float]


KINDS_OF_TIME = {
    "train": "train",
    "publish": "publish",
    "merge": "merge and load",
    "turns": "others' turns",
    "wait": "wait",
}
"""The fields of [`Times`], and what they are called."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows."""


def write_run_report(hub: Hub, out: Path) -> Path:
    """
    Writes `report.html` (with its pictures in it), `report.md` and the pictures.

    Args:
        hub (`Hub`):
            The hub of the run, which may still be going on.
        out (`Path`):
            Folder to write to; made if it is not there.

    Returns:
        `Path`: the HTML file.

    Raises:
        `HubError`, `DamagedFileError`, `OSError`: if it is not a hub, or cannot be read or written.
    """
    status = hub_status(hub)
    described = hub.described()
    rounds = [_round(hub, row.round, row.scores) for row in status.rounds]
    times = {agent.name: read_times(hub, agent.name) for agent in status.agents}
    given_up = [name for name in _every_agent(hub) if hub.gave_up(name) is not None]
    out.mkdir(parents=True, exist_ok=True)
    pictures = _plot(rounds, times, out)
    rule = described["identity"]["merge"]
    told = [
        f"Run {status.run_id}, {len(rounds)} rounds, {len(status.agents)} agents"
        + (" that observe" if status.resync == "none" else ""),
        f"Rule: {', '.join(f'{name} {value}' for name, value in rule.items() if value not in ({}, None))}",
        "Newest generalist: " + (f"round {status.latest}" if status.latest else "none yet"),
        *(f"Agent '{name}' was given up: {hub.gave_up(name)}" for name in given_up),
    ]
    sections = [
        ("Agents", _agents_table(status.agents, times, rounds)),
        ("Where the time went", _times_table(times)),
        ("Rounds", _rounds_table(rounds)),
    ]
    warnings = [f"round {r.number}: {text}" for r in rounds if r.report for text in r.report.warnings]
    title = f"ram_trl run in {hub.path}"
    (out / "report.md").write_text(_markdown(title, told, sections, pictures, warnings), encoding="utf-8")
    path = out / "report.html"
    path.write_text(_html(title, told, sections, pictures, warnings), encoding="utf-8")
    return path


def read_times(hub: Hub, agent: str) -> list[Times]:
    """What an agent noted of its merge points; a line that a killed process left half written is left out."""
    path = hub.times_file(agent)
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(Times(**json.loads(line)))
        except (ValueError, TypeError, ValidationError):
            continue
    return found


def _every_agent(hub: Hub) -> list[str]:
    """Also agents that died before they joined."""
    return sorted(path.parent.name for path in (hub.path / "agents").glob("*/done.json")) or hub.agents()


def _round(hub: Hub, number: int, scores: dict[str, float]) -> Round:
    told = round_report(hub, number)
    return Round(number, dict(ages(hub.decisions()[number - 1])), told[1] if told else None, scores)


# ---- tables -----------------------------------------------------------------------------------------------------


def _agents_table(agents: Sequence[AgentStatus], times: dict[str, list[Times]], rounds: Sequence[Round]) -> Table:
    rows = []
    for agent in agents:
        counted = sum(agent.name in each.ages for each in rounds)
        size = sum(each.exchange_mb for each in times[agent.name])
        rows.append((agent.name, agent.state, str(agent.step), str(agent.round), str(counted), f"{size:.3f}"))
    return ("agent", "state", "step", "round loaded", "rounds it is in", "MB published"), rows


def _times_table(times: dict[str, list[Times]]) -> Table:
    rows = []
    for agent, held in times.items():
        parts = [sum(getattr(each, f"{what}_s") for each in held) for what in KINDS_OF_TIME]
        total = sum(parts)
        if total:
            rows.append((agent, f"{total:.1f}", *(f"{part:.2f} ({part / total:.1%})" for part in parts)))
    return ("agent", "seconds", *KINDS_OF_TIME.values()), rows


def _rounds_table(rounds: Sequence[Round]) -> Table:
    rows = []
    for each in rounds:
        agents = each.report.agents if each.report else {}
        rows.append((
            str(each.number),
            ", ".join(f"{name} ({age})" if age else name for name, age in each.ages.items()),
            ", ".join(f"{agent.density:.1%}" for agent in agents.values()),
            ", ".join("-" if agent.rho is None else f"{agent.rho:.2f}" for agent in agents.values()),
            ", ".join("-" if agent.lambda_ is None else f"{agent.lambda_:.3f}" for agent in agents.values()),
            "-" if each.report is None or each.report.sign_conflict is None else f"{each.report.sign_conflict:.1%}",
            ", ".join(f"{task} {score:.3g}" for task, score in each.scores.items()) or "-",
        ))  # fmt: skip
    return ("round", "agents (age)", "density", "ρ", "λ", "sign conflict", "scores"), rows


# ---- pictures ---------------------------------------------------------------------------------------------------


def _plot(rounds: Sequence[Round], times: dict[str, list[Times]], out: Path) -> list[Path]:
    agents = sorted({name for each in rounds for name in each.ages} | set(times))
    tasks = sorted({task for each in rounds for task in each.scores})
    reports = [(each.number, each.report) for each in rounds if each.report is not None]

    def by_agent(value: Any) -> list[Line]:
        return [
            Line(name, [(n, value(r.agents[name])) for n, r in reports if name in r.agents and value(r.agents[name])
                        is not None])
            for name in agents
        ]  # fmt: skip

    scores = [
        Line(task, [(each.number, each.scores[task]) for each in rounds if task in each.scores]) for task in tasks
    ]
    conflict = [(n, 100 * r.sign_conflict) for n, r in reports if r.sign_conflict is not None]
    overlap = by_agent(lambda agent: 100 * agent.shared / agent.active if agent.active else None)
    made = []
    for name, panels in {
        "scores": [Panel("scores of the generalists", "score", scores)] if scores else [],
        "overlap": [
            Panel("density", "% of all entries", by_agent(lambda agent: 100 * agent.density)),
            Panel("shared", "% of the active entries", overlap),
            Panel("λ", "", by_agent(lambda agent: agent.lambda_)),
            Panel("sign conflicts", "% of the shared entries", [Line("all agents", conflict)]),
        ]
        if reports
        else [],
        "times": _panels_of_times(times),
    }.items():
        if panels:
            made.append(out / f"{name}.png")
            plot_panels(panels, made[-1])
    return made


def _panels_of_times(times: dict[str, list[Times]]) -> list[Panel]:
    if not any(times.values()):
        return []
    panels = [
        Panel(
            "published", "MB", [Line(a, [(t.step, t.exchange_mb) for t in held]) for a, held in times.items()], "step"
        )
    ]
    for what in ("train", "wait", "merge"):
        lines = [Line(agent, [(t.step, getattr(t, f"{what}_s")) for t in held]) for agent, held in times.items()]
        panels.append(Panel(KINDS_OF_TIME[what], "seconds", lines, "step"))
    return panels


# ---- files ------------------------------------------------------------------------------------------------------


def _markdown(
    title: str, told: list[str], sections: list[tuple[str, Table]], pictures: list[Path], warnings: list[str]
) -> str:
    lines = [f"# {title}", "", *(f"- {text}" for text in told), ""]
    for heading, (headings, rows) in sections:
        lines += [f"## {heading}", "", f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
        lines += [""]
    lines += [f"![{path.stem}]({path.name})\n" for path in pictures]
    lines += ["## Warnings", "", *(f"- {text}" for text in warnings), ""] if warnings else []
    return "\n".join(lines)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .3em .8em; text-align: left }
th { border-bottom: 2px solid #333 } td { border-bottom: 1px solid #ddd } img { max-width: 100% }
"""


def _html(
    title: str, told: list[str], sections: list[tuple[str, Table]], pictures: list[Path], warnings: list[str]
) -> str:
    def items(texts: list[str]) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>"

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    parts = [f"<h1>{html.escape(title)}</h1>", items(told)]
    for heading, (headings, rows) in sections:
        body = "".join(row(cells, "td") for cells in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><table>{row(headings, 'th')}{body}</table>")
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f'<p><img alt="{path.stem}" src="data:image/png;base64,{data}"></p>')
    if warnings:
        parts.append(f"<h2>Warnings</h2>{items(warnings)}")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(parts)}</body></html>\n'
