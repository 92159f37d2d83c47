"""What a demo found, and how it is told: `report.json`, `report.md`, the figures, the table on the terminal."""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ram_trl.config import METHOD_KNOBS
from ram_trl.recipe import FactorRow, MergeRow, Recipe
from ram_trl.telling.plots import RoundPoint, plot_overlap, plot_rounds, plot_scores
from ram_trl.telling.report import AgentReport

Scores = dict[str, float]
"""Percentages by task and, last, their mean as `average`."""


class SeedScores(BaseModel):
    """The scores of one seed, by model."""

    seed: int
    models: dict[str, Scores]


class Choice(BaseModel):
    """What tuning chose for a row in one seed; `tried` holds every candidate with its average on the dev split."""

    seed: int
    chosen: dict[str, float]
    tried: list[tuple[dict[str, float], float]]


class Tuning(BaseModel):
    """How a row was tuned: the grid of each knob, and what was chosen per seed."""

    grid: dict[str, list[float]]
    split: str = "dev"
    per_seed: list[Choice]


class RoundScores(BaseModel):
    """
    A round of a continual run.

    Args:
        round (`int`):
            Its number, from 1. The last one holds what agents published when they had ended.
        scores (`dict[str, float]`):
            Of the round's generalist on the dev split.
        density, lambda_ (`dict[str, float]`):
            By agent, as in the hub's report of the round.
        shared (`dict[str, float]`):
            By agent, the share of its active entries that others changed too; `None` if nothing was active.
        sign_conflict (`float`, *optional*):
            Share of the shared entries where agents pull in opposite directions.
    """

    round: int
    scores: Scores
    density: dict[str, float]
    lambda_: dict[str, float | None] = Field(
        validation_alias=AliasChoices("lambda", "lambda_"), serialization_alias="lambda"
    )
    shared: dict[str, float | None]
    sign_conflict: float | None


class DemoReport(BaseModel):
    """
    What a demo found.

    Args:
        models (`dict[str, dict[str, float]]`):
            Percentages on the test split by model and task, with their `average`; the mean over seeds.
        std (`dict[str, dict[str, float]]`, *optional*):
            Sample standard deviation over seeds, in the same shape; `None` for one seed.
        per_seed (`list[SeedScores]`):
            The scores of every seed.
        tuned (`dict[str, Tuning]`):
            The tuned rows.
        overlap (`dict[str, AgentReport]`):
            How the agents of the first seed overlap in the generalist's merge.
        dev (`dict[str, dict[str, float]]`):
            Scores of the base and the merges of the first seed on the dev split, to compare rounds with.
        rounds (`dict[str, list[RoundScores]]`):
            The rounds of the first seed's continual runs.
        warnings (`dict[str, list[str]]`):
            What the merges of the first seed warned about, by row.
        seconds (`dict[str, float]`):
            Wall time by phase, over all seeds.
        fast (`bool`):
            Whether this was a quick test run, whose numbers mean nothing.
        recipe (`str`):
            The recipe's file.
        settings (`Recipe`):
            The recipe as it was run.
        versions (`dict[str, str]`):
            Versions of the libraries.
    """

    models: dict[str, Scores]
    std: dict[str, Scores] | None
    per_seed: list[SeedScores]
    tuned: dict[str, Tuning]
    overlap: dict[str, AgentReport]
    dev: dict[str, Scores]
    rounds: dict[str, list[RoundScores]]
    warnings: dict[str, list[str]]
    seconds: dict[str, float]
    fast: bool
    recipe: str
    settings: Recipe
    versions: dict[str, str]


def plot(report: DemoReport, out: Path) -> None:
    counted = f"{report.settings.scoring.test} held-out prompts per task"
    if report.std:
        counted += f", mean and standard deviation of {len(report.per_seed)} seeds"
    plot_scores(report.models, out / "scores.png", report.std, title=f"Greedy accuracy on {counted}")
    plot_overlap(report.overlap, out / "overlap.png")
    if report.rounds:
        best = _best_merge_on_dev(report)
        points = {
            name: [RoundPoint(r.round, r.scores, r.density, r.shared, _lambdas(r)) for r in rounds]
            for name, rounds in report.rounds.items()
        }
        start, mark = report.dev["base"], (best, report.dev[best]["average"])
        plot_rounds(points, out / "rounds.png", start, mark, title=f"Round by round, on {_dev_prompts(report)}")


def _lambdas(found: RoundScores) -> dict[str, float | None]:
    """λ by agent, without those of agents that had nothing to rescale."""
    return {agent: value if found.density[agent] else None for agent, value in found.lambda_.items()}


def _best_merge_on_dev(report: DemoReport) -> str:
    return max((row.name for row in report.settings.one_shot), key=lambda name: report.dev[name]["average"])


def _dev_prompts(report: DemoReport) -> str:
    return f"{report.settings.scoring.dev} dev prompts per task, first seed"


def markdown(report: DemoReport) -> str:
    """The report for people: the table, what stands out in it, how rows were tuned, how the agents overlap."""
    columns = list(report.models["base"])
    how = {row.name: _described(row) for row in report.settings.one_shot} | _runs_described(report.settings)
    seeds = len(report.per_seed)
    lines = [
        "# ram-trl demo",
        "",
        f"One tiny base, {len(report.overlap)} agents trained from it by GRPO, and their merges"
        + (", made once they are trained or while they train" if report.rounds else "")
        + f" (`{report.recipe}`). "
        f"Exact greedy accuracy in percent on {report.settings.scoring.test} test prompts per task"
        + (f"; mean ± sample standard deviation of {seeds} seeds." if seeds > 1 else "; one seed."),
        "",
    ]
    if report.fast:
        lines += ["**A quick test run (`--fast`): it passes through every part, and its numbers mean nothing.**", ""]
    lines += [f"| model | {' | '.join(columns)} | how |", f"|---|{'--:|' * len(columns)}---|"]
    best = _best_average(report)
    for name, scores in report.models.items():
        cells = [_cell(report, name, column) for column in columns]
        if scores["average"] == best:
            cells[-1] = f"**{cells[-1]}**"
        lines.append(f"| {name} | {' | '.join(cells)} | {how.get(name, '')} |")
    lines += ["", "![Scores of every model](scores.png)", "", "## What the table says", ""]
    lines += [f"- {sentence}" for sentence in _findings(report)]
    lines += ["", "## Overlap of the agents", ""]
    lines += [f"First seed, as {report.settings.merge.name} counts it.", ""]
    lines += ["| agent | density | unique | shared | ρ | λ |", "|---|--:|--:|--:|--:|--:|"]
    for name, agent in report.overlap.items():
        rho, lambda_ = (("–" if x is None else f"{x:.3f}") for x in (agent.rho, agent.lambda_))
        lines.append(f"| {name} | {agent.density:.1%} | {agent.unique} | {agent.shared} | {rho} | {lambda_} |")
    lines += ["", "![Overlap of the agents](overlap.png)", ""]
    if report.rounds:
        lines += _rounds_described(report)
    if report.warnings:
        lines += ["Warnings of the merges:", ""]
        lines += [f"- {sentence} ({', '.join(names)})" for sentence, names in _by_sentence(report).items()] + [""]
    times = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in report.seconds.items())
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    lines += ["## Run", "", f"- Time: {times}.", f"- Versions: {versions}.", "- Settings: see `report.json`.", ""]
    return "\n".join(lines)


def _runs_described(settings: Recipe) -> dict[str, str]:
    """What each continual run does, by name."""
    if settings.continual is None:
        return {}
    told = f"{settings.merge.name} while training, every {settings.continual.merge_every} steps, "
    adapters = any(agent.peft is not None for agent in settings.agents)
    return {
        row.name: told
        + ("the unconsumed carried on" if row.carry else "the unconsumed dropped")
        + (f", {row.lora} into the agents" if adapters else "")
        for row in settings.runs
    }


def _rounds_described(report: DemoReport) -> list[str]:
    lines = [
        "## Rounds of the continual runs",
        "",
        f"Scores on {_dev_prompts(report)}. In the last round agents hand in what they have left at the end.",
        "",
    ]
    columns, agents = list(report.models["base"]), list(report.overlap)
    for name, rounds in report.rounds.items():
        lines += [f"| {name} | {' | '.join(columns)} | shared ({', '.join(agents)}) | λ | sign conflict |"]
        lines += [f"|--:|{'--:|' * len(columns)}---|---|--:|"]
        for found in rounds:
            scores = " | ".join(f"{found.scores[column]:.1f}" for column in columns)
            shared = " ".join(_known(found.shared.get(agent), ".0%") for agent in agents)
            lambdas = " ".join(_known(_lambdas(found).get(agent), ".3f") for agent in agents)
            conflict = _known(found.sign_conflict, ".0%")
            lines += [f"| {found.round} | {scores} | {shared} | {lambdas} | {conflict} |"]
        lines += [""]
    hub = f"The hub of {report.settings.runs[0].name} is in `hub`: `ram-trl status hub`."
    return [*lines, "![Rounds of the continual runs](rounds.png)", "", hub, ""]


def _known(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _findings(report: DemoReport) -> list[str]:
    """What stands out, told the same way whichever row is ahead."""
    models, generalist = report.models, report.settings.merge.name
    gains = ", ".join(f"{task} {models[f'agent:{task}'][task] - models['base'][task]:+.1f}" for task in report.overlap)
    sentences = [f"What each agent gains over the base on its own task: {gains}."]
    mean, best = models[generalist]["average"], _best_average(report)
    if mean == best:
        sentences.append(f"No model has a better average than {generalist}.")
    else:
        ahead = next(name for name, scores in models.items() if scores["average"] == best)
        sentences.append(f"{ahead} has the best average; {generalist} is {best - mean:.1f} points behind it.")
    if len(report.per_seed) > 1:
        averages = [{name: scores["average"] for name, scores in run.models.items()} for run in report.per_seed]
        wins = sum(seed[generalist] == max(seed.values()) for seed in averages)
        sentences.append(f"{generalist} has the best average, or one as good, in {wins} of {len(averages)} seeds.")
    plain = {row.name: "plain averaging" for row in report.settings.compare if row.config.method == "average"}
    apart = {row.name: "averaging A and B apart" for row in report.settings.factors if row.weight == "mean"}
    for name, what in (apart | plain).items():
        lead = mean - models[name]["average"]
        told = "above" if lead >= 0 else "below"
        sentences.append(f"{generalist} is {abs(lead):.1f} points {told} {what}.")
    merges = {row.name: models[row.name]["average"] for row in report.settings.one_shot}
    rival = max(merges, key=lambda name: merges[name])
    for run in report.settings.runs:
        lead = models[run.name]["average"] - merges[rival]
        told = "above" if lead >= 0 else "below"
        sentences.append(f"{run.name} is {abs(lead):.1f} points {told} {rival}, the best merge of trained agents.")
    if report.tuned:
        told = f"{generalist} is not tuned at all; these have the benefit of tuning on dev prompts"
        sentences.append(f"{told}: {_tuning(report)}.")
    error = 50 / report.settings.scoring.test**0.5
    sentences.append(
        f"The standard error of one score (one task, one seed) is at most {error:.1f} points; small differences "
        "are noise."
    )
    return sentences


def _by_sentence(report: DemoReport) -> dict[str, list[str]]:
    """The rows that gave each warning; rows often give the same."""
    rows: dict[str, list[str]] = {}
    for name, sentences in report.warnings.items():
        for sentence in sentences:
            rows.setdefault(sentence, []).append(name)
    return rows


def _tuning(report: DemoReport) -> str:
    told = []
    for name, tuning in report.tuned.items():
        for knob, grid in tuning.grid.items():
            chosen = ", ".join(f"{choice.chosen[knob]:g}" for choice in tuning.per_seed)
            told.append(f"{name} ({knob} {chosen} out of {', '.join(f'{value:g}' for value in grid)})")
    return "; ".join(told)


def _described(row: FactorRow | MergeRow) -> str:
    """A merge in words: method, criterion and the knobs the method has."""
    if isinstance(row, FactorRow):
        if row.weight == "mean" and not row.tune:
            return "A and B averaged, each apart"
        return "peft's add_weighted_adapter, linear, weight " + ("tuned on dev" if row.tune else str(row.weight))
    config = row.config
    knobs = [f"{knob} {getattr(config, knob)}" for knob in sorted(METHOD_KNOBS[config.method]) if knob not in row.tune]
    return ", ".join([config.method, config.criterion, *knobs, *(f"{knob} tuned on dev" for knob in row.tune)])


def _best_average(report: DemoReport) -> float:
    return max(scores["average"] for scores in report.models.values())


def _cell(report: DemoReport, name: str, column: str) -> str:
    mean = f"{report.models[name][column]:.1f}"
    return f"{mean} ± {report.std[name][column]:.1f}" if report.std else mean


def show(report: DemoReport, out: Path, console: Console) -> None:
    columns = list(report.models["base"])
    title = "Greedy accuracy (%) on held-out prompts"
    if report.fast:
        title += "; a quick test run, its numbers mean nothing"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    best = _best_average(report)
    last_of_a_kind = {"base", f"agent:{list(report.overlap)[-1]}", report.settings.merge.name}
    for name, scores in report.models.items():
        cells = [Text(_cell(report, name, column)) for column in columns]
        if scores["average"] == best:
            cells[-1].stylize("bold")
        table.add_row(Text(name), *cells, end_section=name in last_of_a_kind)
    console.print(table)
    for sentence in _findings(report):
        console.print(Text(sentence))
    console.print()
    of_rounds = ["rounds.png", "hub"] if report.rounds else []
    for name in ("report.md", "report.json", "scores.png", "overlap.png", *of_rounds, "generalist"):
        console.print(Text(str(out / name)), soft_wrap=True)
