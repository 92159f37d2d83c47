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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
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

from ram_trl.config import MergeConfig
from ram_trl.demo_report import Choice, DemoReport, Scores, SeedScores, Tuning, markdown, plot, show
from ram_trl.engine import merge_state_dicts
from ram_trl.evaluate import ScoreRow, accuracies
from ram_trl.offline import merge
from ram_trl.recipe import AgentSection, BaseMaker, Progress, Recipe, Task, load_function, load_recipe
from ram_trl.report import MergeReport

MARKER = ".ram-trl-demo"
OWN = ("base", "agents", "generalist", "report.md", "report.json", "scores.png", "overlap.png")
"""What the demo writes into its folder, and so what it replaces there."""


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
            plot(report, out)
    report = report.model_copy(update={"seconds": watch.seconds})
    (out / "report.json").write_text(report.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown(report), encoding="utf-8")
    show(report, out, console)
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
