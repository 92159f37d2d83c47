"""
Offline merging: `save_pretrained` folders in, a `save_pretrained` folder out.

Checks come first and report everything at once; then all of it is counted; only then are weights written, beside the
output folder, which takes its name when it is complete and has been checked.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ram_trl.config import MergeConfig
from ram_trl.engine.counting import CHUNK, make_plan, reads
from ram_trl.engine.merging import merge_spans
from ram_trl.engine.plan import Plan
from ram_trl.engine.workers import Workers
from ram_trl.files import errors_name, folder_in_one_piece
from ram_trl.folders.adapters import merge_low_rank
from ram_trl.folders.assembly import AdapterReport
from ram_trl.folders.generalist import DTYPES, GeneralistWriter, layout, write_checksums
from ram_trl.folders.inputs import Inputs, check_finite, check_precision, infinite_buffers, open_inputs
from ram_trl.folders.outline import Outline, make_outline
from ram_trl.folders.unfinished import Unfinished, fingerprint, workshop
from ram_trl.problems import MergeInputError, Problem, agent_place
from ram_trl.progress import bar
from ram_trl.telling.card import model_card
from ram_trl.telling.report import MergeReport, make_report
from ram_trl.weights import Span, Store, whole
from ram_trl.weights.adapter import Adapter
from ram_trl.weights.anatomy import Anatomy
from ram_trl.weights.checkpoint import Checkpoint, side_files, total_bytes
from ram_trl.weights.device import OnDevice

SHARD_SIZE = "5GB"
LONGEST_NAME = 255

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


def merge(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | str,
    config: MergeConfig | None = None,
    *,
    dtype: DtypeName = "auto",
    max_shard_size: int | str = SHARD_SIZE,
    device: str = "cpu",
    threads: int | None = None,
    chunk: int = CHUNK,
    allow_mixed_dtypes: bool = False,
    resume: bool = False,
) -> MergeReport:
    """
    Merges the agents' checkpoints into one that `from_pretrained` opens.

    The output has the base's tensor names, dtypes, config, tokenizer and other side files, and `merge_report.json`, a
    model card with pictures in `plots/`, and `SHA256SUMS`. Inputs are only read.

    Args:
        base (`Path` or `str`):
            Folder of the checkpoint the agents started from, as `save_pretrained` writes it.
        agents (`Mapping[str, Path | str]`):
            The agents' folders by name.
        out (`Path` or `str`):
            Folder to make; it must not exist yet.
        config (`MergeConfig`, *optional*):
            The knobs; by default RAM+ with our defaults.
        dtype (`str`, *optional*, defaults to `"auto"`):
            What the weights are stored in: each as the base's (`"auto"`), or all in `"float32"`, `"bfloat16"` or
            `"float16"`; config.json says so then. Arithmetic is always float32.
        max_shard_size (`int` or `str`, *optional*, defaults to `"5GB"`):
            Largest size of one weight file.
        device (`str`, *optional*, defaults to `"cpu"`):
            Where chunks are worked on: `"cpu"`, or `"cuda"`, to which they move through pinned buffers.
        threads (`int`, *optional*):
            Number of threads; by default the CPUs this process may use.
        chunk (`int`, *optional*):
            Entries worked on at a time; changes no bit of the result.
        allow_mixed_dtypes (`bool`, *optional*, defaults to `False`):
            Merge agents although one is stored wider than another; see `ram_trl.folders.inputs.check_precision`.
        resume (`bool`, *optional*, defaults to `False`):
            Go on with an earlier merge of the same inputs into the same folder that was killed: weight files that it
            finished are kept, and the result is the same to the bit. Without one, merge from the start.

    Returns:
        `MergeReport`: what was counted and applied, and warnings; the same as in `merge_report.json`.

    Raises:
        `MergeInputError`: naming everything that cannot be merged; nothing was written.
        `OSError`: naming the file, if the disk is full or fails.
    """
    config = config or MergeConfig()
    out = _folder(out)
    out = out.resolve() if str(out) in (".", "..") else out
    if not is_size(max_shard_size):
        raise ValueError(f"max_shard_size is {max_shard_size!r}; give bytes, or a size such as '5GB' or '500MB'")
    inputs, problems = _checked(base, agents, out, config, dtype, device, allow_mixed_dtypes)
    if problems:
        # It fails anyway: read the weights too, so that the user hears of everything at once.
        raise MergeInputError(problems + check_finite(inputs))
    identity = _identity(inputs, config, dtype, max_shard_size)
    with Unfinished(out, identity, resume) as unfinished:
        with Workers(threads) as workers:
            plan = unfinished.plan(config)
            if plan is None:
                plan = _counted(inputs, config, workers, chunk, device)
                unfinished.keep_plan(plan)
            report = _report(inputs, plan).model_copy(update={"out": out})
            kept = {span.name for span in whole(inputs.base)} - plan.counts.keys()
            with GeneralistWriter(
                inputs.base, unfinished.model, max_shard_size, DTYPES.get(dtype), kept, unfinished
            ) as writer:
                spans = writer.spans
                with bar("merging", sum(map(len, spans))) as advance:
                    stores = _on_device(inputs.without(frozenset(kept)), device)
                    for done in merge_spans(*stores, plan, writer.write, workers, spans=spans, chunk=chunk):
                        advance(done)
                weights = writer.finish()
                writer.check()
        _check_difference(plan, writer, dtype)
        # matplotlib takes half a second to import.
        from ram_trl.telling.plots import save_merge_plots

        with errors_name(unfinished.model / "plots"):
            plots = save_merge_plots(report, unfinished.model / "plots")
        for name, text in {
            "merge_report.json": report.to_json(),
            "README.md": model_card(report, inputs.base.config, [f"plots/{path.name}" for path in plots]),
        }.items():
            with errors_name(unfinished.model / name):
                (unfinished.model / name).write_text(text, encoding="utf-8")
        write_checksums(unfinished.model, weights)
        unfinished.settle()
    return report


def is_size(size: object) -> bool:
    """Whether this is a size of a weight file: bytes, or a number with KB, MB, GB or TB."""
    if isinstance(size, str):
        return re.fullmatch(r"0*[1-9]\d*(KB|MB|GB|TB)", size.upper()) is not None
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def probe(
    base: Path | str,
    agents: Mapping[str, Path | str],
    config: MergeConfig | None = None,
    *,
    threads: int | None = None,
    chunk: int = CHUNK,
) -> MergeReport:
    """
    Counts what a merge would do, and writes nothing.

    Args:
        base (`Path` or `str`), agents (`Mapping[str, Path | str]`), config (`MergeConfig`, *optional*), threads
        (`int`, *optional*), chunk (`int`, *optional*):
            As for `merge`. Agents stored in different precision are warned about, not refused.

    Returns:
        `MergeReport`: the same numbers and warnings that `merge` would report.

    Raises:
        `MergeInputError`: naming everything that cannot be merged.
    """
    config = config or MergeConfig()
    inputs, problems = _checked(base, agents, None, config, allow_mixed_dtypes=True)
    if problems:
        raise MergeInputError(problems + check_finite(inputs))
    with Workers(threads) as workers:
        return _report(inputs, _counted(inputs, config, workers, chunk))


def merge_to_adapter(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | str,
    config: MergeConfig | None = None,
    *,
    rank: int | None = None,
    max_error: float | None = None,
    threads: int | None = None,
    chunk: int = CHUNK,
    allow_mixed_dtypes: bool = False,
) -> tuple[MergeReport, AdapterReport]:
    """
    Merges agents into a LoRA adapter that peft loads: the best low-rank fit of what the merge changes.

    `average` and `task_arithmetic` of plain LoRA agents are exact where the rank allows it.

    Args:
        base (`Path` or `str`), agents (`Mapping[str, Path | str]`), out (`Path` or `str`), config (`MergeConfig`,
        *optional*), threads (`int`, *optional*), chunk (`int`, *optional*), allow_mixed_dtypes (`bool`, *optional*):
            As for `merge`.
        rank (`int`, *optional*), max_error (`float`, *optional*):
            One of them: the rank of all layers, or the largest relative error (Frobenius) of each layer, which then
            takes the smallest rank that has it.

    Returns:
        `tuple[MergeReport, AdapterReport]`: as in `merge_report.json` and `adapter_report.json` of the folder.

    Raises:
        `MergeInputError`: naming everything that cannot be merged; nothing was written.
        `ValueError`: if not exactly one of `rank` and `max_error` is given.
    """
    config = config or MergeConfig()
    out = _folder(out)
    inputs, problems = _checked(base, agents, out, config, allow_mixed_dtypes=allow_mixed_dtypes)
    if problems:
        raise MergeInputError(problems + check_finite(inputs))
    with Workers(threads) as workers:
        plan = _counted(inputs, config, workers, chunk)
        stores = inputs.base, inputs.agents, config, workers, Anatomy(inputs.base.config, inputs.base)
        merged = merge_low_rank(*stores, rank=rank, max_error=max_error, plan=plan, chunk=chunk)
    report = _report(inputs, plan).model_copy(update={"out": out})
    with folder_in_one_piece(out) as folder:
        merged.save(folder, _base_name(inputs))
        (folder / "merge_report.json").write_text(report.to_json(), encoding="utf-8")
        (folder / "adapter_report.json").write_text(merged.report.to_json(), encoding="utf-8")
        (folder / "README.md").write_text(model_card(report, inputs.base.config, fit=merged.report), encoding="utf-8")
    return report, merged.report


def outline(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | str,
    config: MergeConfig | None = None,
    *,
    dtype: DtypeName = "auto",
    max_shard_size: int | str = SHARD_SIZE,
    device: str = "cpu",
    threads: int | None = None,
    allow_mixed_dtypes: bool = False,
) -> Outline:
    """
    What `merge` would read and write, from headers alone; nothing is written.

    Args:
        base (`Path` or `str`), agents (`Mapping[str, Path | str]`), out (`Path` or `str`), config (`MergeConfig`,
        *optional*), dtype (`str`, *optional*), max_shard_size (`int` or `str`, *optional*), device (`str`,
        *optional*), threads (`int`, *optional*), allow_mixed_dtypes (`bool`, *optional*):
            As for `merge`.

    Returns:
        `Outline`: tensors, files, bytes and expected time.

    Raises:
        `MergeInputError`: naming everything that headers show to be wrong.
    """
    config = config or MergeConfig()
    inputs, problems = _checked(base, agents, _folder(out), config, dtype, device, allow_mixed_dtypes)
    if problems:
        raise MergeInputError(problems)
    return make_outline(inputs, _folder(out), config, DTYPES.get(dtype), max_shard_size, threads)


def find_problems(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | str | None = None,
    config: MergeConfig | None = None,
    *,
    device: str = "cpu",
    allow_mixed_dtypes: bool = False,
    thorough: bool = False,
) -> list[Problem]:
    """
    Everything that keeps the folders from being merged.

    Args:
        base (`Path` or `str`), agents (`Mapping[str, Path | str]`), config (`MergeConfig`, *optional*), device
        (`str`, *optional*), allow_mixed_dtypes (`bool`, *optional*):
            As for `merge`.
        out (`Path` or `str`, *optional*):
            Folder to make, if one is to be made.
        thorough (`bool`, *optional*, defaults to `False`):
            Look for NaN and Inf too, which reads all weights; otherwise headers only.

    Returns:
        `list[Problem]`: empty if all is well.
    """
    to_make = None if out is None else _folder(out)
    mixed = allow_mixed_dtypes or out is None
    config = config or MergeConfig()
    inputs, problems = _checked(base, agents, to_make, config, device=device, allow_mixed_dtypes=mixed)
    return problems + (check_finite(inputs) if thorough else [])


def _folder(path: Path | str) -> Path:
    return Path(path).expanduser()


def _checked(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | None,
    config: MergeConfig,
    dtype: str = "auto",
    device: str = "cpu",
    allow_mixed_dtypes: bool = False,
) -> tuple[Inputs, list[Problem]]:
    folders = {name: _folder(folder) for name, folder in agents.items()}
    inputs, problems = open_inputs(_folder(base), folders, config)
    if not allow_mixed_dtypes:
        problems += check_precision(inputs, config)
    if dtype != "auto" and dtype not in DTYPES:
        problems.append(Problem("config", f"dtype is {dtype!r}; give auto, {', '.join(DTYPES)}"))
    problems += _check_device(device)
    if out is not None:
        problems += _check_output(out, _folder(base), folders, inputs.base, DTYPES.get(dtype))
    return inputs, problems


def _check_device(device: str) -> list[Problem]:
    if device not in ("cpu", "cuda"):
        return [Problem("config", f"device is {device!r}; give cpu or cuda")]
    if device == "cuda" and not torch.cuda.is_available():
        return [Problem("config", "device is 'cuda', but torch finds no GPU it can use here; give --device cpu")]
    return []


def _check_output(
    out: Path, base: Path, agents: Mapping[str, Path], store: Checkpoint, dtype: torch.dtype | None
) -> list[Problem]:
    if len(os.fsencode(out.name)) > LONGEST_NAME:
        return [Problem("output", f"{out}: the name is longer than {LONGEST_NAME} bytes")]
    problems = []
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not os.path.ismount(out):
        problems.append(Problem("output", f"{out} exists; name a new folder, or remove it"))
    for where, folder in {"the base": base, **{agent_place(name): path for name, path in agents.items()}}.items():
        if out.resolve() == folder.resolve() or folder.resolve() in out.resolve().parents:
            problems.append(Problem("output", f"{out} lies in {where} ({folder}); inputs are never written to"))
    if out.is_symlink():
        problems.append(Problem("output", f"{out} is a link; name the folder itself"))
    if os.path.ismount(out):
        problems.append(Problem("output", f"{out} is a mount point and cannot be renamed to; name a folder inside it"))
    parent = next(path for path in out.resolve().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problems.append(Problem("output", f"{out} cannot be made: {parent} is not a folder that can be written to"))
    if (store.folder / "plots").is_file():
        what = f"{store.folder / 'plots'} is a file, but the output has a folder of that name; rename it"
        problems.append(Problem("output", what))
    shapes, dtypes = layout(store, dtype)
    needed, free = total_bytes(shapes.values(), dtypes.values()), shutil.disk_usage(parent).free
    if store.folder.is_dir():
        needed += sum(path.stat().st_size for path in side_files(store.folder))
    # What an earlier run left is either used or removed.
    free += sum(path.stat().st_blocks * 512 for path in workshop(out).rglob("*"))
    if needed > free:
        what = f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free in {parent}; make room"
        problems.append(Problem("output", what))
    return problems


def _identity(inputs: Inputs, config: MergeConfig, dtype: str, max_shard_size: int | str) -> dict[str, str]:
    """What the result depends on, by names that a user understands."""
    stores = {"base": inputs.base} | {agent_place(name): store for name, store in inputs.agents.items()}
    told = {f"{place}: {key}": value for place, store in stores.items() for key, value in fingerprint(store).items()}
    told |= {knob: str(value) for knob, value in config.settled().items()}
    return told | {"dtype": dtype, "shard size": str(max_shard_size), "ram_trl": version("ram-trl")}


def _counted(inputs: Inputs, config: MergeConfig, workers: Workers, chunk: int, device: str = "cpu") -> Plan:
    """The plan; buffers that are not finite but the same everywhere are left out of it."""
    spans = whole(inputs.base)
    try:
        with bar("counting", reads(config) * sum(map(len, spans))) as advance:
            return make_plan(*_on_device(inputs, device), config, workers, chunk=chunk, advance=advance)
    except MergeInputError as error:
        kept = infinite_buffers(inputs, error.problems)
        if not kept:
            raise
        return _counted(inputs.without(kept), config, workers, chunk, device)


def _on_device(inputs: Inputs, device: str) -> tuple[Store, dict[str, Store]]:
    if device == "cpu":
        return inputs.base, dict(inputs.agents)
    return OnDevice(inputs.base, device), {name: OnDevice(store, device) for name, store in inputs.agents.items()}


def _report(inputs: Inputs, plan: Plan) -> MergeReport:
    report = make_report(inputs.base, inputs.agents, plan)
    folders = {
        "base": inputs.base.folder,
        "sources": {name: str(store.folder) for name, store in inputs.agents.items()},
    }
    kept = sorted({span.name for span in whole(inputs.base)} - plan.counts.keys())
    told = [f"'{name}' holds NaN or Inf, the same in base and agents; it is taken over from the base" for name in kept]
    return report.model_copy(update={**folders, "warnings": inputs.warnings + told + report.warnings})


def _base_name(inputs: Inputs) -> str:
    """What an adapter calls its base: as all agents call it, if that is a name on the Hub, or the folder."""
    called = {store.settings.trained_on for store in inputs.agents.values() if isinstance(store, Adapter)}
    if len(called) == 1 and not Path(name := called.pop()).exists():
        return name
    return str(inputs.base.folder.resolve())


def _check_difference(plan: Plan, writer: GeneralistWriter, dtype: str) -> None:
    """The generalist differs from the base, unless nothing was active or the task vectors are scaled by 0."""
    if writer.differs or not plan.total.touched or plan.config.scale == 0:
        return
    stored = "the base's dtypes" if dtype == "auto" else dtype
    what = (
        f"{plan.total.touched} entries are active, but in {stored} the generalist equals the base bit for bit: all "
        'updates are lost in rounding, or cancel out; give --dtype float32 (`dtype="float32"`)'
    )
    raise MergeInputError([Problem("output", what)])


def write_like(
    base: Checkpoint,
    folder: Path,
    max_shard_size: int | str,
    produce: Callable[[Callable[[Span, Tensor], int]], Iterator[int]],
) -> None:
    """
    Writes weights and side files of a model that is stored as `base` is: same names, dtypes and tied tensors.

    Args:
        base (`Checkpoint`):
            What the model is like; its buffers and side files are copied.
        folder (`Path`):
            An existing folder.
        max_shard_size (`int` or `str`):
            Largest size of one weight file.
        produce (`Callable`):
            Given a function that stores the float32 entries of a span (from any thread) and returns their number, an
            iterator over what it returned for all spans of the model.

    Raises:
        `MergeInputError`: if an entry overflows the dtype it is stored in.
    """
    with GeneralistWriter(base, folder, max_shard_size) as writer:
        for _ in produce(writer.write):
            pass
        writer.finish()
