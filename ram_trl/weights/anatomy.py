"""
How a transformers model is built, where a checkpoint's names and shapes do not tell: kinds of layers, fused experts.

A model is made without weights from `config.json`. An architecture that transformers does not know has no anatomy;
then names of modules are taken to be names of stored tensors, and what stays ambiguous is left to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from ram_trl.weights import Store

Kind = Literal["linear", "conv1d", "embedding", "other"]


@dataclass(frozen=True)
class Piece:
    """
    A stored tensor and what part of a parameter of the model it holds: all of it, or some rows of one expert.

    Args:
        stored (`str`):
            Name in the checkpoint.
        expert (`int`, *optional*):
            Index along the first of three dimensions; `None` if the tensor is the whole parameter.
        start, stop (`int`):
            Rows of that expert.
    """

    stored: str
    expert: int | None = None
    start: int = 0
    stop: int = 0


class Anatomy:
    """
    The modules of an architecture.

    Args:
        config (`Mapping[str, Any]`):
            The checkpoint's `config.json`.
        base (`Store`):
            The checkpoint.
        model (`nn.Module`, *optional*):
            The model itself, where it is at hand.
    """

    def __init__(self, config: Mapping[str, Any], base: Store, model: nn.Module | None = None) -> None:
        self._config = config
        self._base = base
        self._given = model

    def kind(self, module: str) -> Kind | None:
        """What kind of layer a module is; `None` if that cannot be known."""
        found = self._module(module)
        if found is None:
            return None
        if isinstance(found, nn.Linear):
            return "linear"
        if isinstance(found, nn.Embedding):
            return "embedding"
        return "conv1d" if type(found).__name__ == "Conv1D" else "other"

    def parameters(self, module: str) -> list[str] | None:
        """Names of a module's own parameters, in the order they were registered; `None` if that cannot be known."""
        found = self._module(module)
        return None if found is None else [name for name, _ in found.named_parameters(recurse=False)]

    def experts_are_transposed(self, module: str) -> bool:
        """Whether fused experts are stored as (expert, in, out) rather than (expert, out, in)."""
        return bool(getattr(self._module(module), "is_transposed", False))

    def shape(self, parameter: str) -> tuple[int, ...] | None:
        """Shape of a parameter of the model, fused or not; `None` if there is none of that name."""
        pieces = self.pieces(parameter)
        if not pieces:
            return None
        first = pieces[0]
        shape = self._base.shape(self._base.aliases.get(first.stored, first.stored))
        experts = {piece.expert for piece in pieces}
        return shape if first.expert is None else (len(experts), max(piece.stop for piece in pieces), *shape[1:])

    def pieces(self, parameter: str) -> list[Piece]:
        """Where the checkpoint holds a parameter of the model; empty if it does not."""
        if parameter in self._base.aliases or parameter in self._names:
            return [Piece(parameter)]
        return self._converted.get(parameter, [])

    def all_parameters(self) -> list[str]:
        """Sorted names of the model's parameters, tied ones once."""
        return sorted({self.parameter(name) for name in self._names})

    def parameter(self, stored: str) -> str:
        """The parameter of the model that a stored tensor is, or is a part of."""
        return self._owner.get(stored, stored)

    @cached_property
    def _owner(self) -> dict[str, str]:
        return {piece.stored: name for name, pieces in self._converted.items() for piece in pieces}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._base.names())

    @cached_property
    def _model(self) -> nn.Module | None:
        if self._given is not None:
            return self._given
        import transformers

        architectures = self._config.get("architectures")
        kind = self._config.get("model_type")
        if not architectures or not isinstance(kind, str) or "auto_map" in self._config:
            return None
        made_of = getattr(transformers, str(architectures[0]), None)
        if made_of is None or kind not in transformers.CONFIG_MAPPING:
            return None
        try:
            with torch.device("meta"):
                made = made_of(transformers.CONFIG_MAPPING[kind].from_dict(dict(self._config)))
        except Exception:  # a config that transformers cannot build is one whose anatomy is not known
            return None
        return made if isinstance(made, nn.Module) else None

    def _module(self, name: str) -> nn.Module | None:
        if self._model is None:
            return None
        try:
            found = self._model.get_submodule(name)
        except AttributeError:
            return None
        while True:
            # Layers of a live PEFT model are wrapped, one in another.
            inner = found.__dict__.get("_modules", {})
            wrapped = inner.get("base_layer") or inner.get("original_module") or inner.get("token_adapter")
            if wrapped is None:
                return found
            found = wrapped

    @cached_property
    def _converted(self) -> dict[str, list[Piece]]:
        """Parameters that are stored under other names, or in pieces, as transformers writes them."""
        if self._model is None or self._given is not None:
            return {}
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            apply_renamings,
            rename_source_key,
        )

        transforms = get_model_conversion_mapping(self._model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        held = self._model.state_dict()
        pieces: dict[str, list[Piece]] = {}
        parts: dict[str, dict[tuple[int, int], str]] = {}
        for stored in self._names:
            name, pattern = rename_source_key(stored, renamings, converters, self._model.base_model_prefix, held)
            if pattern is None:
                if name in held and name != stored:
                    pieces[name] = [Piece(stored)]
                continue
            part = _part(apply_renamings(stored, renamings), pattern, converters)
            if part is not None:
                parts.setdefault(name, {})[part] = stored
        for name, found in parts.items():
            experts = 1 + max(expert for expert, _ in found)
            order = range(1 + max(place for _, place in found))
            if len(found) != experts * len(order):
                continue
            for expert in range(experts):
                start = 0
                for place in order:
                    stop = start + self._base.shape(found[expert, place])[0]
                    pieces.setdefault(name, []).append(Piece(found[expert, place], expert, start, stop))
                    start = stop
        return pieces


def _part(stored: str, pattern: str, converters: list[Any]) -> tuple[int, int] | None:
    """Expert and place among the concatenated, for stored tensors that are stacked into fused experts."""
    converter = next(one for one in converters if pattern in one.source_patterns)
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        return None
    # Transformers compiles its patterns in place; only the wildcard for the expert is of interest.
    found = re.search(r"\.(\d+)\." + re.escape(pattern.rsplit("*", 1)[-1].lstrip("\\.")).replace(r"\$", "$"), stored)
    return (int(found[1]), converter.source_patterns.index(pattern)) if found else None
