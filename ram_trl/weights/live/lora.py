"""
A PEFT model in training, as weights that agents merge: θ, the base with the adapter's product in it.

The base and everything it was trained to by rounds is kept apart in float32, because the live base is not to be
trusted: 16-bit training rounds it, and the sync with vLLM merges the adapter into it and takes it out again. A merged
model goes back into training in one of two ways. `fold` puts it into the base and starts the adapter again at zero.
`svd` leaves the base alone and makes the adapter the best fit of what the base lacks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ram_trl.engine.low_rank import LARGE_ERROR
from ram_trl.team import Team
from ram_trl.weights import Span, Store, cut
from ram_trl.weights.adapter_tensors import WRAPPERS, Draft, plain_name
from ram_trl.weights.anatomy import Anatomy
from ram_trl.weights.block_folders import open_folder, write_folder
from ram_trl.weights.edits import Edit, LowRank, Shift
from ram_trl.weights.live import LiveWeights, check_cover, share_of
from ram_trl.weights.live.layout import LayoutError, Part, named
from ram_trl.weights.live.lora_checks import Mode, checked, refuse
from ram_trl.weights.live.reference import frozen_layout
from ram_trl.weights.live.svd import BestFit
from ram_trl.weights.sparse import BLOCK, Blocks, BlockWriter, blocks

logger = logging.getLogger(__name__)

FOLDER = "ram_base"
"""Of a checkpoint: what rounds made of the base, where that is not the state of the hub."""
FACTORS_FILE = "ram_factors.safetensors"
"""Of a checkpoint, with `svd`: the adapter as it was when the last round had been loaded."""
UP = ("lora_B.weight", "lora_embedding_A", "lora_B.bias")
"""The factors that are zero in an adapter that changes nothing."""


class LoraWeights:
    """
    All weights of a PEFT model in training, readable and writable by flat range, in float32.

    θ = loaded + (ΔW − ΔW when it was loaded): exactly what was loaded until the adapter is trained. ΔW is computed in
    float32, in row blocks that do not depend on how the model is spread over ranks. Modules that are trained whole
    (`modules_to_save`, biases) are read and written where the optimizer keeps them. Every agent holds all of the
    base's tensors, trained or not, so that agents with other ranks and targets, or without adapters, share a hub.

    Reads see the adapter as it was at the last `refresh` or `commit`. Making one is collective. Every rank keeps a
    float32 copy of the base, or of its shard under ZeRO-3, on the CPU.

    Args:
        model (`PeftModel`):
            The model as a `TrainerCallback` gets it.
        team (`Team`):
            The ranks of the job.
        optimizer (`torch.optim.Optimizer`, *optional*):
            The optimizer as a `TrainerCallback` gets it; needed under DeepSpeed.
        agent (`str`):
            How errors name the agent.
        mode (`str`):
            `"fold"` or `"svd"`.
        base (`Callable[[], Store]`):
            Opens the checkpoint that the model was loaded from; asked with `svd`.

    Raises:
        `LayoutError`: if the layout or the adapter was not shown to work.
    """

    def __init__(
        self, model: Any, team: Team, optimizer: Any, agent: str, mode: Mode, base: Callable[[], Store]
    ) -> None:
        self.team = team
        self.fit_error: float | None = None
        """With `svd`, after a load: the share of what was to be loaded that the adapter misses."""
        self._model, self._agent, self._mode, self._base = model, agent, mode, base
        self._adapter, settings = team.together(partial(checked, model, agent, mode))
        self._trained = LiveWeights(model, team, optimizer, adapters=True)
        self._factors: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        for name in self._trained.names():
            self._sort(name)
        inner = model.get_base_model()
        self._frozen = team.together(lambda: frozen_layout(_frozen(model), model, team))
        shapes = dict(self._frozen.shapes) | {n: self._trained.shape(peft) for n, peft in self._whole.items()}
        self._shapes = dict(sorted(shapes.items()))
        self.aliases = _aliases(inner)
        self._anatomy = Anatomy(inner.config.to_dict(), self, inner)
        self._settings = settings
        held = {name: Span(name, part.start, part.stop) for name, part in self._frozen.parts.items()}
        for name, peft in self._whole.items():
            own = [s for s in self._trained.held() if s.name == peft]
            if self.replicated:
                held[name] = Span(name, 0, prod(self._shapes[name]))
            elif own:
                held[name] = Span(name, own[0].start, own[0].stop)
        self._held = dict(sorted(held.items()))
        check_cover(self.title, self._shapes, self.held(), self.replicated, team)
        self._loaded = {n: torch.empty(p.length).copy_(p.master()) for n, p in self._frozen.parts.items()}
        self._edits: dict[str, list[Edit]] = {}
        self._before: dict[str, list[Edit]] = {}
        self._factors_before: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}
        self.refresh()

    def _sort(self, name: str) -> None:
        parts = [part for part in name.split(".") if part not in WRAPPERS]
        plain = ".".join(parts).removeprefix("base_model.model.")
        if f".{self._adapter}" in name and ".lora_" in name:
            key = re.sub(rf"\.(lora_\w+)\.{re.escape(self._adapter)}(?=\.|$)", r".\1", plain)
            self._factors[key] = name
        elif "modules_to_save" in parts:
            self._whole[plain.replace(f".modules_to_save.{self._adapter}", "")] = name
        else:
            self._whole[plain] = name

    @property
    def title(self) -> str:
        """The name of the layout."""
        return f"LoRA ({self._mode}), {self._trained.title}"

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the base whole: but for ZeRO-3."""
        return self._frozen.replicated

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """θ is float32, whatever its parts are trained in."""
        return torch.float32

    def stored(self, name: str, start: int, stop: int) -> Tensor:
        """θ, as it is published."""
        return self.read(name, start, stop)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Entries of θ that this rank holds, in float32 on the CPU."""
        held = self._held[name]
        if not held.start <= start <= stop <= held.stop:
            raise IndexError(f"this rank holds entries {held.start}-{held.stop} of '{name}', not {start}-{stop}")
        inside = slice(start - held.start, stop - held.start)
        if name in self._whole:
            return self._now[name][inside].clone()
        values = self._loaded[name][inside].clone()
        if name in self._edits and start < stop:
            change = _change(self._edits[name], start, stop)
            values += change - _change(self._before[name], start, stop) if self._before else change
        return values

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Sets θ from flat index `start` on to float32 `values`; call `commit` when all are written."""
        if name in self._loaded:
            at = start - self._held[name].start
            self._loaded[name][at : at + len(values)] = values
        if name in self._whole:
            self._write_trained(self._whole[name], start, values)

    def _write_trained(self, peft: str, start: int, values: Tensor) -> None:
        """Writes what this rank holds of a trained parameter, out of values from `start` on."""
        for span in self._trained.held():
            low, high = max(start, span.start), min(start + len(values), span.stop)
            if span.name == peft and low < high:
                self._trained.write(peft, low, values[low - start : high - start])

    def commit(self) -> None:
        """
        Makes the model compute with what was written, and the adapter and its moments start again. Collective.

        With `svd` the adapter is the best fit; what it misses stays in θ, as everything does that cannot be trained.
        """
        if self._mode == "fold":
            self._write_frozen(lambda span: self._loaded_at(span))
            self.team.together(self._empty_adapter)
        else:
            self._fit_adapter()
        self._trained.commit()
        self._trained.forget_moments()
        factors = self._gathered_factors()
        self._see(factors)
        if self._mode == "svd":
            self._before, self._factors_before = self._edits, factors

    def refresh(self) -> None:
        """Makes reads see the adapter as it is now. Collective: ranks gather its factors, which are small."""
        self._see(self._gathered_factors())

    def _gathered_factors(self) -> dict[str, Tensor]:
        """By their names in an adapter's file, float32. Collective."""
        return {key: self._gathered(name) for key, name in sorted(self._factors.items())}

    def _see(self, factors: Mapping[str, Tensor]) -> None:
        """Collective."""

        def check() -> None:
            merged = sorted({a for module in self._model.modules() for a in getattr(module, "merged_adapters", ())})
            if merged:
                raise LayoutError(
                    f"agent '{self._agent}': adapter '{merged[0]}' is merged into the model's weights now"
                )
            self._edits = self._edits_of(factors)

        self.team.together(check)
        for name, peft in self._whole.items():
            span = self._held.get(name)
            if self.replicated:
                self._now[name] = self._gathered(peft).view(-1)
            elif span is not None:
                self._now[name] = self._trained.read(peft, span.start, span.stop)

    def _edits_of(self, factors: Mapping[str, Tensor]) -> dict[str, list[Edit]]:
        draft = Draft(self, self._settings, self._anatomy, f"agent '{self._agent}'", factors, None)
        edits = draft.edits()
        refuse(self._agent, [str(problem) for problem in draft.problems])
        return edits

    def _gathered(self, peft: str) -> Tensor:
        """A trained parameter, whole, float32. Collective."""
        values = torch.zeros(prod(self._trained.shape(peft)))
        for span in self._trained.held():
            if span.name == peft:
                values[span.start : span.stop] = self._trained.read(peft, span.start, span.stop)
        if not self._trained.replicated:
            values = self.team.reduce(values, "sum")
        return (values + 0.0).view(self._trained.shape(peft))  # a sum over ranks has no -0, so nothing has

    def _loaded_at(self, span: Span) -> Tensor:
        start = self._held[span.name].start
        return self._loaded[span.name][span.start - start : span.stop - start]

    def _write_frozen(self, source: Callable[[Span], Tensor]) -> None:
        """Overwrites the live base. Collective."""

        def write() -> None:
            for span in cut([self._held[name] for name in self._frozen.parts], BLOCK):
                part: Part = self._frozen.parts[span.name]
                part.master()[span.start - part.start : span.stop - part.start].copy_(source(span))

        with torch.no_grad():
            self.team.together(write)
            self._frozen.commit()

    @property
    def folds(self) -> bool:
        """Whether rounds go into the live base."""
        return self._mode == "fold"

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Where the live base is, by stored name: parameters that are not trained, or this rank's shards of them."""
        return {name: getattr(p, "ds_tensor", p) for name, p in _frozen(self._model).items()}

    def put_base_back(self) -> None:
        """With `fold`: makes the live base what was loaded, whatever is there now. Collective."""
        self._write_frozen(lambda span: self._loaded_at(span))

    def _empty_adapter(self) -> None:
        for key, peft in self._factors.items():
            if key.endswith(UP):
                self._write_trained(peft, 0, torch.zeros(prod(self._trained.shape(peft))))

    # ---- svd ----------------------------------------------------------------------------------------------------

    def _fit_adapter(self) -> None:
        """Sets the factors to the best fit of θ − W, one layer after another. Collective."""
        base = self.team.together(self._base)
        best = BestFit(self.team)
        for name in self._frozen.shapes:
            if name in self._whole:
                continue
            lacking = self.team.together(partial(self._lacking, base, name))
            if name not in self._edits:
                if self.team.rank == 0 or not self.replicated:
                    best.miss(lacking)
                continue
            key = name.removesuffix(".weight")
            pair = [self._factors[f"{key}.{factor}"] for factor in self._pair(key)]
            a, b = (self._gathered(factor) for factor in pair)
            scale, whole = self._settings.scale(key, len(a)), self._assembled(name, lacking)
            for factor, values in zip(pair, best.factors(whole, a, b, self._anatomy.kind(key), scale), strict=True):
                self._write_trained(factor, 0, values)
        self.fit_error = best.error()
        if self.fit_error > LARGE_ERROR and self.team.first:
            logger.warning(
                "agent '%s': its adapter misses %.0f %% of what was loaded (lora=\"svd\"); a higher rank, more target "
                "modules or lora=\"fold\" holds more", self._agent, 100 * self.fit_error,
            )  # fmt: skip

    def _lacking(self, base: Store, name: str) -> Tensor:
        """θ − W of what this rank holds of a tensor, W as the live base started."""
        span = self._held.get(name)
        if span is None:
            return torch.zeros(0)
        start = base.read(name, span.start, span.stop).to(self._frozen.dtypes[name]).to("cpu", torch.float32)
        return self._loaded[name] - start

    def _assembled(self, name: str, values: Tensor) -> Tensor:
        """A tensor of which every rank has what it holds, in its shape. Collective."""
        if not self.replicated:
            span, part = self._held.get(name), values
            values = torch.zeros(prod(self._shapes[name]))
            if span is not None:
                values[span.start : span.stop] = part
            values = self.team.reduce(values, "sum")
        return values.view(self._shapes[name])

    def _pair(self, key: str) -> tuple[str, str]:
        embedding = f"{key}.lora_embedding_A" in self._factors
        return ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")

    # ---- other weights for a while, checkpoints -------------------------------------------------------------------

    @contextmanager
    def showing(self, source: Callable[[Span], Tensor]) -> Iterator[None]:
        """
        Within, the model computes with other weights; afterwards with its own again, to the bit. Collective.

        Needs memory for a copy of what this rank holds.
        """
        frozen = {name: part.master().to("cpu", copy=True) for name, part in self._frozen.parts.items()}
        trained = {span: self._trained.read(span.name, span.start, span.stop) for span in self._trained.held()}

        def show() -> None:
            self._empty_adapter()
            for span in cut([self._held[name] for name in self._whole if name in self._held], BLOCK):
                self._write_trained(self._whole[span.name], span.start, source(span))

        self._write_frozen(source)
        self.team.together(show)
        self._trained.commit()
        try:
            yield
        finally:
            self._write_frozen(lambda span: frozen[span.name][self._inside(span)])
            for span, values in trained.items():
                self._trained.write(span.name, span.start, values)
            self._trained.commit()

    def _inside(self, span: Span) -> slice:
        start = self._held[span.name].start
        return slice(span.start - start, span.stop - start)

    def save(self, folder: Path, round: int, state: Callable[[], Store]) -> None:
        """
        Writes into a checkpoint what its adapter belongs to, where that is not the hub's state. Collective.

        Args:
            folder (`Path`):
                The checkpoint.
            round (`int`):
                The round that was loaded last.
            state (`Callable[[], Store]`):
                Opens its state.
        """
        before = self.team.together(state)

        def write(writer: BlockWriter) -> None:
            for span in blocks(self.owned()):
                reference = span.of(before)
                values = self._loaded_at(span) if span.name in self._loaded else reference
                writer.add(span, values, values != reference)

        dtypes = dict.fromkeys(self._shapes, torch.float32)
        write_folder(self.team, folder / FOLDER, {"round": round}, dtypes, write)
        if self._factors_before and self.team.first:
            save_file(self._factors_before, folder / FACTORS_FILE)

    def restore(self, folder: Path, round: int, state: Callable[[], Store]) -> None:
        """
        Takes `save` back, when the trainer has loaded the adapter of the checkpoint. Collective.

        Raises:
            `FileNotFoundError`: if the checkpoint was made without.
            `BlockFileError`, `DamagedFileError`: if it is damaged.
        """

        def read() -> None:
            held = Blocks(open_folder(folder / FOLDER, {"round": round}), self._shapes, state())
            for name, values in self._loaded.items():
                values.copy_(self._held[name].of(held))

        self.team.together(read)
        if self._mode == "fold":
            self._write_frozen(lambda span: self._loaded_at(span))
            self.refresh()
            return
        self._factors_before = self.team.together(lambda: load_file(folder / FACTORS_FILE))
        self._before = self._edits_of(self._factors_before)
        self.refresh()

    # ---- what is shared out ---------------------------------------------------------------------------------------

    def held(self) -> list[Span]:
        """What this rank holds, and so has to load."""
        return list(self._held.values())

    def owned(self) -> list[Span]:
        """What this rank publishes and merges for the job, none twice."""
        return share_of(self.held(), self.team) if self.replicated else self.held()

    def forget_moments(self) -> None:
        """Sets the optimizer's moments and their step count back to the start. Not collective."""
        self._trained.forget_moments()

    def rounded_off(self) -> Mapping[str, Tensor]:
        """What trained bf16 parameters cannot hold, by their name in the model."""
        return self._trained.rounded_off()

    def restore_rounded_off(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes `rounded_off` back from a checkpoint."""
        self._trained.restore_rounded_off(tensors)
        self.refresh()


Live = LiveWeights | LoraWeights
"""The weights of a model in training."""


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the base that are not trained, by stored name; those that modules trained whole started from."""
    plain = {plain_name(name): parameter for name, parameter in named(model).items() if not parameter.requires_grad}
    return {name: parameter for name, parameter in sorted(plain.items(), key=str) if name is not None}


def _aliases(inner: nn.Module) -> dict[str, str]:
    """Names of tied parameters, and the name each is held under."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        if plain is not None and first.setdefault(id(parameter), plain) != plain:
            aliases[plain] = first[id(parameter)]
    return aliases


def _change(edits: list[Edit], start: int, stop: int) -> Tensor:
    """ΔW of a tensor on a flat range."""
    total = torch.zeros(stop - start)
    for edit in edits:
        assert isinstance(edit, LowRank | Shift)  # whole modules are read elsewhere, all else is refused
        total += edit.delta(start, stop) if isinstance(edit, LowRank) else edit.values[start:stop]
    return total
