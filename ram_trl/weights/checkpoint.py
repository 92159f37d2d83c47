"""
`save_pretrained` folders, read as a store: the files are mapped into memory, and only what is asked for is touched.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ram_trl.problems import Problem
from ram_trl.weights import INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS
from ram_trl.weights.naming import mixed_experts
from ram_trl.weights.preflight import same_entries

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKSUMS_FILE = "SHA256SUMS"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes of weights and buffers, as safetensors names them. Others (float8, …) hold quantized weights."""
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
QUANTIZATION_FILE = "hf_quant_config.json"
BYTES = ("I8", "U8")
QUANTIZED = ("weight", "qzeros", "scales", "weight_packed")
"""A tensor of bytes whose name ends so holds quantized weights; others are buffers, such as an attention mask."""


@dataclass
class Opened:
    """
    What came of opening a folder.

    Args:
        store (`Checkpoint`):
            The tensors that could be read.
        problems (`list[Problem]`):
            Everything that keeps it from being merged.
        warnings (`list[str]`):
            What was passed over.
        unreadable (`set[str]`):
            Tensors that are there but cannot be read; `problems` tells why.
    """

    store: Checkpoint
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)


class Checkpoint:
    """
    The tensors of a `save_pretrained` folder, as a store. Made by `open_checkpoint`.

    Args:
        folder (`Path`):
            The folder.
        config (`dict[str, Any]`):
            Its `config.json`.
        tensors (`Mapping[str, Tensor]`):
            Memory-mapped tensors by name, flat.
        shapes (`Mapping[str, tuple[int, ...]]`):
            Their shapes.
        aliases (`Mapping[str, str]`):
            Names of tied tensors and what they are tied to, whether the files hold them or not.
        stored_aliases (`frozenset[str]`):
            Those that the files hold.
        files (`tuple[Path, ...]`, *optional*):
            The weight files that were opened.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        aliases: Mapping[str, str],
        stored_aliases: frozenset[str],
        files: tuple[Path, ...] = (),
    ) -> None:
        self.folder = folder
        self.config = config
        self.aliases = aliases
        self.stored_aliases = stored_aliases
        self.files = files
        self._tensors = tensors
        self._shapes = shapes

    def names(self) -> list[str]:
        return sorted(self._tensors.keys() - self.stored_aliases)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name][start:stop]

    def without(self, names: Collection[str]) -> Checkpoint:
        """The same checkpoint with fewer tensors."""
        tensors = {name: tensor for name, tensor in self._tensors.items() if name not in names}
        return Checkpoint(
            self.folder, self.config, tensors, self._shapes, self.aliases, self.stored_aliases, self.files
        )


def open_checkpoint(folder: Path, where: str) -> Opened:
    """
    Opens a `save_pretrained` folder from its headers; no weight is read, except to tell whether tied tensors agree.

    Args:
        folder (`Path`):
            The folder: one safetensors file, or several and their index; links are followed.
        where (`str`):
            How problems name it, such as `agent 'tool'`.

    Returns:
        `Opened`: never raises for what is wrong with the folder; that is in `problems`.
    """
    opened = Opened(Checkpoint(folder, {}, {}, {}, {}, frozenset()))
    if not folder.is_dir():
        opened.problems.append(Problem(where, f"{folder} is not a folder; give a folder made by save_pretrained"))
        return opened
    config = _read_json(folder / "config.json", where, opened.problems)
    opened.problems += [Problem(where, what) for what in _quantizations(folder, config)]
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    holder: dict[str, Path] = {}
    files = _weight_files(folder, where, opened)
    for file, wanted in files.items():
        held = _read_file(file, wanted, where, opened, tensors, shapes)
        for name in sorted(held & holder.keys()):
            what = f"'{name}' is in {holder[name].name} and in {file.name}; save the model again into an empty folder"
            opened.problems.append(Problem(where, what, name, "duplicate tensor"))
        holder |= dict.fromkeys(held, file)
    opened.problems += [Problem(where, what, kind="mixed experts") for what in mixed_experts(holder)]

    if not tensors and not opened.problems:
        opened.problems.append(Problem(where, f"{folder} holds no tensors; save the model again"))

    store = Checkpoint(folder, config, tensors, shapes, {}, frozenset())
    tied = _tied(store, where, opened.problems)
    present = frozenset(alias for alias in tied if alias in tensors)
    opened.store = Checkpoint(folder, config, tensors, shapes, tied, present, tuple(files))
    return opened


def _read_json(path: Path, where: str, problems: list[Problem]) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(Problem(where, f"{path} is missing; give a folder made by save_pretrained"))
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(Problem(where, f"{path} cannot be read as JSON: {error}"))
        return {}
    if not isinstance(values, dict):
        problems.append(Problem(where, f"{path} holds {type(values).__name__}, expected a JSON object"))
        return {}
    return values


def _quantizations(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """What says that weights are quantized: config.json, one of its parts (`text_config`, …), or a file of its own."""
    advice = "save the model dequantized, then merge"
    found = []
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key in QUANTIZATION_KEYS:
            if part.get(key):
                known = isinstance(part[key], dict)
                kind = part[key].get("quant_method", "unknown method") if known else part[key]
                found.append(f"{folder / 'config.json'} has a {key} ({kind}); {advice}")
    if (folder / QUANTIZATION_FILE).exists():
        found.append(f"{folder / QUANTIZATION_FILE} says that weights are quantized; {advice}")
    return found


def _weight_files(folder: Path, where: str, opened: Opened) -> dict[Path, frozenset[str] | None]:
    """The files to read, with the tensors wanted from each (`None`: all)."""
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in WEIGHT_SUFFIXES)
    files: dict[Path, frozenset[str] | None] = {}
    if (folder / INDEX_FILE).exists():
        index = _read_json(folder / INDEX_FILE, where, opened.problems)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            what = f"{folder / INDEX_FILE} has no usable weight_map; save the model again"
            opened.problems.append(Problem(where, what))
            return {}
        for file in sorted(set(weight_map.values())):
            files[folder / file] = frozenset(name for name, holder in weight_map.items() if holder == file)
    elif (folder / SINGLE_FILE).exists():
        files[folder / SINGLE_FILE] = None
    elif (folder / "adapter_config.json").exists():
        what = f"{folder} holds a LoRA adapter, not a model; merge it into its base first (peft merge_and_unload)"
        opened.problems.append(Problem(where, what))
        return {}
    elif (shards := zero_checkpoint(folder)) is not None:
        target = shards.with_name(f"{shards.name}-fp32")
        what = (
            f"{folder} holds DeepSpeed ZeRO shards, which are pickles and not read here; if you trust them, convert "
            f"them by DeepSpeed's own converter, and merge what it makes: ram-trl convert-zero {shards} {target}"
        )
        opened.problems.append(Problem(where, what))
        return {}
    else:
        what = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        if found:
            what += (
                f", only {', '.join(path.name for path in found[:3])}; convert it: load with from_pretrained, then "
                "save_pretrained, which writes safetensors (pickled weights are never read here)"
            )
        opened.problems.append(Problem(where, what))
        return {}
    stray = [path.name for path in found if path not in files and path.name != "training_args.bin"]
    if SINGLE_FILE in stray:
        stray.remove(SINGLE_FILE)
        opened.warnings.append(
            f"{where}: {folder} holds {SINGLE_FILE} beside {INDEX_FILE}; the files named in the index were read, "
            f"but from_pretrained would load {SINGLE_FILE} - remove what is stale"
        )
    if stray:
        opened.warnings.append(f"{where}: {', '.join(stray)} in {folder} is not part of the model and was not read")
    return files


def zero_checkpoint(folder: Path) -> Path | None:
    """The folder that `engine.save_checkpoint` of DeepSpeed ZeRO was given, if this is it or its step below."""
    if any(folder.glob("*/*_optim_states.pt")):
        return folder
    return folder.parent if any(folder.glob("*_optim_states.pt")) else None


def _read_file(
    file: Path,
    wanted: frozenset[str] | None,
    where: str,
    opened: Opened,
    tensors: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
) -> frozenset[str]:
    """Adds the wanted tensors of a file, and returns the names of all that it holds."""
    try:
        # Not closed: the mapping lives as long as its tensors do.
        handle = safe_open(file, framework="pt")
    except FileNotFoundError:
        what = f"{file.name} is named in {INDEX_FILE} but is not there; copy the whole folder again"
        opened.problems.append(Problem(where, what))
        return frozenset()
    except (SafetensorError, OSError) as error:
        what = f"{file} is damaged or truncated ({error}); copy or save it again"
        opened.problems.append(Problem(where, what))
        return frozenset()
    held = frozenset(handle.keys())
    for name in sorted((wanted or held) - held):
        what = f"'{name}' is in {file.name} according to {INDEX_FILE}, but is not there; save the model again"
        opened.problems.append(Problem(where, what, name, "phantom tensor"))
    unlisted = sorted(held - (wanted or held))
    if unlisted:
        told = ", ".join(unlisted[:5]) + (", …" if len(unlisted) > 5 else "")
        opened.warnings.append(f"{where}: {file.name} holds tensors that {INDEX_FILE} does not name: {told}")
    for name in sorted((wanted or held) & held):
        described = handle.get_slice(name)
        dtype = described.get_dtype()
        if dtype not in DTYPES or (dtype in BYTES and name.endswith(QUANTIZED)):
            what = f"'{name}' is stored as {dtype}, which is for quantized weights; save the model dequantized, "
            what += "then merge"
            opened.problems.append(Problem(where, what, name, "quantized"))
            opened.unreadable.add(name)
            continue
        tensors[name] = handle.get_tensor(name).reshape(-1)
        shapes[name] = tuple(described.get_shape())
    return held


def _tied(store: Checkpoint, where: str, problems: list[Problem]) -> dict[str, str]:
    """Output embeddings tied to the input embeddings: `{alias: name}`."""
    inputs = [name for name in store.names() if name.endswith(INPUT_EMBEDDINGS)]
    outputs = [name for name in store.names() if name.endswith(OUTPUT_EMBEDDINGS)]
    if len(inputs) != 1 or not _says_tied(store.config):
        return {}
    aliases = {}
    for output in outputs or ["lm_head.weight"]:
        if output in outputs and not same_entries(store, output, inputs[0]):
            what = (
                f"config.json ties '{output}' to '{inputs[0]}', but their values differ; set tie_word_embeddings to "
                "false in config.json (in base and agents), or save the model again"
            )
            problems.append(Problem(where, what, output, "tied"))
            continue
        aliases[output] = inputs[0]
    return aliases


def _says_tied(config: Mapping[str, Any]) -> bool:
    # save_pretrained leaves out what is the default of the model type, and composite models have rules of their own.
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        try:
            return bool(getattr(CONFIG_MAPPING[kind].from_dict(dict(config)), "tie_word_embeddings", False))
        except Exception:  # a config that transformers cannot read is told by its own keys below
            logger.warning("config.json of model type '%s' cannot be read by transformers", kind)
    return bool(config.get("tie_word_embeddings", False))


def side_files(folder: Path) -> list[Path]:
    """
    What belongs to a model besides its weights: config, tokenizer, chat template, generation config, custom code, …

    Folders are left out, except for the one transformers writes (`additional_chat_templates`).
    """
    ours = {"README.md", "merge_report.json", CHECKSUMS_FILE, INDEX_FILE, ".gitattributes", "adapter_config.json"}
    ours |= {"zero_to_fp32.py", "zero_to_torch.py", "latest"}  # what DeepSpeed leaves in a checkpoint
    files = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
    return sorted(
        path
        for path in files
        if path.is_file()
        and path.name not in ours
        and not path.name.endswith(".index.json")
        and path.suffix.lower() not in WEIGHT_SUFFIXES
    )


def total_bytes(shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> int:
    """Bytes that tensors of these shapes and dtypes take."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
