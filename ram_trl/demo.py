"""The demo: a base made on the spot, an agent per task trained by TRL's GRPOTrainer, their merges, one table.

A recipe flows in; a folder flows out, with the models of the first seed, a report and two figures. Everything that
is measured is measured on prompts that nothing was trained or tuned on.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from ram_trl.config import METHOD_KNOBS, MergeConfig
from ram_trl.engine import merge_state_dicts
from ram_trl.evaluate import ScoreRow, accuracies
from ram_trl.offline import merge
from ram_trl.plots import plot_overlap, plot_scores
from ram_trl.recipe import AgentSection, BaseMaker, MergeRow, Progress, Recipe, Task, load_function, load_recipe
from ram_trl.report import AgentReport, MergeReport

Scores = dict[str, float]
"""Percentages by task and, last, their mean as `average`."""

MARKER = ".ram-trl-demo"
OWN = ("base", "agents", "generalist", "report.md", "report.json", "scores.png", "overlap.png")
"""What the demo writes into its folder, and so what it replaces there."""


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
    warnings: dict[str, list[str]]
    seconds: dict[str, float]
    fast: bool
    recipe: str
    settings: Recipe
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Lab:
    """A recipe with its functions loaded and its prompts drawn."""

    recipe: Recipe
    make_base: BaseMaker
    tasks: dict[str, Task]
    dev: dict[str, list[ScoreRow]]
    test: dict[str, list[ScoreRow]]


@dataclasses.dataclass
class _SeedRun:
    """What one seed made and found."""

    seed: int
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    agents: dict[str, PreTrainedModel] = dataclasses.field(default_factory=dict)
    scores: dict[str, Scores] = dataclasses.field(default_factory=dict)
    choices: dict[str, Choice] = dataclasses.field(default_factory=dict)
    merges: dict[str, MergeReport] = dataclasses.field(default_factory=dict)


class _Stopwatch:
    """Adds up wall time by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start


def run_demo(recipe: Path, out: Path, seeds: int, fast: bool, console: Console) -> DemoReport:
    """
    Run a recipe and write what came of it.

    Args:
        recipe (`Path`):
            The recipe's YAML file.
        out (`Path`):
            Folder to write: `base`, `agents/…` and `generalist` (models of the first seed), `report.md`,
            `report.json`, `scores.png`, `overlap.png`. A folder of an earlier demo is written over.
        seeds (`int`):
            How many times to run everything, with seeds 0, 1, …
        fast (`bool`):
            Make a quick test run, with what the recipe's `fast` section changes.
        console ([`~rich.console.Console`]):
            Where progress and the table go.

    Returns:
        [`DemoReport`]: what `report.json` holds.

    Raises:
        `ValueError`: if the recipe is wrong, or `out` holds something else than an earlier demo.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; at least one is needed")
    watch = _Stopwatch()
    with watch("total"), _quiet_libraries(), _own_random_state(), _one_thread():
        with watch("prepare"):
            lab = _open_lab(recipe, fast)
            _claim(out)
        runs = []
        for seed in range(seeds):
            with _bars(console) as bars:
                run = _run_seed(lab, seed, bars, f"seed {seed} · " if seeds > 1 else "", watch)
            if seed == 0:
                with watch("generalist"):
                    _save_models(run, lab.recipe.merge.config, out)
            # Weights are needed no longer.
            run.agents.clear()
            runs.append(run)
        report = _summary(lab.recipe, recipe, fast, runs)
        with watch("figures"):
            _plot(report, out)
    report = report.model_copy(update={"seconds": watch.seconds})
    (out / "report.json").write_text(report.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")
    (out / "report.md").write_text(_markdown(report), encoding="utf-8")
    _show(report, out, console)
    return report


def _open_lab(path: Path, fast: bool) -> _Lab:
    recipe = load_recipe(path)
    if fast:
        recipe = recipe.quick()
    for agent in recipe.agents:
        # Built here for its checks only: a wrong argument should show before minutes of training, not after.
        _grpo_config(agent, 0, path.parent)
    tasks = {agent.name: load_function(agent.task, path.parent)() for agent in recipe.agents}
    return _Lab(
        recipe=recipe,
        make_base=load_function(recipe.base.make, path.parent),
        tasks=tasks,
        dev={name: task.rows("dev", recipe.scoring.dev) for name, task in tasks.items()},
        test={name: task.rows("test", recipe.scoring.test) for name, task in tasks.items()},
    )


def _run_seed(lab: _Lab, seed: int, bars: Bars, prefix: str, watch: _Stopwatch) -> _SeedRun:
    agents = {agent.name: agent for agent in lab.recipe.agents}
    phases = ["base", *(f"agent {name}" for name in agents), "merge and score"]
    advance = {phase: _bar(bars, prefix + phase) for phase in phases}
    with watch("base"), _flushed_denormals():
        base, tokenizer = lab.make_base(seed=seed, progress=advance["base"], **lab.recipe.base.args)
    run = _SeedRun(seed, base, tokenizer)
    for name, agent in agents.items():
        with watch(f"agent {name}"), _flushed_denormals():
            run.agents[name] = _train(agent, lab.tasks[name], run, advance[f"agent {name}"])
    with watch("merge and score"):
        _compare(lab, run, advance["merge and score"])
    return run


def _train(agent: AgentSection, task: Task, run: _SeedRun, progress: Progress) -> PreTrainedModel:
    model = copy.deepcopy(run.base)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=task.rewards,
            args=_grpo_config(agent, run.seed, Path(folder)),
            train_dataset=task.train,
            processing_class=run.tokenizer,
            callbacks=[_StepProgress(progress)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


class _StepProgress(TrainerCallback):
    """Moves a progress bar with the trainer's steps."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress(state.global_step, state.max_steps)


def _grpo_config(agent: AgentSection, seed: int, folder: Path) -> GRPOConfig:
    own = {
        "output_dir": str(folder),
        "seed": seed,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        # The models are tiny, and the same seed should give the same numbers on every machine.
        "use_cpu": True,
    }
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    for name in agent.args:
        if name not in known:
            raise ValueError(f"agent '{agent.name}': args.{name} is not a field of TRL's GRPOConfig")
        if name in own:
            raise ValueError(f"agent '{agent.name}': args.{name} is set by the demo itself; leave it out")
    try:
        return GRPOConfig(**agent.args, **own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"agent '{agent.name}': GRPOConfig refuses its args: {error}") from error


def _compare(lab: _Lab, run: _SeedRun, progress: Progress) -> None:
    """Score base, agents and every merge of the recipe on the test split; tune what is to be tuned on dev, before."""
    base = run.base.state_dict()
    states = {name: agent.state_dict() for name, agent in run.agents.items()}
    merged = copy.deepcopy(run.base)
    done, total = 0, 1 + len(states) + sum(len(row.candidates()) + bool(row.tune) for row in lab.recipe.rows)

    def score(model: PreTrainedModel, rows: Mapping[str, list[ScoreRow]]) -> Scores:
        nonlocal done
        scores = accuracies(model, run.tokenizer, rows)
        done += 1
        progress(done, total)
        return scores

    def combine(config: MergeConfig) -> MergeReport:
        weights, report = merge_state_dicts(base, states, config)
        merged.load_state_dict(weights)
        return report

    run.scores["base"] = score(run.base, lab.test)
    for name, agent in run.agents.items():
        run.scores[f"agent:{name}"] = score(agent, lab.test)
    for row in lab.recipe.rows:
        config = row.config
        if row.tune:
            tried = []
            for knobs, candidate in row.candidates():
                combine(candidate)
                tried.append((knobs, score(merged, lab.dev)["average"]))
            best = max(range(len(tried)), key=lambda i: tried[i][1])
            run.choices[row.name] = Choice(seed=run.seed, chosen=tried[best][0], tried=tried)
            config = row.candidates()[best][1]
        run.merges[row.name] = combine(config)
        run.scores[row.name] = score(merged, lab.test)


def _save_models(run: _SeedRun, config: MergeConfig, out: Path) -> None:
    """Save base and agents as folders, and merge those folders into the generalist's."""
    folders = {name: out / "agents" / name for name in run.agents}
    for folder, model in [(out / "base", run.base), *((folders[name], run.agents[name]) for name in folders)]:
        model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
    merge(out / "base", folders, out / "generalist", config)


def _summary(recipe: Recipe, path: Path, fast: bool, runs: list[_SeedRun]) -> DemoReport:
    first = runs[0]
    agents = first.merges[recipe.merge.name].agents

    def over_seeds(reduce: Callable[[list[float]], float]) -> dict[str, Scores]:
        return {
            name: {column: reduce([run.scores[name][column] for run in runs]) for column in scores}
            for name, scores in first.scores.items()
        }

    return DemoReport(
        models=over_seeds(statistics.fmean),
        std=over_seeds(statistics.stdev) if len(runs) > 1 else None,
        per_seed=[SeedScores(seed=run.seed, models=run.scores) for run in runs],
        tuned={
            row.name: Tuning(grid=row.tune, per_seed=[run.choices[row.name] for run in runs])
            for row in recipe.rows
            if row.tune
        },
        overlap={agent.name: agents[agent.name] for agent in recipe.agents},
        warnings={name: report.warnings for name, report in first.merges.items() if report.warnings},
        seconds={},
        fast=fast,
        recipe=path.name,
        settings=recipe,
        versions={name: version(name) for name in ("torch", "transformers", "trl")},
    )


def _plot(report: DemoReport, out: Path) -> None:
    counted = f"{report.settings.scoring.test} held-out prompts per task"
    if report.std:
        counted += f", mean and standard deviation of {len(report.per_seed)} seeds"
    plot_scores(report.models, out / "scores.png", report.std, title=f"Greedy accuracy on {counted}")
    plot_overlap(report.overlap, out / "overlap.png")


def _markdown(report: DemoReport) -> str:
    """The report for people: the table, what stands out in it, how rows were tuned, how the agents overlap."""
    columns = list(report.models["base"])
    rows = {row.name: row for row in report.settings.rows}
    seeds = len(report.per_seed)
    lines = [
        "# ram-trl demo",
        "",
        f"One tiny base, {len(report.overlap)} agents trained from it by GRPO, and their merges (`{report.recipe}`). "
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
        how = _described(rows[name]) if name in rows else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {how} |")
    lines += ["", "![Scores of every model](scores.png)", "", "## What the table says", ""]
    lines += [f"- {sentence}" for sentence in _findings(report)]
    lines += ["", "## Overlap of the agents", ""]
    lines += [f"First seed, as {report.settings.merge.name} counts it.", ""]
    lines += ["| agent | density | unique | shared | ρ | λ |", "|---|--:|--:|--:|--:|--:|"]
    for name, agent in report.overlap.items():
        rho, lambda_ = (("–" if x is None else f"{x:.3f}") for x in (agent.rho, agent.lambda_))
        lines.append(f"| {name} | {agent.density:.1%} | {agent.unique} | {agent.shared} | {rho} | {lambda_} |")
    lines += ["", "![Overlap of the agents](overlap.png)", ""]
    if report.warnings:
        lines += ["Warnings of the merges:", ""]
        lines += [f"- {sentence} ({', '.join(names)})" for sentence, names in _by_sentence(report).items()] + [""]
    times = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in report.seconds.items())
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    lines += ["## Run", "", f"- Time: {times}.", f"- Versions: {versions}.", "- Settings: see `report.json`.", ""]
    return "\n".join(lines)


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
        sentences.append(f"Seed by seed, no model is better than {generalist} in {wins} of {len(averages)}.")
    for row in report.settings.compare:
        if row.config.method == "average":
            lead = mean - models[row.name]["average"]
            told = "above" if lead >= 0 else "below"
            sentences.append(f"{generalist} is {abs(lead):.1f} points {told} plain averaging.")
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


def _described(row: MergeRow) -> str:
    """A merge in words: method, criterion and the knobs the method has."""
    config = row.config
    knobs = [f"{knob} {getattr(config, knob)}" for knob in sorted(METHOD_KNOBS[config.method]) if knob not in row.tune]
    return ", ".join([config.method, config.criterion, *knobs, *(f"{knob} tuned on dev" for knob in row.tune)])


def _best_average(report: DemoReport) -> float:
    return max(scores["average"] for scores in report.models.values())


def _cell(report: DemoReport, name: str, column: str) -> str:
    mean = f"{report.models[name][column]:.1f}"
    return f"{mean} ± {report.std[name][column]:.1f}" if report.std else mean


def _show(report: DemoReport, out: Path, console: Console) -> None:
    columns = list(report.models["base"])
    title = "Greedy accuracy (%) on held-out prompts"
    if report.fast:
        title += "; a quick test run, its numbers mean nothing"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    best = _best_average(report)
    last_of_a_kind = {"base", f"agent:{list(report.overlap)[-1]}"}
    for name, scores in report.models.items():
        cells = [Text(_cell(report, name, column)) for column in columns]
        if scores["average"] == best:
            cells[-1].stylize("bold")
        table.add_row(Text(name), *cells, end_section=name in last_of_a_kind)
    console.print(table)
    for sentence in _findings(report):
        console.print(Text(sentence))
    console.print()
    for name in ("report.md", "report.json", "scores.png", "overlap.png", "generalist"):
        console.print(Text(str(out / name)), soft_wrap=True)


def _claim(out: Path) -> None:
    """Make `out` an empty folder of the demo's, or refuse if it is something else's."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder to write to")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise ValueError(f"{out} holds files that are not from a demo; give an empty or a new folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text(
        "`ram-trl demo` writes this folder and replaces its own files in it.\n", encoding="utf-8"
    )
    for path in (out / name for name in OWN):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _bars(console: Console) -> Bars:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bars(*columns, console=console)


def _bar(bars: Bars, description: str) -> Progress:
    bar = bars.add_task(description, total=None, start=False)

    def advance(done: int, total: int) -> None:
        bars.start_task(bar)
        bars.update(bar, completed=done, total=total)

    return advance


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: more gain nothing for models this small, and the numbers then depend on no core count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _flushed_denormals() -> Iterator[None]:
    """
    Flush denormal numbers to zero, for training only: Adam's moments decay into denormals, which are very slow.

    Merging must not run in here, it would lose small updates. Threads inherit the setting from the one that starts
    them, so none may be started in here that lives on; with [`_one_thread`] none are.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Keep the seeding of trainers and makers from the caller's random numbers."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence the warnings, log lines and bars of TRL, transformers and datasets; put everything back afterwards."""
    disabled = logging.root.manager.disable
    bars_of_transformers = transformers.utils.logging.is_progress_bar_enabled()
    bars_of_datasets = datasets.are_progress_bars_disabled() is False
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars_of_transformers:
            transformers.utils.logging.enable_progress_bar()
        if bars_of_datasets:
            datasets.enable_progress_bars()
