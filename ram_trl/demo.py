"""The demo: a base made on the spot, an agent per task trained by TRL's GRPOTrainer, their merges, one table.

Agents are merged twice: once they are trained, by every rule of the recipe, and while they train, through a hub.
A recipe flows in; a folder flows out, with the models of the first seed, its hub, a report and figures. Everything in
the table is measured on prompts that nothing was trained or tuned on.
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
from functools import partial
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

from ram_trl.callback import attach
from ram_trl.config import MergeConfig
from ram_trl.demo_report import Choice, DemoReport, RoundScores, Scores, SeedScores, Tuning, markdown, plot, show
from ram_trl.engine import merge_state_dicts
from ram_trl.evaluate import ScoreRow, accuracies
from ram_trl.export import round_report
from ram_trl.hub import Hub
from ram_trl.offline import merge
from ram_trl.recipe import (
    AgentSection,
    BaseMaker,
    ContinualRow,
    Progress,
    Recipe,
    Split,
    Task,
    load_function,
    load_recipe,
)
from ram_trl.report import MergeReport
from ram_trl.rounds import Rounds
from ram_trl.team import Team
from ram_trl.turns import take_turns
from ram_trl.weights import entries

MARKER = ".ram-trl-demo"
OWN = ("base", "agents", "generalist", "hub", "report.md", "report.json", "scores.png", "overlap.png", "rounds.png")
"""What the demo writes into its folder, and so what it replaces there."""

FOREVER = 1e9
"""Seconds. Agents of one process cannot lose each other, so no round of the demo ever closes for a clock's sake."""
ALL_ROUNDS = 1_000_000


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
    dev: dict[str, Scores] = dataclasses.field(default_factory=dict)
    rounds: dict[str, list[RoundScores]] = dataclasses.field(default_factory=dict)


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
            Folder to write: `base`, `agents/…` and `generalist` (models of the first seed), `hub` (of the recipe's
            first continual run), `report.md`, `report.json`, `scores.png`, `overlap.png`, `rounds.png`. A folder of an
            earlier demo is written over.
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
                run = _run_seed(lab, seed, out, bars, f"seed {seed} · " if seeds > 1 else "", watch)
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
        if agent.trainer != "grpo" or agent.peft is not None:
            raise ValueError(f"agent '{agent.name}': the demo trains all weights with grpo; use ram-trl launch")
        # Built here for its checks only: a wrong argument should show before minutes of training, not after.
        _grpo_config(agent, 0, path.parent)
    tasks = {agent.name: load_function(agent.task, path.parent)(**agent.task_args) for agent in recipe.agents}
    if recipe.base.make is None:
        raise ValueError(f"{path}: the demo makes its base with a function; name it as base.make")
    return _Lab(
        recipe=recipe,
        make_base=load_function(recipe.base.make, path.parent),
        tasks=tasks,
        dev={name: _rows(name, task, "dev", recipe.scoring.dev) for name, task in tasks.items()},
        test={name: _rows(name, task, "test", recipe.scoring.test) for name, task in tasks.items()},
    )


def _rows(agent: str, task: Task, split: Split, count: int) -> list[ScoreRow]:
    if task.rows is None:
        raise ValueError(f"agent '{agent}': its task has no rows, and the demo scores by right answers; add them")
    return task.rows(split, count)


def _run_seed(lab: _Lab, seed: int, out: Path, bars: Bars, prefix: str, watch: _Stopwatch) -> _SeedRun:
    """Seed 0 is the one that leaves a hub in `out`, and whose rounds are scored."""
    agents = {agent.name: agent for agent in lab.recipe.agents}
    runs = {row.name: row for row in lab.recipe.runs}
    phases = ["base", *(f"agent {name}" for name in agents), "merge and score", *runs]
    if seed == 0 and runs:
        phases.append("score rounds")
    advance = {phase: _bar(bars, prefix + phase) for phase in phases}
    with watch("base"), _flushed_denormals():
        base, tokenizer = lab.make_base(seed=seed, progress=advance["base"], **lab.recipe.base.args)
    run = _SeedRun(seed, base, tokenizer)
    if seed == 0:
        _save(base, tokenizer, out / "base")
    for name, agent in agents.items():
        with watch(f"agent {name}"), _flushed_denormals():
            run.agents[name] = _train(agent, lab.tasks[name], run, advance[f"agent {name}"])
    with watch("merge and score"):
        _compare(lab, run, advance["merge and score"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = out / "base" if seed == 0 else folder / "base"
        if seed != 0:
            _save(base, tokenizer, start)
        hubs = {name: Hub(folder / f"hub-{number}") for number, name in enumerate(runs)}
        for name, row in runs.items():
            with watch(name), _flushed_denormals():
                _train_continually(lab, run, row, start, hubs[name].path, advance[name])
            with watch("merge and score"):
                run.scores[name] = _scores_of_newest(lab, run, hubs[name])
        if seed == 0 and runs:
            with watch("score rounds"):
                _score_rounds(lab, run, hubs, advance["score rounds"])
            shutil.move(next(iter(hubs.values())).path, out / "hub")
    return run


def _train(agent: AgentSection, task: Task, run: _SeedRun, progress: Progress) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(agent, task, run, Path(folder), progress)
        trainer.train()
    return trainer.model


def _train_continually(lab: _Lab, run: _SeedRun, row: ContinualRow, base: Path, hub: Path, progress: Progress) -> None:
    """Train all agents as [`_train`] does, in turns, merging through a hub; the outcome is in the hub."""
    section = lab.recipe.continual
    assert section is not None
    agents = {agent.name: agent for agent in lab.recipe.agents}
    steps = dict.fromkeys(agents, 0)
    planned = {name: _grpo_config(agent, run.seed, base).max_steps for name, agent in agents.items()}

    def work(name: str) -> None:
        def advance(done: int, total: int) -> None:
            steps[name], planned[name] = done, total
            progress(sum(steps.values()), sum(planned.values()))

        with tempfile.TemporaryDirectory() as folder:
            trainer = _trainer(agents[name], lab.tasks[name], run, Path(folder), advance)
            attach(
                trainer,
                hub=hub,
                agent=name,
                base=base,
                merge_every=section.merge_every,
                config=lab.recipe.merge.config,
                carry=row.carry,
                agents=tuple(agents),
                on_hub_error="raise",
                # Every round is scored, so none may be swept.
                keep_rounds=ALL_ROUNDS,
                timeout=FOREVER,
                patience=FOREVER,
            )
            trainer.train()

    take_turns({name: partial(work, name) for name in agents})


def _trainer(agent: AgentSection, task: Task, run: _SeedRun, folder: Path, progress: Progress) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=copy.deepcopy(run.base),
        reward_funcs=task.rewards,
        args=_grpo_config(agent, run.seed, folder),
        train_dataset=task.train,
        processing_class=copy.deepcopy(run.tokenizer),
        callbacks=[_StepProgress(progress)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


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
        # The models are tiny. On one kind of CPU the same seed gives the same numbers; on another it is another draw.
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
    if run.seed == 0 and lab.recipe.runs:
        total += len(lab.recipe.rows)

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
        if run.seed == 0 and lab.recipe.runs:
            run.dev[row.name] = score(merged, lab.dev)


def _scores_of_newest(lab: _Lab, run: _SeedRun, hub: Hub) -> Scores:
    """Scores of a hub's last generalist on the test split."""
    return accuracies(_generalist(run, hub, len(hub.decisions())), run.tokenizer, lab.test)


def _score_rounds(lab: _Lab, run: _SeedRun, hubs: Mapping[str, Hub], progress: Progress) -> None:
    """Score every round of every hub on the dev split, and read what the round's report counted."""
    rounds = [(name, d.round) for name, hub in hubs.items() for d in hub.decisions()]
    run.dev["base"] = accuracies(run.base, run.tokenizer, lab.dev)
    for done, (name, number) in enumerate(rounds, 1):
        told = round_report(hubs[name], number)
        assert told is not None
        report = told[1]
        agents = {agent.name: report.agents[agent.name] for agent in lab.recipe.agents if agent.name in report.agents}
        row = RoundScores(
            round=number,
            scores=accuracies(_generalist(run, hubs[name], number), run.tokenizer, lab.dev),
            density={agent: found.density for agent, found in agents.items()},
            lambda_={agent: found.lambda_ for agent, found in agents.items()},
            shared={agent: found.shared / found.active if found.active else None for agent, found in agents.items()},
            sign_conflict=report.sign_conflict,
        )
        run.rounds.setdefault(name, []).append(row)
        progress(done, len(rounds))


def _generalist(run: _SeedRun, hub: Hub, number: int) -> PreTrainedModel:
    """The generalist of a round in fp32, as the hub's state has it."""
    state = Rounds(hub, Team(), hub.described()["identity"]).state(number)
    model = copy.deepcopy(run.base)
    for name in state.names():
        parameter = model.get_parameter(name)
        parameter.data.copy_(state.read(name, 0, entries(state, name)).view_as(parameter))
    return model


def _save_models(run: _SeedRun, config: MergeConfig, out: Path) -> None:
    """Save agents as folders beside the base's, and merge those folders into the generalist's."""
    folders = {name: out / "agents" / name for name in run.agents}
    for name, folder in folders.items():
        _save(run.agents[name], run.tokenizer, folder)
    merge(out / "base", folders, out / "generalist", config)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
        dev=first.dev,
        rounds=first.rounds,
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

    Merging would lose small updates in here, unless it keeps denormals for itself as [`~ram_trl.workers.Workers`]
    does. Threads inherit the setting from the one that starts them, so none may be started in here that lives on; with
    [`_one_thread`] none are, and agents that take turns end in here.
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
