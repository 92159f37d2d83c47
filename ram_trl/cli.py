"""The `ram-trl` command: a thin edge over `merge`, `probe` and the demo."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console

from ram_trl.config import MergeConfig, read_yaml
from ram_trl.folders.generalist import DTYPES
from ram_trl.folders.offline import SHARD_SIZE, find_problems, is_size, merge, merge_to_adapter, outline, probe
from ram_trl.folders.outline import show_outline
from ram_trl.problems import MergeInputError, Problem
from ram_trl.telling.tables import show_fit, show_probe, show_report

Result = TypeVar("Result")

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
Dtype = Annotated[str | None, typer.Option(help="Of the output: auto (as the base), float32, bfloat16 or float16.")]
ShardSize = Annotated[str | None, typer.Option(help=f"Largest weight file; {SHARD_SIZE} by default.")]
Device = Annotated[str | None, typer.Option(help="Where chunks are worked on: cpu (default) or cuda.")]
Threads = Annotated[int | None, typer.Option(help="Threads; by default the CPUs there are.")]
MixedDtypes = Annotated[
    bool | None, typer.Option("--allow-mixed-dtypes", help="Merge agents stored in different precision.")
]

FULL_KEYS = ("dtype", "shard_size", "device")
"""Options for models, not adapters."""
ADAPTER_KEYS = ("rank", "max_error")
JOB_KEYS = ("base", "out", "as", *FULL_KEYS, *ADAPTER_KEYS, "threads", "allow_mixed_dtypes")
"""Options that say what to merge into what; in a YAML file there is `agents`, too."""
KNOBS = ("preset", "method", "epsilon", "top", "ulp", "r", "alpha", "rho", "scale", "drop", "seed")
"""Options that are the knobs of a `MergeConfig`; in a YAML file there is `weights`, too."""


@app.command("merge")
def merge_command(
    context: typer.Context,
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
    dtype: Dtype = None,
    shard_size: ShardSize = None,
    device: Device = None,
    threads: Threads = None,
    allow_mixed_dtypes: MixedDtypes = None,
    as_: Annotated[str | None, typer.Option("--as", help="full (a model, default) or lora (an adapter).")] = None,
    rank: Annotated[int | None, typer.Option(help="--as lora: rank of all layers.")] = None,
    max_error: Annotated[float | None, typer.Option(help="--as lora: largest relative error of a layer.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and tell what would be done; no more.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a merge that was killed.")] = False,
) -> None:
    """Merge agents (models or LoRA adapters) into one model that from_pretrained opens, or into an adapter."""
    given = {**context.params, "as": as_}
    job, knobs = _settled(given, needed=("base", "agents", "out"), thorough=not dry_run)
    inputs = job.pop("base"), job.pop("agents"), job.pop("out"), knobs
    if job.pop("as", "full") == "lora":
        if dry_run or resume:
            _stop(MergeInputError([Problem("config", "--dry-run and --resume are for --as full")]))
        report, fitted = _run(lambda: merge_to_adapter(*inputs, **job))
        show_report(report, Console())
        show_fit(fitted, Console())
        Console().print(f"adapter: {report.out}", soft_wrap=True, highlight=False, markup=False, emoji=False)
        return
    if "shard_size" in job:
        job["max_shard_size"] = job.pop("shard_size")
    if dry_run:
        show_outline(_run(lambda: outline(*inputs, **job)), Console())
        return
    with _terminated_like_interrupted():
        report = _run(lambda: merge(*inputs, **job, resume=resume))
    show_report(report, Console())
    Console().print(f"generalist: {report.out}", soft_wrap=True, highlight=False, markup=False, emoji=False)


@app.command("probe")
def probe_command(
    context: typer.Context,
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
    plot: Annotated[Path | None, typer.Option(help="Folder to write pictures to.")] = None,
) -> None:
    """Count what a merge would do, by kind of tensor and layer, and recommend a criterion. Writes no model."""
    job, knobs = _settled(context.params, needed=("base", "agents"))
    report = _run(lambda: probe(job["base"], job["agents"], knobs, threads=job.get("threads")))
    if as_json:
        print(report.to_json(), end="")
    else:
        show_probe(report, Console())
    if plot is not None:
        # matplotlib takes half a second to import, and only pictures need it.
        from ram_trl.telling.plots import save_merge_plots

        try:
            pictures = save_merge_plots(report, plot)
        except OSError as error:
            _stop(error)
        if not as_json:
            Console().print(
                f"pictures: {', '.join(map(str, pictures))}", soft_wrap=True, highlight=False, markup=False
            )


@app.command("convert-zero")
def convert_zero_command(
    checkpoint: Annotated[Path, typer.Argument(help="A DeepSpeed ZeRO checkpoint, such as checkpoint-60.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    base: Annotated[
        Path | None, typer.Option(help="Its base, for config.json and the tokenizer if it has none.")
    ] = None,
) -> None:
    """Make a DeepSpeed ZeRO checkpoint a folder that merge reads. Unpickles it: only for files you trust."""
    from ram_trl.folders.zero import convert_zero

    try:
        convert_zero(checkpoint.expanduser(), out.expanduser(), base)
    except ModuleNotFoundError as error:
        _stop(RuntimeError(f"{error.name} is not installed; pip install 'ram-trl[deepspeed]'"))
    except (ValueError, OSError) as error:
        _stop(error)


@app.command("demo")
def demo_command(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write, runs/demo or runs/demo-lora by default; an earlier demo is replaced."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe like the shipped demo.yaml or lora.yaml.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA adapters: the shipped lora.yaml.")] = False,
    seeds: Annotated[int, typer.Option(help="Run seeds 0, 1, …; more than one gives mean ± std.")] = 1,
    fast: Annotated[
        bool, typer.Option("--fast", help="A quick run through every part; its scores mean nothing.")
    ] = False,
) -> None:
    """Train three agents by GRPO on this machine, merge them by every rule, and compare."""
    # trl takes seconds to import, and only the demo needs it.
    from ram_trl.demo import run_demo
    from ram_trl.recipe import RECIPES

    if lora and recipe is not None:
        _stop(ValueError(f"--lora runs the shipped lora.yaml, and --recipe names {recipe}; give one of them"))
    shipped, folder = ("lora.yaml", "runs/demo-lora") if lora else ("demo.yaml", "runs/demo")
    try:
        run_demo(recipe or RECIPES / shipped, out or Path(folder), seeds, fast, Console())
    except (ValueError, OSError) as error:
        _stop(error)


@app.command("launch")
def launch_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    schedule: Annotated[
        str | None, typer.Option(help="concurrent (a job per agent), interleaved (agents take turns in one) or mixed.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="PATH=VALUE: change a field, as agents.tool.args.max_steps=9.")
    ] = None,
    set_file: Annotated[Path | None, typer.Option(help="YAML file of paths and values to change.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that ended early.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything; print commands and memory; start nothing.")
    ] = False,
) -> None:
    """Train all agents of a recipe, merging as they go: one job per agent, or as many as the schedule says."""
    from ram_trl.runs.launching import launch

    try:
        code = launch(recipe, schedule, set_ or [], set_file, resume, dry_run, Console())
    except (RuntimeError, ValueError, OSError) as error:
        _stop(error)
    raise typer.Exit(code)


@app.command("export")
def export_command(
    hub: Annotated[Path, typer.Argument(help="Folder of the hub.")],
    base: Annotated[Path, typer.Option(help="Folder of the checkpoint the agents started from.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    number: Annotated[int | None, typer.Option("--round", help="The round; by default the newest.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Write a LoRA adapter of this rank, not a model.")] = None,
    shard_size: ShardSize = None,
) -> None:
    """Write a round's generalist once more: as a model, or as a LoRA adapter, whatever the hub exports by itself."""
    from ram_trl.continual.export import save_generalist
    from ram_trl.continual.founding import check_base
    from ram_trl.continual.hub import Hub

    opened = Hub(hub)
    try:
        opened.described()
        made = opened.made_rounds()
        chosen = made[-1] if made and number is None else number
        if chosen not in made:
            held = ", ".join(map(str, made)) or "none"
            raise ValueError(f"{hub} holds the states of rounds {held}; older ones are removed (keep_rounds)")
        if shard_size is not None and not is_size(shard_size):
            raise ValueError(f"--shard-size is {shard_size}; give a size such as 5GB")
        if out.exists():
            raise ValueError(f"{out} exists; name a new folder, or remove it")
        check_base(opened, base)
        save_generalist(opened, chosen, base, out, rank, shard_size or SHARD_SIZE)
    except (RuntimeError, ValueError, OSError) as error:
        _stop(error)
    what = "model" if rank is None else f"LoRA adapter of rank {rank}"
    told = f"round {chosen} of {hub} as a {what}: {out}"
    Console().print(told, soft_wrap=True, highlight=False, markup=False, emoji=False)


@app.command("report")
def report_command(
    hub: Annotated[Path, typer.Argument(help="Folder of the hub.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; HUB/report by default.")] = None,
) -> None:
    """Write what came of a run: tables and plots, as report.html and report.md."""
    from ram_trl.continual.hub import Hub
    from ram_trl.telling.run_report import write_run_report

    try:
        path = write_run_report(Hub(hub), out or hub / "report")
    except (RuntimeError, ValueError, OSError) as error:
        _stop(error)
    Console().print(f"report: {path}", soft_wrap=True, highlight=False, markup=False, emoji=False)


@app.command("status")
def status_command(
    hub: Annotated[Path, typer.Argument(help="Folder of the hub.")],
    watching: Annotated[bool, typer.Option("--watch", help="Keep showing it until all agents are done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    every: Annotated[float, typer.Option(help="--watch: seconds between two looks.")] = 2.0,
    patience: Annotated[float, typer.Option(help="--watch: an agent without a heartbeat this long is silent.")] = 60.0,
) -> None:
    """Show who trains in a hub, and what came of the rounds."""
    from ram_trl.continual.hub import Hub
    from ram_trl.continual.status import hub_status, show_status, watch

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
    options: Mapping[str, Any], needed: Iterable[str], thorough: bool = True
) -> tuple[dict[str, Any], MergeConfig]:
    """
    What to merge and how, from a YAML file and the command line; stops with all problems at once.

    Args:
        options (`Mapping[str, Any]`):
            The options of the command, by parameter name; `None` where one is not given.
        needed (`Iterable[str]`):
            Of `base`, `agents` and `out`, those that must be given by either.
        thorough (`bool`, *optional*):
            If there are problems, look for NaN in the weights, too.
    """
    problems: list[Problem] = []
    job: dict[str, Any] = {}
    layers: list[dict[str, Any]] = []
    if options["config"] is not None:
        try:
            values = read_yaml(options["config"])
        except ValueError as error:
            problems.append(Problem("config", str(error)))
        else:
            job = {key: values.pop(key) for key in (*JOB_KEYS, "agents") if values.get(key) is not None}
            layers.append(values)
    job |= {key: options[key] for key in JOB_KEYS if options.get(key) is not None}
    named = _pairs(options["agent"], "--agent", "NAME=FOLDER", problems)
    problems += _check_job(job)
    if named:
        job["agents"] = job.get("agents", {}) | named
    layers.append({knob: options[knob] for knob in KNOBS if options.get(knob) is not None})
    factors = _numbers(_pairs(options["weight"], "--weight", "NAME=FACTOR", problems), problems)
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
            checked = {key: job[key] for key in ("out", "device", "allow_mixed_dtypes") if key in job}
            problems += find_problems(job["base"], job["agents"], config=names, thorough=thorough, **checked)
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
        "dtype": ("auto, float32, bfloat16 or float16", lambda v: v in ("auto", *DTYPES)),
        "device": ("cpu or cuda", lambda v: v in ("cpu", "cuda")),
        "allow_mixed_dtypes": ("true or false", lambda v: isinstance(v, bool)),
        "as": ("full or lora", lambda v: v in ("full", "lora")),
        "rank": ("a whole number, at least 1", lambda v: type(v) is int and v >= 1),
        "max_error": ("a number from 0 to below 1", lambda v: type(v) in (int, float) and 0 <= v < 1),
    }
    problems = [
        Problem("config", f"{key} is {job.pop(key)!r}, expected {what}")
        for key, (what, holds) in expected.items()
        if key in job and not holds(job[key])
    ]
    adapter = job.get("as") == "lora"
    for key in FULL_KEYS if adapter else ADAPTER_KEYS:
        if key in job:
            what = f"{key} is {job.pop(key)!r}, which is for --as {'full' if adapter else 'lora'}; leave it out"
            problems.append(Problem("config", what))
    if adapter and not problems and ("rank" in job) == ("max_error" in job):
        problems.append(Problem("config", "--as lora needs --rank R or --max-error E: one of them"))
    return problems


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


def _run(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except (MergeInputError, OSError) as error:
        _stop(error)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """On SIGTERM, unwind: what is finished stays for --resume, the rest is removed on the way out."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(error: Exception) -> NoReturn:
    Console(stderr=True).print(str(error), style="red", markup=False, emoji=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
