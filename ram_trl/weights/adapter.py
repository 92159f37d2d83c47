"""
A LoRA adapter as a store: the weights its agent computes with, θ = W + ΔW, row by row when they are asked for.

W is always read from the base store, ΔW is computed in float32 (`edits.py`). An adapter is a folder that peft saved or
an adapter of a PEFT model in memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ram_trl.problems import Problem
from ram_trl.weights import MERGEABLE, Store
from ram_trl.weights.adapter_settings import (
    CONFIG_FILE,
    INITIAL_ADAPTER,
    QUANTIZED,
    AdapterSettings,
    check_settings,
    read_settings,
)
from ram_trl.weights.adapter_tensors import Draft, plain_name
from ram_trl.weights.anatomy import Anatomy
from ram_trl.weights.checkpoint import Checkpoint, open_checkpoint
from ram_trl.weights.edits import Edit

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
SAMPLE = 1 << 12
"""Entries at either end of a tensor that are compared to tell whether two checkpoints are the same base."""


class Adapter:
    """
    A LoRA agent as a store of the base's names and shapes; made by `open_adapter` or `live_adapter`.

    Args:
        base (`Store`):
            The checkpoint the adapter belongs to.
        edits (`Mapping[str, Sequence[Edit]]`):
            What is changed, by stored name, in order. Tensors without an edit are the base's.
        settings (`AdapterSettings`):
            The adapter's settings.
        folder (`Path`):
            Where it came from.
        config (`Mapping[str, Any]`):
            The base's `config.json`.
        files (`Iterable[Path]`, *optional*):
            The weight files it was read from.
    """

    def __init__(
        self,
        base: Store,
        edits: Mapping[str, Sequence[Edit]],
        settings: AdapterSettings,
        folder: Path = Path(),
        config: Mapping[str, Any] | None = None,
        files: Iterable[Path] = (),
    ) -> None:
        self.base = base
        self.files = tuple(files)
        self.edits = dict(edits)
        self.settings = settings
        self.folder = folder
        self.config = dict(config or {})
        self.aliases = base.aliases

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """float32, changed or not, but for buffers that are not merged."""
        return torch.float32 if self.base.dtype(name) in MERGEABLE else self.base.dtype(name)

    def without(self, names: Collection[str]) -> Adapter:
        """The same adapter with fewer tensors."""
        base = self.base.without(names) if isinstance(self.base, Checkpoint) else self.base
        edits = {name: found for name, found in self.edits.items() if name not in names}
        return Adapter(base, edits, self.settings, self.folder, self.config, self.files)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        weights = self.base.read(name, start, stop)
        if name not in self.edits or start >= stop:
            return weights.to(self.dtype(name))
        weights = weights.to("cpu", torch.float32, copy=True)
        for edit in self.edits[name]:
            weights = edit.apply(start, stop, weights)
        return weights


@dataclass
class OpenedAdapter:
    """
    What came of opening an adapter.

    Args:
        store (`Adapter`):
            The adapter, as far as it could be understood.
        problems (`list[Problem]`):
            Everything that keeps it from being merged.
        warnings (`list[str]`):
            What is worth knowing.
        unreadable (`set[str]`):
            Always empty: tensors of an adapter that cannot be read are problems.
    """

    store: Adapter
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / CONFIG_FILE).is_file() and not list(folder.glob("model*.safetensors"))


def open_adapter(folder: Path, base: Checkpoint, where: str) -> OpenedAdapter:
    """
    Opens an adapter folder; its factors are read, whole modules are mapped.

    Args:
        folder (`Path`):
            `adapter_config.json` and `adapter_model.safetensors`, as `save_pretrained` of a PEFT model writes them.
        base (`Checkpoint`):
            The base it is merged into.
        where (`str`):
            How problems name it, such as `agent 'tool'`.

    Returns:
        `OpenedAdapter`: never raises for what is wrong with the folder; that is in `problems`.
    """
    settings, problems = read_settings(folder, where)
    if settings is None:
        return OpenedAdapter(Adapter(base, {}, AdapterSettings({}), folder, base.config), problems)
    tensors = _read_tensors(folder, where, problems)
    initial: dict[str, Tensor] | None = None
    if settings.rewrites_base and (folder / INITIAL_ADAPTER).is_dir():
        initial = _read_tensors(folder / INITIAL_ADAPTER, where, problems)
    edits: dict[str, list[Edit]] = {}
    if tensors and not problems and base.names():
        draft = Draft(base, settings, Anatomy(base.config, base), where, tensors, initial)
        edits, problems = draft.edits(), draft.problems
    files = [path for path in (folder / WEIGHTS_FILE, folder / INITIAL_ADAPTER / WEIGHTS_FILE) if path.is_file()]
    opened = OpenedAdapter(Adapter(base, edits, settings, folder, base.config, files), problems)
    if not base.names():
        return opened
    _compare_bases(opened, base, where)
    return opened


def live_adapter(model: nn.Module, adapter: str, base: Store, where: str) -> OpenedAdapter:
    """
    An adapter of a PEFT model in memory.

    Args:
        model (`PeftModel`):
            The model, unwrapped.
        adapter (`str`):
            Name of the adapter in it.
        base (`Store`):
            The base, under the names of the model without its adapters or as a checkpoint.
        where (`str`):
            How problems name it.

    Returns:
        `OpenedAdapter`: the adapter as it is now; factors are copied.
    """
    from peft import get_peft_model_state_dict

    settings = AdapterSettings(model.peft_config[adapter].to_dict())  # type: ignore[index, union-attr]
    problems = check_settings(settings, where, False)
    edits: dict[str, list[Edit]] = {}
    if not problems:
        tensors = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        config = model.config.to_dict() if hasattr(model.config, "to_dict") else {}  # type: ignore[operator]
        inner = model.get_base_model()  # type: ignore[operator]
        stored_as_named = all(name in base.names() or name in base.aliases for name in _plain_names(inner))
        anatomy = Anatomy(config, base, inner if stored_as_named else None)
        tensors = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
        draft = Draft(base, settings, anatomy, where, tensors, None)
        edits, problems = draft.edits(), draft.problems
    return OpenedAdapter(Adapter(base, edits, settings), problems)


def _plain_names(model: nn.Module) -> list[str]:
    named = (plain_name(name) for name, _ in model.named_parameters())
    return [name for name in named if name is not None]


def _read_tensors(folder: Path, where: str, problems: list[Problem]) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        what = f"{path} is missing"
        if (folder / PICKLED_FILE).is_file():
            what += (
                f", there is only {PICKLED_FILE}; load it with PeftModel.from_pretrained and save_pretrained it, "
                "which writes safetensors (pickled weights are never read here)"
            )
        problems.append(Problem(where, what))
        return {}
    try:
        handle = safe_open(path, framework="pt")
        tensors = {name: handle.get_tensor(name) for name in sorted(handle.keys())}
    except (SafetensorError, OSError) as error:
        problems.append(Problem(where, f"{path} is damaged or truncated ({error}); copy or save it again"))
        return {}
    if not tensors:
        what = f"{path} holds no tensors; under ZeRO-3 gather the adapter before saving it"
        problems.append(Problem(where, what))
    return tensors


def _compare_bases(opened: OpenedAdapter, base: Checkpoint, where: str) -> None:
    """Tells when the adapter was trained on another base than it is merged into."""
    trained_on = opened.store.settings.trained_on
    if not trained_on:
        opened.warnings.append(f"{where}: {CONFIG_FILE} does not tell its base; it is taken to be {base.folder}")
        return
    folder = Path(trained_on)
    here = (folder / "config.json").is_file()
    quantized = bool(QUANTIZED.search(trained_on)) or (here and _is_quantized(folder))
    if quantized:
        opened.warnings.append(
            f"{where}: it was trained on a quantized base ({trained_on}) and is merged into {base.folder}, which is "
            "not quantized; expect small differences from the agent as it was trained"
        )
    elif not here:
        # A folder of the Hub's cache has the name in its path.
        known = {base.folder.resolve().name, str(base.config.get("_name_or_path"))}
        if not known & {folder.name, trained_on} and trained_on.replace("/", "--") not in str(base.folder.resolve()):
            opened.warnings.append(
                f"{where}: it was trained on {trained_on}; make sure that {base.folder} holds the same weights"
            )
    elif folder.resolve() != base.folder.resolve():
        differing = _first_difference(base, open_checkpoint(folder, where).store)
        if differing is not None:
            what = (
                f"it was trained on {trained_on}, whose '{differing}' is not that of the base {base.folder}; agents "
                "of one merge share one base"
            )
            opened.problems.append(Problem(where, what, differing))


def _is_quantized(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config"))
    except (OSError, ValueError, AttributeError):
        return False


def _first_difference(base: Checkpoint, other: Checkpoint) -> str | None:
    """A tensor that differs in shape, or in value at either end once rounded alike; `None` if none does."""
    if not other.names():
        return None
    for name in base.names():
        if name not in other.names():
            return name
        size = prod(base.shape(name))
        if base.shape(name) != other.shape(name):
            return name
        for start in {0, max(0, size - SAMPLE)}:
            stop = min(size, start + SAMPLE)
            one, two = base.read(name, start, stop), other.read(name, start, stop)
            coarse = min(one.dtype, two.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(one.to(coarse), two.to(coarse)):
                return name
    return None
