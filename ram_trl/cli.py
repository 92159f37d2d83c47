"""The `ram-trl` command: a thin edge over `merge`, `probe` and the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from ram_trl.config import MergeConfig, read_yaml
from ram_trl.offline import SHARD_SIZE, find_problems, is_size, merge, probe
from ram_trl.problems import MergeInputError, Problem
from ram_trl.report import MergeReport
from ram_trl.tables import show_report

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Base = Annotated[Path | None, typer.Option("--base", help="Folder of the checkpoint the agents started from.")]
Agents = Annotated[list[str] | None, typer.Option("--agent", help="NAME=FOLDER of an agent; once per agent.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to make.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML with base, agents, out and the options below; the command line wins."),
]
Preset = Annotated[str | None, typer.Option(help="paper, released or mergekit.")]
Method = Annotated[str | None, typer.Option(help="ram (default), average, task_arithmetic, ties or dare.")]
Epsilon = Annotated[float | None, typer.Option(help="Active where |τ| > EPSILON.")]
Top = Annotated[float | None, typer.Option(help="Active: the TOP fraction of each agent's largest |τ|.")]
Ulp = Annotated[bool | None, typer.Option("--ulp", help="Active where a weight differs once rounded to 16 bits.")]
R = Annotated[float | None, typer.Option("--r", help="ram: rescale of unique entries; 0 is RAM, above it RAM+.")]
Alpha = Annotated[float | None, typer.Option(help="ram: upper clip of rho.")]
Rho = Annotated[str | None, typer.Option(help="ram: rho over the whole model (global) or per tensor (tensor).")]
Scale = Annotated[float | None, typer.Option(help="task_arithmetic, ties, dare: factor on the task vector.")]
Drop = Annotated[float | None, typer.Option(help="dare: share of entries dropped.")]
Seed = Annotated[int | None, typer.Option(help="dare: seed of the mask.")]
Weights = Annotated[list[str] | None, typer.Option("--weight", help="NAME=FACTOR on an agent's task vector.")]
Threads = Annotated[int | None, typer.Option(help="Threads; by default the CPUs there are.")]

FILE_KEYS = ("base", "agents", "out", "shard_size", "threads")


@app.command("merge")
def merge_command(
    base: Base = None,
    agent: Agents = None,
    out: Out = None,
    config: ConfigFile = None,
    preset: Preset = None,
    method: Method = None,
    epsilon: Epsilon = None,
    top: Top = None,
    ulp: Ulp = None,
    r: R = None,
    alpha: Alpha = None,
    rho: Rho = None,
    scale: Scale = None,
    drop: Drop = None,
    seed: Seed = None,
    weight: Weights = None,
    shard_size: Annotated[str | None, typer.Option(help=f"Largest weight file; {SHARD_SIZE} by default.")] = None,
    threads: Threads = None,
) -> None:
    """Merge agents into one model that from_pretrained opens."""
    flags = {"preset": preset, "method": method, "epsilon": epsilon, "top": top, "ulp": ulp, "r": r, "alpha": alpha}
    flags |= {"rho": rho, "scale": scale, "drop": drop, "seed": seed}
    given = {"base": base, "out": out, "shard_size": shard_size, "threads": threads}
    job, knobs = _settled(config, given, agent, flags, weight, needed=("base", "agents", "out"))
    size, threads = job.get("shard_size", SHARD_SIZE), job.get("threads")
    report = _run(lambda: merge(job["base"], job["agents"], job["out"], knobs, max_shard_size=size, threads=threads))
    show_report(report, Console())
    Console().print(f"generalist: {report.out}", soft_wrap=True, highlight=False, markup=False, emoji=False)


@app.command("probe")
def probe_command(
    base: Base = None,
    agent: Agents = None,
    config: ConfigFile = None,
    preset: Preset = None,
    method: Method = None,
    epsilon: Epsilon = None,
    top: Top = None,
    ulp: Ulp = None,
    r: R = None,
    alpha: Alpha = None,
    rho: Rho = None,
    weight: Weights = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Count what a merge would do: density, overlap, rho, lambda. Writes nothing."""
    flags = {"preset": preset, "method": method, "epsilon": epsilon, "top": top, "ulp": ulp, "r": r, "alpha": alpha}
    flags |= {"rho": rho}
    job, knobs = _settled(config, {"base": base, "threads": threads}, agent, flags, weight, needed=("base", "agents"))
    report = _run(lambda: probe(job["base"], job["agents"], knobs, threads=job.get("threads")))
    if as_json:
        print(report.to_json(), end="")
    else:
        show_report(report, Console())


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder to write; an earlier demo there is replaced.")] = Path("runs/demo"),
    recipe: Annotated[Path | None, typer.Option(help="A recipe like the shipped demo.yaml.")] = None,
    seeds: Annotated[int, typer.Option(help="Run seeds 0, 1, …; more than one gives mean ± std.")] = 1,
    fast: Annotated[
        bool, typer.Option("--fast", help="A quick run through every part; its scores mean nothing.")
    ] = False,
) -> None:
    """Train three agents by GRPO on this machine, merge them by every rule, and compare."""
    # trl takes seconds to import, and only the demo needs it.
    from ram_trl.demo import run_demo
    from ram_trl.recipe import RECIPES

    try:
        run_demo(recipe or RECIPES / "demo.yaml", out, seeds, fast, Console())
    except (ValueError, OSError) as error:
        _stop(error)


@app.command("status")
def status_command(
    hub: Annotated[Path, typer.Argument(help="Folder of the hub.")],
    watching: Annotated[bool, typer.Option("--watch", help="Keep showing it until all agents are done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    every: Annotated[float, typer.Option(help="--watch: seconds between two looks.")] = 2.0,
    patience: Annotated[float, typer.Option(help="--watch: an agent without a heartbeat this long is silent.")] = 60.0,
) -> None:
    """Show who trains in a hub, and what came of the rounds."""
    from ram_trl.hub import Hub
    from ram_trl.status import hub_status, show_status, watch

    try:
        if watching:
            watch(Hub(hub), Console(), every, patience)
        elif as_json:
            print(hub_status(Hub(hub)).model_dump_json(indent=2))
        else:
            Console().print(show_status(hub_status(Hub(hub))))
    except (RuntimeError, ValueError, OSError) as error:
        _stop(error)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _settled(
    file: Path | None,
    given: Mapping[str, Any],
    agents: list[str] | None,
    flags: Mapping[str, Any],
    weights: list[str] | None,
    needed: Iterable[str],
) -> tuple[dict[str, Any], MergeConfig]:
    """What to merge and how, from a YAML file and the command line; stops with all problems at once."""
    problems: list[Problem] = []
    job: dict[str, Any] = {}
    layers: list[dict[str, Any]] = []
    if file is not None:
        try:
            values = read_yaml(file)
        except ValueError as error:
            problems.append(Problem("config", str(error)))
        else:
            job = {key: values.pop(key) for key in FILE_KEYS if values.get(key) is not None}
            layers.append(values)
    job |= {key: value for key, value in given.items() if value is not None}
    named = _pairs(agents, "--agent", "NAME=FOLDER", problems)
    problems += _check_job(job)
    if named:
        job["agents"] = job.get("agents", {}) | named
    layers.append({key: value for key, value in flags.items() if value is not None})
    factors = _numbers(_pairs(weights, "--weight", "NAME=FACTOR", problems), problems)
    if factors:
        layers[-1]["weights"] = factors
    for key in needed:
        if not job.get(key):
            option = {"agents": "--agent NAME=FOLDER"}.get(key, f"--{key} FOLDER")
            problems.append(Problem("config", f"{option} is missing"))
    knobs = MergeConfig()
    try:
        knobs = MergeConfig.layered(*layers)
    except ValidationError as error:
        problems += [Problem("config", _sentence(detail)) for detail in error.errors()]
    except ValueError as error:
        problems.append(Problem("config", str(error)))
    if problems:
        if job.get("base") and job.get("agents"):
            names = MergeConfig(weights=dict.fromkeys(factors, 1.0))
            problems += find_problems(job["base"], job["agents"], job.get("out"), names, thorough=True)
        _stop(MergeInputError(problems))
    return job, knobs


def _check_job(job: dict[str, Any]) -> list[Problem]:
    """Problems with what is to be merged; what is wrong is taken out."""
    expected = {
        "base": ("a folder", lambda v: isinstance(v, str | Path)),
        "out": ("a folder", lambda v: isinstance(v, str | Path)),
        "agents": ("`name: folder` pairs", lambda v: isinstance(v, dict) and _all_text(v)),
        "threads": ("a whole number, at least 1", lambda v: type(v) is int and v >= 1),
        "shard_size": ("a size such as 5GB", is_size),
    }
    return [
        Problem("config", f"{key} is {job.pop(key)!r}, expected {what}")
        for key, (what, holds) in expected.items()
        if key in job and not holds(job[key])
    ]


def _all_text(pairs: dict[Any, Any]) -> bool:
    return all(isinstance(part, str) for pair in pairs.items() for part in pair)


def _pairs(texts: list[str] | None, option: str, form: str, problems: list[Problem]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            problems.append(Problem("config", f"{option} {text}: expected {form}"))
        elif name in pairs:
            problems.append(Problem("config", f"{option} names '{name}' twice: {pairs[name]} and {value}"))
        else:
            pairs[name] = value
    return pairs


def _numbers(pairs: Mapping[str, str], problems: list[Problem]) -> dict[str, float]:
    numbers = {}
    for name, text in pairs.items():
        try:
            numbers[name] = float(text)
        except ValueError:
            problems.append(Problem("config", f"--weight {name}={text}: '{text}' is not a number"))
    return numbers


def _sentence(detail: Mapping[str, Any]) -> str:
    """One pydantic error as a sentence that names the knob and what was given."""
    knob = ".".join(map(str, detail["loc"]))
    message = detail["msg"].removeprefix("Value error, ")
    return f"{knob} = {detail['input']!r}: {message}" if knob else message


def _run(work: Callable[[], MergeReport]) -> MergeReport:
    try:
        return work()
    except (MergeInputError, OSError) as error:
        _stop(error)


def _stop(error: Exception) -> NoReturn:
    Console(stderr=True).print(str(error), style="red", markup=False, emoji=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
