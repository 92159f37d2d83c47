"""
A merged adapter as peft wants it: fits and whole parameters in, names of tensors and settings out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from ram_trl.engine.low_rank import Fit
from ram_trl.problems import Problem
from ram_trl.weights import Span, Store, entries
from ram_trl.weights.adapter import WEIGHTS_FILE
from ram_trl.weights.adapter_settings import CONFIG_FILE, AdapterSettings
from ram_trl.weights.adapter_tensors import PREFIX, TOKENS
from ram_trl.weights.anatomy import Anatomy

Form = Literal["linear", "conv1d", "embedding", "parameter"]


@dataclass(frozen=True)
class AdapterReport:
    """
    How well an adapter holds what a merge changes.

    Args:
        rank (`int`):
            The largest rank of a layer.
        error (`float`):
            Frobenius norm of what it misses, relative to all that the merge changes.
        errors (`dict[str, float]`):
            The same by parameter; parameters that are kept whole have 0.
        ranks (`dict[str, int]`):
            Rank by parameter that is adapted.
    """

    rank: int
    error: float
    errors: dict[str, float]
    ranks: dict[str, int]

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(vars(self), indent=2) + "\n"


@dataclass(frozen=True)
class MergedAdapter:
    """
    An adapter that peft loads.

    Args:
        settings (`dict[str, Any]`):
            Arguments of `LoraConfig`.
        tensors (`dict[str, Tensor]`):
            As in `adapter_model.safetensors`, float32.
        report (`AdapterReport`):
            How good it is.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    report: AdapterReport

    def save(self, folder: Path, base: str) -> None:
        """
        Writes it into an existing folder.

        Args:
            folder (`Path`):
                Where.
            base (`str`):
                Name or path of the base it belongs to.
        """
        from peft import LoraConfig

        config = LoraConfig(**self.settings, base_model_name_or_path=base, inference_mode=True)
        values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(self.tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read.
        (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)


class Assembly:
    """
    Puts an adapter together.

    Args:
        base (`Store`):
            The checkpoint.
        anatomy (`Anatomy`):
            The base's.
        agents (`Sequence[AdapterSettings]`):
            Settings of the adapters that were merged: names are chosen as theirs where that means the same.
        forms (`Mapping[str, Form]`), fits (`Mapping[str, list[Fit]]`):
            By parameter that is adapted: how peft does it, and the fit of each expert (one for a matrix).
        deltas (`Mapping[str, Tensor]`):
            By parameter that is kept whole: what the merge changes, in its shape, float32.
        rows (`Mapping[str, Tensor]`):
            Of these, the rows that are kept, where the others are the base's.

    Attributes:
        problems (`list[Problem]`):
            What an adapter cannot hold; then there is none to be had.
    """

    def __init__(
        self,
        base: Store,
        anatomy: Anatomy,
        agents: Sequence[AdapterSettings],
        forms: Mapping[str, Form],
        fits: Mapping[str, list[Fit]],
        deltas: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
    ) -> None:
        self.problems: list[Problem] = []
        self._base, self._anatomy, self._agents, self._forms, self._fits = base, anatomy, agents, forms, fits
        self._deltas, self._rows = deltas, rows
        self._tensors: dict[str, Tensor] = {}
        layers = {name.rpartition(".")[0] for name in fits if forms[name] in ("linear", "conv1d")}
        self._biases = {n: d for n, d in deltas.items() if n.rpartition(".")[0] in layers and n.endswith(".bias")}
        self._saved = sorted({self._saved_with(n) for n in deltas if n not in self._biases and n not in rows})
        self._tied = {name: alias for alias, name in base.aliases.items() if name in fits or name in deltas}
        self._check()

    def _saved_with(self, parameter: str) -> str:
        """The module that is saved whole for a parameter: as an agent has it, or just the one that owns it."""
        module = parameter.rpartition(".")[0]
        wanted = [str(name) for settings in self._agents for name in settings.values.get("modules_to_save") or ()]
        above = module
        while above:
            if any(above == name or above.endswith(f".{name}") for name in wanted):
                return above
            above = above.rpartition(".")[0]
        return module

    def _check(self) -> None:
        by_parameter = [name for name, form in self._forms.items() if form == "parameter"]
        if self._biases and by_parameter:
            what = (
                f"the merge changes biases of adapted layers ('{next(iter(self._biases))}') and parameters that peft "
                f"adapts without biases ('{by_parameter[0]}'); one adapter cannot hold both - write a full model"
            )
            self.problems.append(Problem("output", what))
        for module in self._saved:
            if any(f"{name}.".startswith(f"{module}.") for name in self._fits):
                what = (
                    f"the merge changes '{module}' both by a product and otherwise, which one adapter cannot hold; "
                    "write a full model"
                )
                self.problems.append(Problem("output", what))

    def adapter(self) -> MergedAdapter:
        ranks = {name: found[0].rank for name, found in self._fits.items()}
        rank = max(ranks.values(), default=1)
        others = {self._layer(name): own for name, own in ranks.items() if own != rank}
        settings: dict[str, Any] = {
            "r": rank,
            "lora_alpha": rank,
            "rank_pattern": others,
            "alpha_pattern": dict(others),
            "target_modules": self._target_modules(),
            "target_parameters": self._target_parameters() or None,
            "trainable_token_indices": {n.rpartition(".")[0]: rows.tolist() for n, rows in self._rows.items()} or None,
            "modules_to_save": self._saved or None,
            "lora_bias": bool(self._biases),
            "fan_in_fan_out": "conv1d" in self._forms.values(),
            "ensure_weight_tying": bool(self._tied.keys() - self._rows.keys()),
        }
        for name in self._fits:
            self._put(name)
        for module in self._saved:
            self._put_whole(module)
        for parameter, index in self._rows.items():
            values = self._merged(parameter)[index]
            self._tensors[f"{PREFIX}{parameter.rpartition('.')[0]}.{TOKENS}"] = values
        errors = {name: _together(found) for name, found in self._fits.items()} | dict.fromkeys(self._deltas, 0.0)
        norms = [one.norm for found in self._fits.values() for one in found]
        norms += [float(torch.linalg.vector_norm(delta)) for delta in self._deltas.values()]
        missed = [one.norm * one.error for found in self._fits.values() for one in found]
        error = hypot(*missed) / hypot(*norms)
        return MergedAdapter(settings, self._tensors, AdapterReport(rank, error, dict(sorted(errors.items())), ranks))

    def _layer(self, parameter: str) -> str:
        """What peft looks up in its patterns."""
        return parameter if self._forms[parameter] == "parameter" else parameter.rpartition(".")[0]

    def _target_parameters(self) -> list[str]:
        """As an agent names them if it means the same, because peft wants that of adapters side by side."""
        ours = sorted(name for name, form in self._forms.items() if form == "parameter")
        for settings in self._agents:
            wanted = settings.values.get("target_parameters")
            meant = {name for name in self._anatomy.all_parameters() if settings.targets(name)}
            if wanted and meant == set(ours):
                return list(wanted)
        return ours

    def _target_modules(self) -> list[str]:
        """Names of modules in full, or just how they end where that means the same."""
        modules = sorted(n.rpartition(".")[0] for n, form in self._forms.items() if form != "parameter")
        ends = {module.rpartition(".")[2] for module in modules}
        named = [name.rpartition(".")[0] for name in (*self._base.names(), *self._base.aliases)]
        meant = {module for module in named if module.rpartition(".")[2] in ends}
        return sorted(ends) if meant == set(modules) else modules

    def _put(self, parameter: str) -> None:
        form, found = self._forms[parameter], self._fits[parameter]
        module = parameter.rpartition(".")[0]
        left, right = (torch.stack([getattr(one, side) for one in found]) for side in ("left", "right"))
        flipped = form in ("conv1d", "embedding")
        if form == "parameter":
            # A stack of one is treated as a matrix, which is never turned.
            flipped = len(found) > 1 and self._anatomy.experts_are_transposed(module)
            module += ".base_layer" * self._depth(parameter)
        a, b = (left.transpose(1, 2), right.transpose(1, 2)) if flipped else (right, left)
        # A is stacked by expert; in B the expert runs fastest.
        a, b = a.reshape(-1, a.shape[2]).contiguous(), b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()
        if form == "embedding":
            self._tensors |= {f"{PREFIX}{module}.lora_embedding_A": a, f"{PREFIX}{module}.lora_embedding_B": b}
            if parameter in self._tied:
                head = self._tied[parameter].rpartition(".")[0]
                self._tensors[f"{PREFIX}{head}.lora_A.weight"] = b.T.contiguous()
                self._tensors[f"{PREFIX}{head}.lora_B.weight"] = a.T.contiguous()
            return
        self._tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
        if self._biases and form != "parameter":
            bias = self._biases.get(f"{module}.bias")
            self._tensors[f"{PREFIX}{module}.lora_B.bias"] = torch.zeros(b.shape[0]) if bias is None else bias

    def _depth(self, parameter: str) -> int:
        """How many wrappers of other parameters of the module lie around this one's: the first is the innermost."""
        module = parameter.rpartition(".")[0]
        order = self._anatomy.parameters(module) or []
        adapted = [f"{module}.{name}" for name in order if self._forms.get(f"{module}.{name}") == "parameter"]
        return len(adapted) - 1 - adapted.index(parameter) if parameter in adapted else 0

    def _put_whole(self, module: str) -> None:
        for name in self._anatomy.all_parameters():
            if f"{name}.".startswith(f"{module}."):
                values = self._merged(name)
                self._tensors[PREFIX + name] = values
                if name in self._tied:
                    self._tensors[PREFIX + self._tied[name]] = values.clone()

    def _merged(self, parameter: str) -> Tensor:
        """A parameter of the merged model, float32."""
        shape = self._anatomy.shape(parameter) or ()
        values = torch.empty(shape)
        for piece in self._anatomy.pieces(parameter):
            part = Span(piece.stored, 0, entries(self._base, piece.stored)).of(self._base)
            place = values if piece.expert is None else values[piece.expert, piece.start : piece.stop]
            place.copy_(part.view(place.shape))
        return values + self._deltas[parameter] if parameter in self._deltas else values


def _together(found: Sequence[Fit]) -> float:
    norm = hypot(*(one.norm for one in found))
    return hypot(*(one.norm * one.error for one in found)) / norm if norm else 0.0
