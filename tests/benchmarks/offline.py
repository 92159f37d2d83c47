"""
Offline merging beside mergekit and a plain copy: python -m tests.benchmarks.offline [--json PATH] [--small]

A bfloat16 model of 0.41 billion parameters and three agents that changed 20 % of its entries are made on the spot.
`ram_trl.merge`, mergekit 0.1.5 `ramplus_tl` (the same rule: our preset `mergekit`) and a script that only reads all
inputs and writes one model take turns on them, with a warm page cache; ratios are taken within each turn, and their
medians told. Imports are left out for all. Ours and the copy wait until the output is on disk (fsync); mergekit does
not, and is not charged for it. A second part measures ours on larger models and with more agents.

mergekit's options are those that were fastest here: arithmetic in bfloat16 (in float32 it needs more time and nearly
twice the memory; without `out_dtype` it writes float32); `--lazy-unpickle` and `--low-cpu-memory` change nothing for
safetensors on the CPU. It runs in this Python if that has mergekit 0.1.5, else in `.venv-mergekit`, made on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from ram_trl.files import flush
from ram_trl.weights import entries
from ram_trl.weights.checkpoint import open_checkpoint
from tests.benchmarks import large
from tests.benchmarks.measured import ROOT, Cost, run

MERGEKIT = "0.1.5"
SAME_RULE = {"preset": "mergekit"}
MERGEKIT_KNOBS = {
    "recipe": {"dtype": "bfloat16", "out_dtype": "bfloat16", "parameters": {"epsilon": 1e-5, "r": 0.1, "alpha": 0.2}},
    "options": {"lazy_unpickle": True, "low_cpu_memory": True},
}
AGENTS = 3
SCALING = ((1, 2), (1, 3), (1, 4), (1, 8), (2, 3), (4, 3))
"""Multiples of the parameters, and agents."""
OUTPUTS = 3
"""At most so many outputs lie on the disk at a time."""

READ = 4 << 20
COMPARED = 8
"""Tensors compared with mergekit's."""


@dataclass(frozen=True)
class Models:
    """A base and agents by name, in folders."""

    base: Path
    agents: Mapping[str, Path]
    parameters: int

    def only(self, agents: int) -> Models:
        """The same with the first few agents."""
        return Models(self.base, dict(list(self.agents.items())[:agents]), self.parameters)

    def warm(self) -> None:
        """Brings the weights into the page cache."""
        buffer = bytearray(READ)
        for folder in (self.base, *self.agents.values()):
            for file in folder.glob("*.safetensors"):
                with open(file, "rb", buffering=0) as source:
                    while source.readinto(buffer):
                        pass


class Bench:
    """
    Makes models and runs programs on them in one temporary folder.

    Args:
        folder (`Path`):
            The folder; the caller removes it.
        console (`Console`):
            Where progress goes.
        keep (`bool`):
            Whether models and outputs stay when they are done with.
    """

    def __init__(self, folder: Path, console: Console, keep: bool) -> None:
        self.folder = folder
        self.console = console
        self.keep = keep

    @contextmanager
    def models(self, name: str, config: Qwen3Config, agents: int) -> Iterator[Models]:
        """A base and agents, for the time of the block."""
        home = self.folder / name
        home.mkdir()
        base, folders = home / "base", {f"agent-{i}": home / f"agent-{i}" for i in range(1, agents + 1)}
        try:
            with self.console.status(f"making the base of {name}"):
                parameters = large.make_base(base, config)
            for seed, folder in enumerate(folders.values(), 1):
                with self.console.status(f"making agent {seed} of {agents} of {name}"):
                    large.make_agent(folder, base, config, seed)
            yield Models(base, folders, parameters)
        finally:
            self.forget(home)

    def cost(
        self, label: str, python: str, program: str, knobs: Mapping[str, Any], toy: Models, models: Models
    ) -> Cost:
        """One run of a program; its output is `output(label)` until the next run of that label."""
        job: dict[str, Any] = {"program": program, "knobs": knobs}
        outputs = {"toy": self.folder / "toy-output", "model": self.output(label)}
        for work, inputs in {"toy": toy, "model": models}.items():
            shutil.rmtree(outputs[work], ignore_errors=True)
            job[work] = {"base": inputs.base, "agents": inputs.agents, "out": outputs[work]}
        with self.console.status(f"{label}: {models.parameters / 1e9:.2f} B parameters, {len(models.agents)} agents"):
            models.warm()
            cost = run(python, job, self.folder)
            # What mergekit has not waited for must not slow down the next.
            for file in self.output(label).iterdir():
                flush(file)
            return cost

    def output(self, label: str) -> Path:
        """Where the program of that label writes."""
        return self.folder / f"output-{label}"

    def forget(self, folder: Path) -> None:
        """Removes a folder, unless everything is kept."""
        if not self.keep:
            shutil.rmtree(folder, ignore_errors=True)


def compare(bench: Bench, toy: Models, models: Models, rounds: int, mergekit: str | None) -> dict[str, Any]:
    """All programs in turns; the medians of what they took and of the ratios."""
    contenders: dict[str, tuple[str, str, Mapping[str, Any]]] = {
        "copy": (sys.executable, "copy", {}),
        "ours": (sys.executable, "ours", SAME_RULE),
        "ours_top": (sys.executable, "ours", {"top": 0.2}),
    }
    if mergekit:
        contenders["mergekit"] = (mergekit, "mergekit", MERGEKIT_KNOBS)
    costs: dict[str, list[Cost]] = {label: [] for label in contenders}
    for turn in range(1, rounds + 1):
        for label, (python, program, knobs) in contenders.items():
            cost = bench.cost(label, python, program, knobs, toy, models)
            costs[label].append(cost)
            bench.console.print(f"turn {turn} of {rounds}: {label} {_told(cost)}", highlight=False)
            if label in ("copy", "ours_top"):
                bench.forget(bench.output(label))
    found: dict[str, Any] = {label: _median(runs) for label, runs in costs.items()}
    found["ratios"] = _ratios(costs, "ours")
    found["ratios_top"] = _ratios(costs, "ours_top")
    if mergekit:
        found["agreement"] = agreement(bench.output("ours"), bench.output("mergekit"))
    found["turns"] = {label: [asdict(cost) for cost in runs] for label, runs in costs.items()}
    for label in contenders:
        bench.forget(bench.output(label))
    return found


def _median(runs: list[Cost]) -> dict[str, float]:
    return {key: median(asdict(cost)[key] for cost in runs) for key in asdict(runs[0])}


def _ratios(costs: Mapping[str, list[Cost]], label: str) -> dict[str, float]:
    """Medians over the turns of what `label` took, as multiples of the others' in the same turn."""
    ratios = {"wall_vs_copy": median(a.wall_s / b.wall_s for a, b in zip(costs[label], costs["copy"], strict=True))}
    if "mergekit" in costs:
        pairs = list(zip(costs[label], costs["mergekit"], strict=True))
        ratios["wall_vs_mergekit"] = median(a.wall_s / b.wall_s for a, b in pairs)
        ratios["cpu_vs_mergekit"] = median(a.cpu_s / b.cpu_s for a, b in pairs)
    return ratios


def agreement(ours: Path, theirs: Path) -> dict[str, Any]:
    """
    How far two merges of one rule agree, on a few tensors.

    A step is a step between neighbouring bfloat16 numbers.

    Raises:
        `AssertionError`: if the outputs are not of one layout, or an entry is more than rounding apart.
    """
    a, b = open_checkpoint(ours, "ours").store, open_checkpoint(theirs, "mergekit").store
    names = a.names()
    assert [(n, a.shape(n), a.dtype(n)) for n in names] == [(n, b.shape(n), b.dtype(n)) for n in b.names()]
    largest = max(names, key=lambda name: entries(a, name))
    chosen = sorted({largest, *names[:: max(1, len(names) // COMPARED)]})
    total = equal = one_step = 0
    farthest = 0.0
    for name in chosen:
        left, right = (store.read(name, 0, entries(store, name)) for store in (a, b))
        steps = (_rank(left) - _rank(right)).abs()
        total += len(steps)
        equal += int((steps == 0).sum())
        one_step += int((steps <= 1).sum())
        farthest = max(farthest, float((left.float() - right.float()).abs().max()))
    assert one_step == total, f"{total - one_step} of {total} entries are more than a bfloat16 step from mergekit's"
    return {
        "tensors": len(chosen),
        "entries": total,
        "bit_equal": equal / total,
        "largest_difference": farthest,
    }


def _rank(values: torch.Tensor) -> torch.Tensor:
    """Position of bfloat16 numbers among all of them."""
    pattern = values.view(torch.int16).int()
    return torch.where(pattern < 0, -(pattern & 0x7FFF), pattern)


def scale(bench: Bench, toy: Models, rounds: int, shrink: int) -> list[dict[str, float]]:
    """What ours takes for larger models and more agents: medians over the rounds."""
    rows = []
    for multiple in sorted({multiple for multiple, _ in SCALING}):
        counts = [agents for factor, agents in SCALING if factor == multiple]
        with bench.models(f"{multiple}x", large.layout(multiple, shrink), max(counts)) as models:
            runs: dict[int, list[Cost]] = {agents: [] for agents in counts}
            for _ in range(rounds):
                for agents in counts:
                    few = models.only(agents)
                    runs[agents].append(bench.cost("ours", sys.executable, "ours", SAME_RULE, toy, few))
                    bench.forget(bench.output("ours"))
            for agents in counts:
                row = {"multiple": multiple, "parameters": models.parameters, "agents": agents}
                rows.append(row | _median(runs[agents]))
                told = f"{multiple} x parameters, {agents} agents: {_told(Cost(**_median(runs[agents])))}"
                bench.console.print(told, highlight=False)
    return rows


def fitting(folder: Path, shrink: int, models: Iterable[tuple[int, int]]) -> int:
    """
    The divisor of all widths, `shrink` or the next with which models fit on the disk and in the page cache.

    Args:
        folder (`Path`):
            Where they go.
        shrink (`int`):
            The divisor that is wanted.
        models (`Iterable[tuple[int, int]]`):
            Multiples of the parameters, and the checkpoints of that size that are there at the same time.

    Raises:
        `SystemExit`: if none fits.
    """
    disk, memory = shutil.disk_usage(folder).free, _available_memory()
    for divisor in (1, 2, 4, 8):
        need = max(large.size_of(large.layout(multiple, divisor)) * count for multiple, count in models)
        if divisor >= shrink and need < min(disk, memory):
            if divisor > shrink:
                print(f"{min(disk, memory) / 1e9:.1f} GB of disk and page cache are free: widths divided by {divisor}")
            return divisor
    raise SystemExit(
        f"{need / 1e9:.1f} GB are needed; free: {disk / 1e9:.1f} GB in {folder}, {memory / 1e9:.1f} GB memory"
    )


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def python_with_mergekit(console: Console) -> str:
    """An interpreter that has mergekit: this one, or that of a venv made for it, with the torch of this one."""
    home = ROOT / ".venv-mergekit"
    python = str(home / "bin" / "python")
    for candidate in (sys.executable, python):
        ask = [candidate, "-c", "from importlib.metadata import version; print(version('mergekit'))"]
        if Path(candidate).exists():
            told = subprocess.run(ask, capture_output=True, text=True, check=False)
            if told.stdout.strip() == MERGEKIT:
                return candidate
    wanted = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers")]
    with console.status(f"installing mergekit {MERGEKIT} into {home}"):
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"mergekit=={MERGEKIT}", *wanted], check=True)
    return python


def show(found: Mapping[str, Any], console: Console) -> None:
    """The numbers as tables."""
    if "ours" in found:
        table = Table("program", box=box.SIMPLE_HEAD)
        for heading in ("wall s", "CPU s", "peak anonymous MB"):
            table.add_column(heading, justify="right")
        for label in ("ours", "ours_top", "mergekit", "copy"):
            if label in found:
                table.add_row(label, *(f"{found[label][key]:.4g}" for key in ("wall_s", "cpu_s", "peak_anon_mb")))
        console.print(table)
        for key, what in (("ratios", "ours"), ("ratios_top", "ours_top")):
            told = ", ".join(f"{name} {value:.3f}" for name, value in sorted(found[key].items()))
            console.print(f"{what}: {told}", highlight=False)
    if "agreement" in found:
        agreed = found["agreement"]
        console.print(
            f"ours and mergekit, {agreed['entries']:,} entries of {agreed['tensors']} tensors: "
            f"{agreed['bit_equal']:.4%} equal bit for bit, all others one bfloat16 step apart (at most "
            f"{agreed['largest_difference']:.2g})",
            highlight=False,
        )
    if "scaling" in found:
        table = Table("parameters", box=box.SIMPLE_HEAD)
        for heading in ("agents", "wall s", "CPU s", "CPU ns per entry read", "peak anonymous MB"):
            table.add_column(heading, justify="right")
        for row in found["scaling"]:
            each = row["cpu_s"] / (row["parameters"] * (row["agents"] + 1)) * 1e9
            numbers = (f"{row['wall_s']:.4g}", f"{row['cpu_s']:.4g}", f"{each:.3g}", f"{row['peak_anon_mb']:.4g}")
            table.add_row(f"{row['parameters'] / 1e9:.3f} B", str(row["agents"]), *numbers)
        console.print(table)


def _told(cost: Cost) -> str:
    return f"{cost.wall_s:.2f} s wall, {cost.cpu_s:.2f} s CPU, {cost.peak_anon_mb:.0f} MB anonymous at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"), help="where the temporary folder goes: a disk"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns; medians are taken over them")
    parser.add_argument(
        "--small", action="store_true", help="all widths divided by 4: a quick look at 27 M parameters"
    )
    parser.add_argument("--skip-mergekit", action="store_true", help="ours and the copy only")
    parser.add_argument("--skip-scaling", action="store_true", help="no larger models, no more agents")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder")
    arguments = parser.parse_args()
    # So that what was made is removed when the process is asked to end, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console()
    shrink = 4 if arguments.small else 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shrink = fitting(arguments.folder, shrink, [(1, AGENTS + 1 + OUTPUTS)])
    mergekit = None if arguments.skip_mergekit else python_with_mergekit(console)
    folder = Path(tempfile.mkdtemp(prefix="ram-trl-benchmark-", dir=arguments.folder))
    cpus, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if load > cpus / 2:
        told = (
            f"others use this machine (load {load:.1f}, {cpus} CPUs): times say little, and threads that wait burn CPU"
        )
        console.print(told, style="yellow", highlight=False)
    found: dict[str, Any] = {"rounds": arguments.rounds, "cpus": cpus, "load_at_start": load, "agents": AGENTS}
    try:
        bench = Bench(folder, console, arguments.keep)
        with bench.models("toy", large.layout(1, 8), AGENTS) as toy:
            with bench.models("model", large.layout(1, shrink), AGENTS) as models:
                found |= {"parameters": models.parameters, "changed": large.CHANGED}
                found |= compare(bench, toy, models, arguments.rounds, mergekit)
            if not arguments.skip_scaling:
                needed = [(multiple, agents + 2) for multiple, agents in SCALING]
                found["scaling"] = scale(bench, toy, arguments.rounds, fitting(folder, shrink, needed))
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    finally:
        if arguments.keep:
            console.print(f"kept {folder}", highlight=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    show(found, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
