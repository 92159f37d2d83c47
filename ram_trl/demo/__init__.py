"""The demo: a base made on the spot, an agent per task trained by TRL's GRPOTrainer, their merges, one table.

Agents are merged twice: once they are trained, by every rule of the recipe, and while they train, through a hub.
A recipe flows in; a folder flows out, with the models of the first seed, its hub, a report and figures. Everything in
the table is measured on prompts that nothing was trained or tuned on.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from peft import PeftModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ram_trl.config import MergeConfig
from ram_trl.continual.hub import Hub
from ram_trl.demo.lab import Lab, SeedRun, open_lab
from ram_trl.demo.merging import compare, score_rounds, scores_of_newest
from ram_trl.demo.process import flushed_denormals, one_thread, own_random_state, quiet_libraries
from ram_trl.demo.report import DemoReport, Scores, SeedScores, Tuning, markdown, plot, show
from ram_trl.demo.training import train, train_continually
from ram_trl.folders.offline import merge
from ram_trl.recipe import Progress, Recipe

MARKER = ".ram-trl-demo"
OWN = ("base", "agents", "generalist", "hub", "report.md", "report.json", "scores.png", "overlap.png", "rounds.png")
"""What the demo writes into its folder, and so what it replaces there."""


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
    with watch("total"), quiet_libraries(), own_random_state(), one_thread():
        with watch("prepare"):
            lab = open_lab(recipe, fast)
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


def _run_seed(lab: Lab, seed: int, out: Path, bars: Bars, prefix: str, watch: _Stopwatch) -> SeedRun:
    """Seed 0 is the one that leaves a hub in `out`, and whose rounds are scored."""
    agents = {agent.name: agent for agent in lab.recipe.agents}
    runs = {row.name: row for row in lab.recipe.runs}
    phases = ["base", *(f"agent {name}" for name in agents), "merge and score", *runs]
    if seed == 0 and runs:
        phases.append("score rounds")
    advance = {phase: _bar(bars, prefix + phase) for phase in phases}
    with watch("base"), flushed_denormals():
        base, tokenizer = lab.make_base(seed=seed, progress=advance["base"], **lab.recipe.base.args)
    run = SeedRun(seed, base, tokenizer)
    if seed == 0:
        _save(base, tokenizer, out / "base")
    for name, agent in agents.items():
        with watch(f"agent {name}"), flushed_denormals():
            run.agents[name] = train(agent, lab.tasks[name], run, advance[f"agent {name}"])
    with watch("merge and score"):
        compare(lab, run, advance["merge and score"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = out / "base" if seed == 0 else folder / "base"
        if seed != 0:
            _save(base, tokenizer, start)
        hubs = {name: Hub(folder / f"hub-{number}") for number, name in enumerate(runs)}
        for name, row in runs.items():
            with watch(name), flushed_denormals():
                train_continually(lab, run, row, start, hubs[name].path, advance[name])
            with watch("merge and score"):
                run.scores[name] = scores_of_newest(lab, run, hubs[name])
        if seed == 0 and runs:
            with watch("score rounds"):
                score_rounds(lab, run, hubs, advance["score rounds"])
            shutil.move(next(iter(hubs.values())).path, out / "hub")
    return run


def _save_models(run: SeedRun, config: MergeConfig, out: Path) -> None:
    """Save agents as folders beside the base's, and merge those folders into the generalist's."""
    folders = {name: out / "agents" / name for name in run.agents}
    for name, agent in run.agents.items():
        if isinstance(agent, PeftModel):
            agent.peft_config["default"].base_model_name_or_path = str(out / "base")
        _save(agent, run.tokenizer, folders[name])
    merge(out / "base", folders, out / "generalist", config)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _summary(recipe: Recipe, path: Path, fast: bool, runs: list[SeedRun]) -> DemoReport:
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
            for row in recipe.one_shot
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
