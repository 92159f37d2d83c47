"""
A LoRA adapter as a store: the weights its agent computes with, θ = W + ΔW, row by row when they are asked for.

W is always read from the base store, ΔW is computed in float32 (`edits.py`). An adapter is a folder that peft saved or
an adapter of a PEFT model in memory. Every tensor of the adapter becomes an edit of a stored tensor, or a problem;
none is passed over.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from ram_trl.weights.anatomy import Anatomy
from ram_trl.weights.checkpoint import Checkpoint, open_checkpoint
from ram_trl.weights.edits import Dora, Edit, LowRank, Replace, ReplaceRows, Shift

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
PREFIX = "base_model.model."

FACTORS = ("lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_embedding_A", "lora_embedding_B") + (
    "lora_magnitude_vector",
)
TOKENS = "token_adapter.trainable_tokens_delta"
WRAPPERS = ("base_layer", "original_module", "token_adapter")
"""Modules that peft puts around those of the model."""
OF_ADAPTERS = ("modules_to_save", "trainable_tokens_delta", "trainable_tokens_original")
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
    """

    def __init__(
        self,
        base: Store,
        edits: Mapping[str, Sequence[Edit]],
        settings: AdapterSettings,
        folder: Path = Path(),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.base = base
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
    if tensors and not problems:
        draft = _Draft(base, settings, Anatomy(base.config, base), where, tensors, initial)
        edits, problems = draft.edits(), draft.problems
    opened = OpenedAdapter(Adapter(base, edits, settings, folder, base.config), problems)
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

    settings = AdapterSettings(model.peft_config[adapter].to_dict())  # type: ignore[operator, index, union-attr]
    problems = check_settings(settings, where, False)
    edits: dict[str, list[Edit]] = {}
    if not problems:
        tensors = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        config = model.config.to_dict() if hasattr(model.config, "to_dict") else {}  # type: ignore[operator, union-attr]
        inner = model.get_base_model()  # type: ignore[operator]
        stored_as_named = all(name in base.names() or name in base.aliases for name in _plain_names(inner))
        anatomy = Anatomy(config, base, inner if stored_as_named else None)
        tensors = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
        draft = _Draft(base, settings, anatomy, where, tensors, None)
        edits, problems = draft.edits(), draft.problems
    return OpenedAdapter(Adapter(base, edits, settings), problems)


def plain_name(name: str) -> str | None:
    """Name of a parameter of a PEFT model without its wrappers; `None` for what belongs to an adapter."""
    parts = name.removeprefix(PREFIX).split(".")
    if any(part in OF_ADAPTERS or part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part not in WRAPPERS)


def _plain_names(model: nn.Module) -> list[str]:
    named = (plain_name(name) for name, _ in model.named_parameters())
    return [name for name in named if name is not None]


def _read_tensors(folder: Path, where: str, problems: list[Problem]) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        what = f"{path} is missing"
        if (folder / PICKLED_FILE).is_file():
            what += (
                f", there is only {PICKLED_FILE}; load it with PeftModel.from_pretrained and save_pretrained it again, "
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


class _Draft:
    """Turns the tensors of an adapter into edits of stored tensors."""

    def __init__(
        self,
        base: Store,
        settings: AdapterSettings,
        anatomy: Anatomy,
        where: str,
        tensors: Mapping[str, Tensor],
        initial: Mapping[str, Tensor] | None,
    ) -> None:
        self.problems: list[Problem] = []
        self._base, self._settings, self._anatomy, self._where = base, settings, anatomy, where
        self._edits: dict[str, list[Edit]] = defaultdict(list)
        self._layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._initial: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._whole: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            self._sort(name, tensor, self._layers)
        for name, tensor in (initial or {}).items():
            self._sort(name, tensor, self._initial)

    def edits(self) -> dict[str, list[Edit]]:
        """By stored name, tied tensors under the name they are stored under. Fills `problems`."""
        for name, tensor in sorted(self._whole.items()):
            self._replace(name, tensor)
        for module, tensor in sorted(self._tokens.items()):
            self._replace_rows(module, tensor)
        targets = self._nested(sorted(self._layers))
        for key, factors in sorted(self._layers.items()):
            self._adapt(key, targets.get(key), factors)
        return self._untied()

    def _problem(self, what: str, name: str | None = None, kind: str = "") -> None:
        self.problems.append(Problem(self._where, what, name, kind))

    def _sort(self, name: str, tensor: Tensor, layers: dict[str, dict[str, Tensor]]) -> None:
        if tensor.numel() == 0:
            what = (
                f"'{name}' has no entries (shape {list(tensor.shape)}): it was saved from a sharded model; gather the "
                "adapter before saving it (under ZeRO-3, save through the trainer)"
            )
            self._problem(what, name, "empty tensor")
            return
        if tensor.dtype not in MERGEABLE:
            self._problem(f"'{name}' is stored as {tensor.dtype}, which cannot be merged", name, "dtype")
            return
        plain = name.removeprefix(PREFIX).removesuffix(".weight" if name.endswith("magnitude_vector.weight") else "")
        for factor in FACTORS:
            if plain.endswith(f".{factor}"):
                layers[plain.removesuffix(f".{factor}")][factor] = tensor
                return
        if plain.endswith(f".{TOKENS}"):
            self._tokens[plain.removesuffix(f".{TOKENS}")] = tensor
        elif "lora_" in plain or ".token_adapter." in plain:
            what = f"'{name}' is not a tensor of an adapter that is understood here; merge it with peft"
            self._problem(what, name, "unknown tensor")
        else:
            self._whole[".".join(part for part in plain.split(".") if part not in WRAPPERS)] = tensor

    def _place(self, parameter: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether the base holds a parameter of the model, of that shape; else that is a problem."""
        found = self._anatomy.shape(parameter)
        if found is None:
            what = (
                f"it changes '{parameter}', which is not in the base; name the base that it was trained on, as a "
                "folder saved by save_pretrained"
            )
            self._problem(what, parameter, "not in the base")
        elif shape is not None and found != shape:
            what = f"it changes '{parameter}' of shape {list(shape)}, the base has {list(found)}"
            if len(shape) == 2 and shape[1:] == found[1:]:
                what += (
                    f"; {shape[0]} rows against {found[0]}: if it is an embedding, the vocabulary was resized - resize "
                    "the base the same way and save it"
                )
            self._problem(what, parameter, "shape")
        else:
            return True
        return False

    def _replace(self, parameter: str, tensor: Tensor) -> None:
        if not self._place(parameter, tuple(tensor.shape)):
            return
        flat = tensor.reshape(-1)
        for piece in self._anatomy.pieces(parameter):
            part = flat if piece.expert is None else tensor[piece.expert, piece.start : piece.stop].reshape(-1)
            if not self._is_base(piece.stored, part):
                self._edits[piece.stored].append(Replace(part))

    def _is_base(self, stored: str, values: Tensor) -> bool:
        """Whether these are the base's weights as they are, up to the rounding of the model that was trained."""
        name = self._base.aliases.get(stored, stored)
        return torch.equal(self._base.read(name, 0, values.numel()).to("cpu", values.dtype), values)

    def _replace_rows(self, module: str, tensor: Tensor) -> None:
        parameter = f"{module}.weight"
        rows = self._settings.tokens(module)
        if not self._place(parameter):
            return
        shape = self._anatomy.shape(parameter)
        if not rows or len(set(rows)) != len(tensor) or tensor.shape[1:] != (shape or ())[1:]:
            what = (
                f"trainable_token_indices of {CONFIG_FILE} names {len(set(rows or []))} rows of '{parameter}' "
                f"{list(shape or ())}, its tensor has the shape {list(tensor.shape)}"
            )
            self._problem(what, parameter)
            return
        if max(rows) >= (shape or (0,))[0] or min(rows) < 0:
            what = f"it trains row {max(rows)} of '{parameter}', the base has {(shape or (0,))[0]} rows"
            self._problem(f"{what}; resize the base as it was resized in training, and save it", parameter)
            return
        index = torch.tensor(rows)
        order = index.argsort()
        for piece in self._anatomy.pieces(parameter):
            self._edits[piece.stored].append(ReplaceRows(index[order], tensor[order].float()))

    def _nested(self, keys: Sequence[str]) -> dict[str, str]:
        """
        The parameter each wrapper belongs to, for modules whose parameters are adapted themselves.

        peft wraps a module once per parameter: the first one in order of registration is the innermost, and only the
        depth of the nesting tells in the file which is which.
        """
        targets: dict[str, str] = {}
        if not self._settings.values.get("target_parameters"):
            return targets
        depths: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            depths[key.replace(".base_layer", "")].append(key)
        for module, wrappers in depths.items():
            own = self._anatomy.parameters(module)
            adapted = [f"{module}.{name}" for name in own or [] if self._settings.targets(f"{module}.{name}")]
            # Without a model, only the plain case is known: a layer with one weight.
            if own is None and self._settings.targets(f"{module}.weight"):
                adapted = [f"{module}.weight"]
            if adapted and len(adapted) == len(wrappers):
                targets |= dict(zip(sorted(wrappers, key=len, reverse=True), adapted, strict=True))
            elif adapted or len(wrappers) > 1:
                what = (
                    f"target_parameters names {len(adapted)} parameters of '{module}', its file has "
                    f"{len(wrappers)}; which is which cannot be told - merge it with peft (merge_and_unload)"
                )
                self._problem(what, module)
        return targets

    def _adapt(self, key: str, target: str | None, factors: dict[str, Tensor]) -> None:
        embedding = "lora_embedding_A" in factors or "lora_embedding_B" in factors
        pair = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        missing = [name for name in pair if name not in factors]
        if missing:
            self._problem(f"'{key}.{missing[0]}' is missing beside its other factor; save the adapter again", key)
            return
        a, b = (factors[name] for name in pair)
        parameter = target or f"{key}.weight"
        if not self._place(parameter):
            return
        shape = self._anatomy.shape(parameter) or ()
        if a.dim() != 2 or b.dim() != 2 or len(shape) not in (2, 3) or (len(shape) == 3 and target is None):
            what = f"'{key}' is a layer with {len(shape)} dimensions; only linear layers, embeddings and experts are "
            self._problem(f"{what}understood - merge it with peft (merge_and_unload)", key)
            return
        experts = shape[0] if len(shape) == 3 else 1
        rank = a.shape[0] // experts
        expected = self._settings.rank(target or key)
        if rank != expected:
            what = f"'{key}' has rank {rank}, {CONFIG_FILE} says {expected} (r, rank_pattern); one of them was changed"
            self._problem(what, key, "rank")
            return
        scale = self._settings.scale(target or key, rank)
        oriented = self._oriented(key, target, shape, a, b, embedding)
        if oriented is None:
            return
        left, right, flipped = oriented
        if self._settings.rewrites_base:
            before = self._initial.get(key, {})
            if {name: tuple(before[name].shape) for name in pair if name in before} != {
                name: tuple(factors[name].shape) for name in pair
            }:
                self._problem(f"'{key}' is not in {INITIAL_ADAPTER} with the same shapes; save both again", key)
                return
            start = self._oriented(key, target, shape, before[pair[0]], before[pair[1]], embedding)
            assert start is not None
            left, right = torch.cat([left, -start[0]], 2), torch.cat([right, start[1]], 1)
        # The scale goes into the smaller work: one factor instead of the product.
        low_rank = LowRank(left * scale, right)
        magnitude = factors.get("lora_magnitude_vector")
        self._add(parameter, low_rank, magnitude, by_row=not (flipped or embedding))
        if "lora_B.bias" in factors:
            name = f"{key}.bias"
            if self._anatomy.shape(name) is None:
                what = f"lora_bias trained a bias for '{key}', which has none in the base; merging cannot add one"
                self._problem(what, name)
            elif self._place(name, tuple(factors["lora_B.bias"].shape)):
                for piece in self._anatomy.pieces(name):
                    self._edits[piece.stored].append(Shift(factors["lora_B.bias"].float() * scale))

    def _add(self, parameter: str, low_rank: LowRank, magnitude: Tensor | None, by_row: bool) -> None:
        if magnitude is None:
            for piece in self._anatomy.pieces(parameter):
                part = low_rank
                if piece.expert is not None:
                    one = slice(piece.expert, piece.expert + 1)
                    part = LowRank(low_rank.left[one, piece.start : piece.stop], low_rank.right[one])
                self._edits[piece.stored].append(part)
            return
        stored = self._anatomy.pieces(parameter)[0].stored
        if magnitude.numel() != (low_rank.rows if by_row else low_rank.columns) or self._edits.get(stored):
            self._problem(f"the DoRA magnitudes of '{parameter}' do not fit it; save the adapter again", parameter)
            return
        name = self._base.aliases.get(stored, stored)
        read = partial(_read_float, self._base, name)
        self._edits[stored].append(Dora(low_rank, magnitude.reshape(-1).float(), by_row, read))

    def _oriented(
        self, key: str, target: str | None, shape: tuple[int, ...], a: Tensor, b: Tensor, embedding: bool
    ) -> tuple[Tensor, Tensor, bool] | None:
        """Factors whose product is ΔW as it is stored, (experts, rows, rank) and (experts, rank, columns)."""
        a, b = a.to(torch.float32, copy=True), b.to(torch.float32, copy=True)
        if len(shape) == 3:
            # A is stacked by expert; in B the expert runs fastest.
            a3 = a.reshape(shape[0], -1, a.shape[1])
            b3 = b.reshape(b.shape[0], -1, shape[0]).permute(2, 0, 1)
        else:
            a3, b3 = a[None], b[None]
        plain = (b3.shape[1], a3.shape[2]) == shape[-2:]
        flipped = (a3.shape[2], b3.shape[1]) == shape[-2:]
        if plain and flipped:
            flipped = self._is_flipped(key, target, shape) or embedding
        elif not (plain or flipped) or (embedding and not flipped):
            rows, columns = (a3.shape[2], b3.shape[1]) if embedding else (b3.shape[1], a3.shape[2])
            what = f"'{key}' adapts a weight of {rows} × {columns}, the base has {list(shape)}"
            if embedding:
                what += "; if the vocabulary was resized, resize the base the same way and save it"
            self._problem(what, key, "shape")
            return None
        if flipped:
            return a3.transpose(1, 2), b3.transpose(1, 2), True
        return b3, a3, False

    def _is_flipped(self, key: str, target: str | None, shape: tuple[int, ...]) -> bool:
        """Whether a square weight is stored as (in, out), which its shape does not tell."""
        if target is not None:
            module = target.rpartition(".")[0]
            return len(shape) == 3 and shape[0] > 1 and self._anatomy.experts_are_transposed(module)
        kind = self._anatomy.kind(key)
        return self._settings.flipped if kind is None else kind == "conv1d"

    def _untied(self) -> dict[str, list[Edit]]:
        edits = {name: list(found) for name, found in self._edits.items() if name not in self._base.aliases}
        for alias, name in sorted(self._base.aliases.items()):
            theirs, ours = self._edits.get(alias, []), self._edits.get(name, [])
            same = len(theirs) == len(ours) and all(x.same(y) for x, y in zip(theirs, ours, strict=True))
            by_tie = not theirs and (
                self._settings.ties or all(isinstance(edit, ReplaceRows) for edit in ours)
            )
            if same or by_tie:
                continue
            changed, kept = (name, alias) if ours else (alias, name)
            what = f"it changes '{changed}', but not '{kept}' in the same way, and the base ties the two"
            what += (
                "; train with ensure_weight_tying, or save the base untied (tie_word_embeddings false, with a tensor "
                "of its own for either), and merge into that"
            )
            self._problem(what, changed, "tied")
        return edits


def _read_float(base: Store, name: str, start: int, stop: int) -> Tensor:
    return base.read(name, start, stop).to("cpu", torch.float32)


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
        if Path(trained_on).name.lower() != base.folder.resolve().name.lower():
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


