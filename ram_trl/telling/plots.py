"""Figures: how models score on every task, what agents changed and where, how their changes overlap, how rounds went.

Each writes a PNG and nothing else; they use matplotlib's objects directly, so no global figure state is touched. The
colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ram_trl.telling.report import AgentReport, MergeReport, PairReport

TASK_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#F0E442")
STRONG = "#333333"
UNIQUE, SHARED, INACTIVE = "#0072B2", "#E69F00", "#E3E3E3"

HEAT, ABSENT = "cividis", "#FFFFFF"  # as readable to colour-blind readers as to others

MARKERS = "os^Dv"

DPI = 120
LABEL_POINTS = 27
MOST_ACROSS = 3
MOST_TICKS = 8
LONGEST_NAME = 20


def plot_scores(
    models: Mapping[str, Mapping[str, float]],
    path: Path,
    std: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "Greedy accuracy of every model",
) -> None:
    """
    Write a bar chart: a group of bars per model, in it one bar per task and the average, labelled, last.

    Args:
        models (`Mapping[str, Mapping[str, float]]`):
            Percentages by task, and `average`, by model name, in the order to be drawn.
        path (`Path`):
            The PNG to write.
        std (`Mapping[str, Mapping[str, float]]`, *optional*):
            Standard deviations in the same shape, drawn as error bars.
        title (`str`, *optional*):
            Title of the figure.
    """
    columns = list(next(iter(models.values())))
    colours = [*islice(cycle(TASK_COLOURS), len(columns) - 1), STRONG]
    inches = max(6.4, 1.0 + 0.22 * len(models) * (len(columns) + 0.6))
    figure, axes = _canvas(inches, height=4.6)
    width = 0.82 / len(columns)
    # A label wider than its bar starts at the bar's left edge and ends in the gap, where no taller bar is met.
    shift = max(0.0, LABEL_POINTS - width * 72 * (inches - 1.0) / len(models)) / 2
    for place, (column, colour) in enumerate(zip(columns, colours, strict=True)):
        at = [model + (place - (len(columns) - 1) / 2) * width for model in range(len(models))]
        heights = [scores[column] for scores in models.values()]
        errors = [std[name][column] for name in models] if std else None
        style = {"ecolor": "#777777", "elinewidth": 1.0, "capsize": 2.0}
        axes.bar(at, heights, width * 0.94, yerr=errors, color=colour, label=column, error_kw=style, zorder=2)
        if column == columns[-1]:
            _label_bars(axes, at, heights, errors or [0.0] * len(heights), shift)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.set_xlim(-0.6, len(models) - 0.4)
    axes.set_ylabel("answered exactly (%)")
    axes.set_xticks(range(len(models)), [_broken(name) for name in models])
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#E6E6E6", zorder=0)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=32)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(columns), frameon=False, borderaxespad=0.2)
    _write(figure, path)


def plot_overlap(
    agents: Mapping[str, AgentReport], path: Path, title: str = "What each agent changed, and who else did"
) -> None:
    """
    Write a bar per agent: which share of its entries is unique, shared and inactive, with ρ and λ beside it.

    Args:
        agents (`Mapping[str, AgentReport]`):
            The agents of a [`MergeReport`], by name.
        path (`Path`):
            The PNG to write.
        title (`str`, *optional*):
            Title of the figure.
    """
    figure, axes = _canvas(width=9.0, height=1.7 + 0.62 * len(agents))
    rows = range(len(agents))
    percent = [100 / max(agent.entries, 1) for agent in agents.values()]
    unique = [p * agent.unique for p, agent in zip(percent, agents.values(), strict=True)]
    shared = [p * agent.shared for p, agent in zip(percent, agents.values(), strict=True)]
    active = [u + s for u, s in zip(unique, shared, strict=True)]
    inactive = [100 - a for a in active]
    axes.barh(rows, unique, 0.62, color=UNIQUE, label="unique to this agent")
    axes.barh(rows, shared, 0.62, left=unique, color=SHARED, label="shared with others")
    axes.barh(rows, inactive, 0.62, left=active, color=INACTIVE, label="inactive")
    for row, agent in enumerate(agents.values()):
        _label_agent(axes, row, agent)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of all entries (%)")
    axes.set_yticks(rows, list(agents))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=32)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, borderaxespad=0.2)
    _write(figure, path)


def plot_pairs(
    pairs: Sequence[PairReport], path: Path, title: str = "How the changes of every two agents overlap"
) -> None:
    """
    Write two bars per pair of agents: the Jaccard index of what is active, with a tick where chance would put it, and
    the share of the entries active in both that have the same sign, with a line at one half.

    Args:
        pairs (`Sequence[PairReport]`):
            The pairs of a [`MergeReport`]; at least one.
        path (`Path`):
            The PNG to write.
        title (`str`, *optional*):
            Title of the figure.
    """
    figure = Figure(figsize=(9.0, 1.6 + 0.36 * len(pairs)), dpi=DPI, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    overlap, signs = figure.subplots(1, 2, sharey=True)
    rows = range(len(pairs))
    jaccard, chance = [pair.jaccard for pair in pairs], [pair.jaccard_by_chance for pair in pairs]
    overlap.barh(rows, jaccard, 0.62, color=UNIQUE, label="Jaccard index")
    overlap.scatter(chance, rows, s=160, marker="|", lw=2.4, color=SHARED, label="by chance", zorder=3)
    overlap.set_xlim(0, 1.2 * max(*jaccard, *chance, 0.01))
    overlap.set_xlabel("active in both / active in either")
    overlap.set_yticks(rows, [" + ".join(map(_short, pair.agents)) for pair in pairs])
    overlap.set_ylim(len(pairs) - 0.4, -0.6)
    agreement = [100 * (pair.sign_agreement or 0) for pair in pairs]
    signs.barh(rows, agreement, 0.62, color=TASK_COLOURS[2], label="same sign")
    signs.axvline(50, color=STRONG, ls="--", lw=1.2, label="by chance")
    signs.set_xlim(0, 119)
    signs.set_xticks(range(0, 101, 25))
    signs.set_xlabel("share of the entries active in both (%)")
    for row, pair in enumerate(pairs):
        _label_bar(overlap, row, max(pair.jaccard, pair.jaccard_by_chance), f"{pair.jaccard:.3f}")
        agreed = "none shared" if pair.sign_agreement is None else f"{pair.sign_agreement:.1%}"
        _label_bar(signs, row, max(agreement[row], 50 if abs(agreement[row] - 44) < 8 else 0), agreed)
    for axes in (overlap, signs):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, borderaxespad=0.2)
    _write(figure, path)


def plot_layers(report: MergeReport, path: Path, title: str = "Density by layer and kind of tensor") -> None:
    """
    Write a heat map per agent: which share of the entries is active, by layer (across) and kind of tensor (down).

    Args:
        report (`MergeReport`):
            A report in detail. A kind that is not in layers, such as embeddings, fills its row.
        path (`Path`):
            The PNG to write.
        title (`str`, *optional*):
            Title of the figure.
    """
    kinds, layers, agents = list(report.kinds), list(report.layers), list(report.agents)
    across = min(len(agents), MOST_ACROSS)
    down = ceil(len(agents) / across)
    figure = Figure(figsize=(9.0, 1.5 + down * (0.7 + 0.2 * len(kinds))), dpi=DPI, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    densities = {name: _densities(report, name) for name in agents}
    highest = max((float(np.nanmax(cells)) for cells in densities.values()), default=0.0)
    image = None
    for axes, name in zip(grid.flat, agents, strict=False):
        axes.set_facecolor(ABSENT)
        image = axes.imshow(
            100 * densities[name], cmap=HEAT, vmin=0, vmax=100 * highest or 1, aspect="auto", interpolation="none"
        )
        axes.set_title(f"{_short(name)}: {report.agents[name].density:.1%}", loc="left", fontsize=11)
        axes.set_yticks(range(len(kinds)), kinds, fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.spines[:].set_visible(False)
        _label_layers(axes, layers)
    for axes in grid.flat[len(agents) :]:
        axes.set_visible(False)
    for axes in grid.flat[len(agents) - across : len(agents)]:
        axes.set_xlabel(_stacks(layers), fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=grid, label="density (% of the entries)", location="bottom", shrink=0.5, aspect=40)
    _write(figure, path)


def save_merge_plots(report: MergeReport, folder: Path) -> list[Path]:
    """
    Write what a report holds as pictures.

    Args:
        report (`MergeReport`):
            A report in detail.
        folder (`Path`):
            Where to write; made if it is not there.

    Returns:
        `list[Path]`: `overlap.png` (unique, shared and inactive entries by agent), `pairs.png` (if there are two
        agents or more) and `layers.png`.

    Raises:
        `OSError`: if the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    overlap, pairs, layers = (folder / f"{name}.png" for name in ("overlap", "pairs", "layers"))
    plot_overlap(report.agents, overlap)
    plot_layers(report, layers)
    if not report.pairs:
        return [overlap, layers]
    plot_pairs(report.pairs, pairs)
    return [overlap, pairs, layers]


@dataclass(frozen=True)
class RoundPoint:
    """A round of a continual run: scores by task and `average`; density, shared share and λ by agent, where known."""

    round: int
    scores: Mapping[str, float]
    density: Mapping[str, float | None]
    shared: Mapping[str, float | None]
    lambda_: Mapping[str, float | None]


def plot_rounds(
    runs: Mapping[str, Sequence[RoundPoint]],
    path: Path,
    base: Mapping[str, float],
    mark: tuple[str, float],
    title: str = "Round by round",
) -> None:
    """
    Write three panels per continual run, side by side: scores over rounds, density and shared share, λ.

    Args:
        runs (`Mapping[str, Sequence[RoundPoint]]`):
            The rounds of every run, by the run's name.
        path (`Path`):
            The PNG to write.
        base (`Mapping[str, float]`):
            Scores of the base, drawn as round 0. Its tasks are the agents' names, and give them colours in all panels.
        mark (`tuple[str, float]`):
            Name and average of a model to compare with, drawn as a dashed line.
        title (`str`, *optional*):
            Title of the figure.
    """
    figure = Figure(figsize=(12.5, 0.7 + 3.1 * len(runs)), dpi=DPI, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid = figure.subplots(len(runs), 3, squeeze=False, sharex=True, sharey="col")
    for (scores, overlap, rescale), (name, points) in zip(grid, runs.items(), strict=True):
        _draw_scores(scores, points, base, mark)
        scores.set_title(f"{name}: scores", loc="left", fontsize=11)
        overlap.set_title(f"{name}: active and shared entries", loc="left", fontsize=11)
        rescale.set_title(f"{name}: λ", loc="left", fontsize=11)
        for at, agent in enumerate(task for task in base if task != "average"):
            _draw_agent(overlap, points, [p.density.get(agent) for p in points], at, 100, ":", None)
            _draw_agent(overlap, points, [p.shared.get(agent) for p in points], at, 100, "-", agent)
            _draw_agent(rescale, points, [p.lambda_.get(agent) for p in points], at, 1, "-", agent)
        rescale.ticklabel_format(axis="y", useOffset=False)
        overlap.set_ylim(0, 100)
        overlap.set_ylabel("%")
        overlap.plot([], [], ":", color=STRONG, label="density (of all entries)")
        overlap.plot([], [], "-", color=STRONG, label="shared (of the active)")
        for axes in (scores, overlap, rescale):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#E6E6E6", zorder=0)
            axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[-1]:
        axes.set_xlabel("round")
    for axes in grid[0]:
        axes.legend(fontsize=8, frameon=False, ncols=2)
    _write(figure, path)


@dataclass(frozen=True)
class Line:
    """A named line of points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Lines with a title, what the vertical axis counts, and what the horizontal one does."""

    title: str
    unit: str
    lines: Sequence[Line]
    across: str = "round"


def plot_panels(panels: Sequence[Panel], path: Path) -> None:
    """
    Write panels, two in a row.

    Args:
        panels (`Sequence[Panel]`):
            What to draw; at least one.
        path (`Path`):
            The PNG to write.
    """
    across = min(len(panels), 2)
    down = ceil(len(panels) / across)
    figure = Figure(figsize=(5.6 * across, 3.0 * down), dpi=DPI, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        for at, line in enumerate(panel.lines):
            x, y = [point[0] for point in line.points], [point[1] for point in line.points]
            colour, marker = TASK_COLOURS[at % len(TASK_COLOURS)], MARKERS[at % len(MARKERS)]
            # The first is the widest, so that lines on top of each other can all be seen.
            axes.plot(x, y, marker=marker, ms=4, lw=max(1.2, 3.6 - at), color=colour, label=line.name, zorder=2 + at)
        axes.set_title(panel.title, loc="left", fontsize=11)
        axes.set_xlabel(panel.across)
        axes.set_ylabel(panel.unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E6E6E6", zorder=0)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if panel.lines:
            axes.legend(fontsize=8, frameon=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    _write(figure, path)


def _draw_scores(axes: Axes, points: Sequence[RoundPoint], base: Mapping[str, float], mark: tuple[str, float]) -> None:
    rounds = [0, *(point.round for point in points)]
    colours = [*islice(cycle(TASK_COLOURS), len(base) - 1), STRONG]
    for at, (column, colour) in enumerate(zip(base, colours, strict=True)):
        heights = [base[column], *(point.scores[column] for point in points)]
        width = 2.6 if colour == STRONG else 1.4
        axes.plot(rounds, heights, marker=MARKERS[at % len(MARKERS)], ms=4, lw=width, color=colour, label=column)
    axes.axhline(mark[1], color=STRONG, ls="--", lw=1.2, label=f"{mark[0]}, one-shot", zorder=1)
    axes.set_ylim(0, 103)
    axes.set_ylabel("answered exactly (%)")


def _draw_agent(
    axes: Axes, points: Sequence[RoundPoint], values: Sequence[float | None], at: int, scale: float, line: str,
    label: str | None,
) -> None:  # fmt: skip
    """A line per agent; the first is the widest, so that lines on top of each other can all be seen."""
    known = [(point.round, scale * value) for point, value in zip(points, values, strict=True) if value is not None]
    colour, marker = TASK_COLOURS[at % len(TASK_COLOURS)], MARKERS[at % len(MARKERS)]
    width = max(1.2, 4.2 - 1.5 * at)
    x, y = [number for number, _ in known], [value for _, value in known]
    axes.plot(x, y, line, marker=marker, ms=4 + width, lw=width, color=colour, label=label, zorder=2 + at)


def _write(figure: Figure, path: Path) -> None:
    """Writes a PNG; `Figure.savefig` would draw everything twice."""
    FigureCanvasAgg(figure).print_png(path)


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _label_bars(axes: Axes, at: list[float], heights: list[float], errors: list[float], shift: float) -> None:
    """Values over bars and error bars, `shift` points to the right of the middle."""
    for x, height, error in zip(at, heights, errors, strict=True):
        axes.annotate(
            f"{height:.1f}", (x, height + error), (shift, 3), textcoords="offset points", ha="center",
            fontsize=9, fontweight="bold", color=STRONG,
        )  # fmt: skip


def _label_bar(axes: Axes, row: int, end: float, text: str) -> None:
    """A value to the right of where a horizontal bar, and what is drawn over it, ends."""
    axes.annotate(text, (end, row), (5, 0), textcoords="offset points", va="center", fontsize=9, color=STRONG)


def _densities(report: MergeReport, agent: str) -> NDArray[np.float64]:
    """Density by kind (rows) and layer (columns), NaN where there is no such tensor."""
    rows = []
    for kind, part in report.kinds.items():
        everywhere: list[float | None] = [part.agents[agent].density] * max(1, len(report.layers))
        rows.append(report.density_map[agent].get(kind, everywhere))
    return np.array(rows, np.float64)


def _label_layers(axes: Axes, layers: Sequence[str]) -> None:
    """Numbers of some layers, and a gap where one list of layers ends and the next begins."""
    step = ceil(max(1, len(layers)) / MOST_TICKS)
    at = range(0, len(layers), step)
    axes.set_xticks(at, [layers[i].rpartition(".")[2] for i in at], fontsize=9)
    for i in range(1, len(layers)):
        if layers[i].rpartition(".")[0] != layers[i - 1].rpartition(".")[0]:
            axes.axvline(i - 0.5, color=ABSENT, lw=3)


def _stacks(layers: Sequence[str]) -> str:
    """What the axis of layers shows: all lists of layers, in order, where there are several."""
    if not layers:
        return ""
    names = list(dict.fromkeys(layer.rpartition(".")[0] for layer in layers))
    return "layer" if len(names) < 2 else "layer of " + ",\nthen ".join(names)


def _label_agent(axes: Axes, row: int, agent: AgentReport) -> None:
    """Density, ρ and λ to the right of an agent's bar."""
    rho = "–" if agent.rho is None else f"{agent.rho:.2f}"
    lambda_ = "–" if agent.lambda_ is None else f"{agent.lambda_:.3f}"
    text = f"{agent.density:.1%} active\nρ = {rho}   λ = {lambda_}"
    axes.annotate(text, (100, row), (10, 0), textcoords="offset points", va="center", fontsize=10, color=STRONG)


def _short(name: str) -> str:
    """The name of an agent, cut where it would run into what is beside it."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _broken(name: str) -> str:
    """A model's name in short lines: broken after `:` and `_`, before `@`, and at hyphens between words."""
    return re.sub(r"(?<=[:_])|(?=@)|(?<=[a-z]-)(?=[a-z])", "\n", name)
