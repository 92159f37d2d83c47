"""
Offline merging: `save_pretrained` folders in, a `save_pretrained` folder out.

Checks come first and report everything at once; then all of it is counted; only then is anything written, beside the
output folder, which takes its name when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ram_trl.card import model_card
from ram_trl.config import MergeConfig
from ram_trl.engine import CHUNK, find_non_finite, make_plan, merge_spans, reads, stored
from ram_trl.files import folder_in_one_piece
from ram_trl.plan import Plan
from ram_trl.preflight import check_layout, check_names
from ram_trl.problems import MergeInputError, Problem, agent_place
from ram_trl.progress import bar
from ram_trl.report import MergeReport, make_report
from ram_trl.weights import Span, entries, mergeable, whole
from ram_trl.weights.checkpoint import Checkpoint, CheckpointWriter, open_checkpoint, side_files, total_bytes
from ram_trl.workers import Workers

SHARD_SIZE = "5GB"
LONGEST_NAME = 255

# Keys of config.json that may differ between a base and what was trained from it.
INCIDENTAL_KEYS = frozenset(
    {"_name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id"}
    | {"pad_token_id", "tie_word_embeddings", "quantization_config", "_attn_implementation_autoset", "architectures"}
    | {"model_type"}
)


@dataclass(frozen=True)
class Inputs:
    """Base and agents, opened and found to fit together."""

    base: Checkpoint
    agents: Mapping[str, Checkpoint]
    warnings: list[str]


def merge(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | str,
    config: MergeConfig | None = None,
    *,
    max_shard_size: int | str = SHARD_SIZE,
    threads: int | None = None,
    chunk: int = CHUNK,
) -> MergeReport:
    """
    Merges the agents' checkpoints into one that `from_pretrained` opens.

    The output has the base's tensor names, dtypes, config, tokenizer and other side files, and `merge_report.json`
    and a model card. Inputs are only read.

    Args:
        base (`Path` or `str`):
            Folder of the checkpoint the agents started from, as `save_pretrained` writes it.
        agents (`Mapping[str, Path | str]`):
            The agents' folders by name.
        out (`Path` or `str`):
            Folder to make; it must not exist yet.
        config (`MergeConfig`, *optional*):
            The knobs; by default RAM+ with our defaults.
        max_shard_size (`int` or `str`, *optional*, defaults to `"5GB"`):
            Largest size of one weight file.
        threads (`int`, *optional*):
            Number of threads; by default the CPUs this process may use.
        chunk (`int`, *optional*):
            Entries worked on at a time; changes no bit of the result.

    Returns:
        `MergeReport`: what was counted and applied, and warnings; the same as in `merge_report.json`.

    Raises:
        `MergeInputError`: naming everything that cannot be merged; nothing was written.
    """
    config = config or MergeConfig()
    out = Path(out).resolve() if str(out) in (".", "..") else Path(out)
    if not is_size(max_shard_size):
        raise ValueError(f"max_shard_size is {max_shard_size!r}; give bytes, or a size such as '5GB' or '500MB'")
    inputs = _open(base, agents, config, out)
    with Workers(threads) as workers:
        plan = _counted(inputs, config, workers, chunk)
        report = _report(inputs, plan).model_copy(update={"out": out})
        with folder_in_one_piece(out) as folder:
            with bar("merging", sum(map(len, whole(inputs.base)))) as advance:
                write_like(
                    inputs.base,
                    folder,
                    max_shard_size,
                    lambda write: merge_spans(inputs.base, inputs.agents, plan, write, workers, chunk=chunk),
                    advance,
                )
            (folder / "merge_report.json").write_text(report.to_json(), encoding="utf-8")
            (folder / "README.md").write_text(model_card(report, inputs.base.config), encoding="utf-8")
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
            As for `merge`.

    Returns:
        `MergeReport`: the same numbers and warnings that `merge` would report.

    Raises:
        `MergeInputError`: naming everything that cannot be merged.
    """
    config = config or MergeConfig()
    inputs = _open(base, agents, config, None)
    with Workers(threads) as workers:
        return _report(inputs, _counted(inputs, config, workers, chunk))


def find_problems(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | str | None = None,
    config: MergeConfig | None = None,
    *,
    thorough: bool = False,
) -> list[Problem]:
    """
    Everything that keeps the folders from being merged.

    Args:
        base (`Path` or `str`), agents (`Mapping[str, Path | str]`), config (`MergeConfig`, *optional*):
            As for `merge`.
        out (`Path` or `str`, *optional*):
            Folder to make, if one is to be made.
        thorough (`bool`, *optional*, defaults to `False`):
            Look for NaN and Inf too, which reads all weights; otherwise headers only.

    Returns:
        `list[Problem]`: empty if all is well.
    """
    return _inspect(base, agents, out, config or MergeConfig(), thorough)[1]


def _open(base: Path | str, agents: Mapping[str, Path | str], config: MergeConfig, out: Path | None) -> Inputs:
    inputs, problems = _inspect(base, agents, out, config, False)
    if problems:
        # It fails anyway: read the weights too, so that the user hears of everything at once.
        raise MergeInputError(_inspect(base, agents, out, config, True)[1])
    return inputs


def _inspect(
    base: Path | str,
    agents: Mapping[str, Path | str],
    out: Path | str | None,
    config: MergeConfig,
    thorough: bool,
) -> tuple[Inputs, list[Problem]]:
    problems = check_names(agents, config)
    problems += [
        Problem("base", f"{link} is a link to nothing; restore it or remove it") for link in _dead(Path(base))
    ]
    opened_base = open_checkpoint(Path(base), "base")
    opened = {name: open_checkpoint(Path(agents[name]), agent_place(name)) for name in sorted(agents)}
    warnings = list(opened_base.warnings)
    problems += opened_base.problems
    for name, agent in opened.items():
        where = agent_place(name)
        problems += agent.problems
        warnings += agent.warnings
        if not agent.store.names() or not opened_base.store.names():
            continue  # already reported as unreadable
        problems += _check_architecture(opened_base.store.config, agent.store.config, where)
        unreadable = agent.unreadable | opened_base.unreadable
        problems += check_layout(opened_base.store, agent.store, where, unreadable)
        warnings += _config_warnings(opened_base.store.config, agent.store.config, where)
    stores = {name: agent.store for name, agent in opened.items()}
    if out is not None:
        folders = {name: Path(folder) for name, folder in agents.items()}
        problems += _check_output(Path(out), Path(base), folders, opened_base.store)
    if thorough:
        places = {"base": opened_base.store} | {agent_place(name): store for name, store in stores.items()}
        spans = {place: whole(store) for place, store in places.items()}
        with bar("looking for NaN", sum(len(span) for held in spans.values() for span in held)) as advance:
            for place, store in places.items():
                problems += find_non_finite(place, store, spans[place])
                advance(sum(map(len, spans[place])))
    return Inputs(opened_base.store, stores, warnings), problems


def _check_architecture(base: Mapping[str, Any], agent: Mapping[str, Any], where: str) -> list[Problem]:
    problems = []
    for key in ("model_type", "architectures"):
        if key in base and key in agent and base[key] != agent[key]:
            what = (
                f"{key} is {_told(agent[key])}, the base's is {_told(base[key])}; only one architecture can be merged"
            )
            problems.append(Problem(where, what))
    return problems


def _config_warnings(base: Mapping[str, Any], agent: Mapping[str, Any], where: str) -> list[str]:
    keys = (base.keys() & agent.keys()) - INCIDENTAL_KEYS
    differing = [
        f"{key} {_told(agent[key])} (base: {_told(base[key])})" for key in sorted(keys) if base[key] != agent[key]
    ]
    if not differing:
        return []
    return [f"{where}: config.json differs from the base's: {'; '.join(differing)}; the generalist has the base's"]


def _dead(folder: Path) -> list[Path]:
    """Links in a folder that lead nowhere, as a pruned cache leaves them."""
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if path.is_symlink() and not path.exists()]


def _told(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_output(out: Path, base: Path, agents: Mapping[str, Path], store: Checkpoint) -> list[Problem]:
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
    shapes, dtypes = _layout(store)
    needed, free = total_bytes(shapes.values(), dtypes.values()), shutil.disk_usage(parent).free
    if store.folder.is_dir():
        needed += sum(path.stat().st_size for path in side_files(store.folder))
    if needed > free:
        what = f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free in {parent}; make room"
        problems.append(Problem("output", what))
    return problems


def _layout(base: Checkpoint) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Shapes and dtypes of what is written: all that the base's files hold, tied tensors as often as there."""
    source = {name: name for name in base.names()} | {alias: base.aliases[alias] for alias in base.stored_aliases}
    shapes = {name: base.shape(stored_as) for name, stored_as in source.items()}
    return shapes, {name: base.dtype(stored_as) for name, stored_as in source.items()}


def _counted(inputs: Inputs, config: MergeConfig, workers: Workers, chunk: int) -> Plan:
    spans = whole(inputs.base)
    with bar("counting", reads(config) * sum(map(len, spans))) as advance:
        return make_plan(inputs.base, inputs.agents, config, workers, chunk=chunk, advance=advance)


def _report(inputs: Inputs, plan: Plan) -> MergeReport:
    report = make_report(inputs.base, inputs.agents, plan)
    folders = {"base": inputs.base.folder, "sources": {name: store.folder for name, store in inputs.agents.items()}}
    return report.model_copy(update={**folders, "warnings": inputs.warnings + report.warnings})


def write_like(
    base: Checkpoint,
    folder: Path,
    max_shard_size: int | str,
    produce: Callable[[Callable[[Span, Tensor], int]], Iterator[int]],
    advance: Callable[[int], None] = lambda entries: None,
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
        advance (`Callable[[int], None]`, *optional*):
            Called with the number of entries written.

    Raises:
        `MergeInputError`: if an entry overflows the dtype it is stored in.
    """
    shapes, dtypes = _layout(base)
    also: dict[str, list[str]] = {name: [name] for name in base.names()}
    for alias in base.stored_aliases:
        also[base.aliases[alias]].append(alias)
    writer = CheckpointWriter(folder, shapes, dtypes, max_shard_size)

    def write(span: Span, values: Tensor) -> int:
        result = stored(values, base.dtype(span.name), span)
        for name in also[span.name]:
            writer.write(name, span.start, result)
        return len(span)

    try:
        for done in produce(write):
            advance(done)
        for name in sorted(set(base.names()) - set(mergeable(base))):
            writer.write(name, 0, base.read(name, 0, entries(base, name)))
        writer.close()
    finally:
        writer.abandon()
    for source in side_files(base.folder):
        target = folder / source.relative_to(base.folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
