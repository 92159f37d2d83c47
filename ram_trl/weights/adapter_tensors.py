"""
The tensors of a LoRA adapter, told apart by their names, and what each does to a stored tensor.

Every tensor of the adapter becomes an edit (`edits.py`) or a problem; none is passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ram_trl.problems import Problem
from ram_trl.weights import MERGEABLE, Store
from ram_trl.weights.adapter_settings import CONFIG_FILE, INITIAL_ADAPTER, AdapterSettings
from ram_trl.weights.anatomy import Anatomy
from ram_trl.weights.edits import Dora, Edit, LowRank, Replace, ReplaceRows, Shift

PREFIX = "base_model.model."

FACTORS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
)
TOKENS = "token_adapter.trainable_tokens_delta"
WRAPPERS = ("base_layer", "original_module", "token_adapter")
"""Modules that peft puts around those of the model."""
OF_ADAPTERS = ("modules_to_save", "trainable_tokens_delta", "trainable_tokens_original")


def plain_name(name: str) -> str | None:
    """Name of a parameter of a PEFT model without its wrappers; `None` for what belongs to an adapter."""
    parts = name.removeprefix(PREFIX).split(".")
    if any(part in OF_ADAPTERS or part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part not in WRAPPERS)


class Draft:
    """
    Turns the tensors of an adapter into edits of stored tensors.

    Args:
        base (`Store`):
            The checkpoint.
        settings (`AdapterSettings`):
            The adapter's.
        anatomy (`Anatomy`):
            The base's.
        where (`str`):
            How problems name the adapter.
        tensors (`Mapping[str, Tensor]`):
            As in `adapter_model.safetensors`, on the CPU.
        initial (`Mapping[str, Tensor]`, *optional*):
            The same before training, for inits that rewrite the base.

    Attributes:
        problems (`list[Problem]`):
            Everything that could not be turned into an edit.
    """

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
                    f"; {shape[0]} rows against {found[0]}: if it is an embedding, the vocabulary was resized - "
                    "resize the base the same way and save it"
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
            by_tie = not theirs and (self._settings.ties or all(isinstance(edit, ReplaceRows) for edit in ours))
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
