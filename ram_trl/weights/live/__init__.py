"""
This rank's weights of a model in training, as a store that can be written to.

The only package that touches private attributes of trainers and of the engines under them. One file per layout; each
tells which range of every parameter this rank holds, and where its masters and working copies are. Parameters are
never gathered: a rank reads and writes its own ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ram_trl.team import Team
from ram_trl.weights import Span
from ram_trl.weights.live import trainers
from ram_trl.weights.live.fsdp2 import Fsdp2
from ram_trl.weights.live.layout import Layout, LayoutError, named
from ram_trl.weights.live.plain import Plain, Stage0
from ram_trl.weights.live.reference import Reference
from ram_trl.weights.live.zero3 import Zero3
from ram_trl.weights.live.zero12 import Zero12
from ram_trl.weights.sparse import BLOCK, blocks

__all__ = ["LayoutError", "LiveWeights", "Reference", "trainers"]


class LiveWeights:
    """
    The trainable parameters of a model, readable and writable by flat range, in float32.

    Where an engine keeps fp32 masters beside 16-bit working copies, the masters are read and written; `commit` then
    makes the copies follow. Parameters kept in bf16 alone cannot hold what a merge leaves with the agent. What bf16
    rounds off is kept apart, in fp32 on the CPU, and is part of every read, so that nothing is lost and rounding
    never looks like training.

    Making one is collective.

    Args:
        model (`nn.Module`):
            The model as a `TrainerCallback` gets it, or wrapped (DDP, `torch.compile`).
        team (`Team`):
            The ranks of the job.
        optimizer (`torch.optim.Optimizer`, *optional*):
            The optimizer as a `TrainerCallback` gets it; needed under DeepSpeed, whose optimizer holds the masters.
        adapters (`bool`, *optional*, defaults to `False`):
            Take the factors of adapters as parameters like others: for `LoraWeights`, which knows what they mean.

    Raises:
        `LayoutError`: if the layout was not shown to work, if the ranks' shards do not tile the parameters, or if
            masters and working copies differ by more than rounding.
    """

    aliases: Mapping[str, str]

    def __init__(self, model: nn.Module, team: Team, optimizer: Any = None, *, adapters: bool = False) -> None:
        self.aliases = {}
        self.team = team
        self._layout = team.together(lambda: _layout_of(model, optimizer, team, adapters))
        self._apart: dict[str, Tensor] = {
            name: torch.zeros(part.length)
            for name, part in self._layout.parts.items()
            if self._layout.dtypes[name] == torch.bfloat16
        }
        check_cover(self.title, self._layout.shapes, self.held(), self.replicated, team)
        team.together(self._check_copies)

    @property
    def title(self) -> str:
        """The name of the layout."""
        return self._layout.title

    @property
    def replicated(self) -> bool:
        """Whether every rank holds everything."""
        return self._layout.replicated

    def names(self) -> list[str]:
        return list(self._layout.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype the parameter is trained in: that of the masters."""
        return self._layout.dtypes[name]

    def stored(self, name: str, start: int, stop: int) -> Tensor:
        """Entries this rank holds as the optimizer keeps them, 1-D, in the dtype they are trained in; a view."""
        part = self._layout.parts[name]
        if not part.start <= start <= stop <= part.stop:
            raise IndexError(f"this rank holds entries {part.start}-{part.stop} of '{name}', not {start}-{stop}")
        return part.master().detach()[start - part.start : stop - part.start]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Entries this rank holds, in float32 on the CPU, with what bf16 cannot hold."""
        values = self.stored(name, start, stop).to("cpu", torch.float32, copy=True)
        return values + self._apart[name][start:stop] if name in self._apart else values

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrites masters from flat index `start` on with float32 `values`; call `commit` when all are written."""
        target = self.stored(name, start, start + len(values))
        target.copy_(values)
        if name in self._apart:
            self._apart[name][start : start + len(values)] = values - target.to("cpu", torch.float32)

    def commit(self) -> None:
        """Makes the working copies of every rank follow the masters. Collective; nothing may be read before it."""
        with torch.no_grad():
            self._layout.commit()

    def refresh(self) -> None:
        """Nothing to do: reads see the weights as they are."""

    @contextmanager
    def showing(self, source: Callable[[Span], Tensor]) -> Iterator[None]:
        """
        Within, the model computes with other weights; afterwards with its own again, to the bit. Collective.

        Needs memory for a float32 copy of what this rank holds, on the CPU.
        """
        kept = {span: self.read(span.name, span.start, span.stop) for span in blocks(self.held())}
        self._overwrite(source)
        try:
            yield
        finally:
            self._overwrite(lambda span: kept[span])

    def _overwrite(self, source: Callable[[Span], Tensor]) -> None:
        def write() -> None:
            for span in blocks(self.held()):
                self.write(span.name, span.start, source(span))

        self.team.together(write)
        self.commit()

    def forget_moments(self) -> None:
        """Sets the optimizer's moments and their step count back to the start. Not collective."""
        self._layout.forget_moments()

    def held(self) -> list[Span]:
        """What this rank holds, and so has to load."""
        return [Span(name, part.start, part.stop) for name, part in sorted(self._layout.parts.items())]

    def owned(self) -> list[Span]:
        """What this rank publishes and merges for the job, none twice: its shards, or its share of the blocks."""
        return share_of(self.held(), self.team) if self.replicated else self.held()

    def rounded_off(self) -> Mapping[str, Tensor]:
        """What bf16 parameters cannot hold, by name, float32; empty for fp32 masters. Goes into checkpoints."""
        return self._apart

    def restore_rounded_off(self, tensors: Mapping[str, Tensor]) -> None:
        """
        Takes `rounded_off` back from a checkpoint.

        Raises:
            `ValueError`: if names or sizes are not those of this model.
        """
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in self._apart.items()}
        if found != expected:
            raise ValueError(f"the residual of the checkpoint is for {found}, this model has {expected}")
        for name, tensor in tensors.items():
            self._apart[name].copy_(tensor)

    def _check_copies(self) -> None:
        for span in blocks(self.held()):
            part = self._layout.parts[span.name]
            inside = slice(span.start - part.start, span.stop - part.start)
            master = part.master()[inside]
            for copy in part.copies():
                differing = master.to(copy.device, copy.dtype) != copy[inside]
                if differing.any():
                    at = int(differing.int().argmax())
                    raise LayoutError(
                        f"{self.title}: entry {span.start + at} of '{span.name}' is {float(master[at])!r} in the fp32 "
                        f"masters and {float(copy[inside][at])!r} in the working copy, which is not its rounding; "
                        "something wrote one and not the other before training began"
                    )


def check_cover(
    title: str, shapes: Mapping[str, tuple[int, ...]], held: list[Span], replicated: bool, team: Team
) -> None:
    """
    Checks that what the ranks hold tiles every parameter. Collective.

    Raises:
        `LayoutError`: naming a parameter that is not covered.
    """
    everyone: list[list[Span]] = team.collect(held)
    for name, shape in shapes.items():
        entries = torch.Size(shape).numel()
        spans = [span for rank in everyone for span in rank if span.name == name]
        reached = 0
        for span in sorted(spans, key=lambda span: span.start) if not replicated else spans[:1]:
            if span.start != reached:
                break
            reached = span.stop
        if reached != entries or (replicated and len(set(spans)) != 1):
            told = ", ".join(f"{span.start}-{span.stop}" for span in spans)
            raise LayoutError(
                f"{title}: the ranks hold entries {told or 'nothing'} of '{name}', which has {entries}; "
                "together they have to hold each once. Is every trainable parameter in the optimizer?"
            )


def _layout_of(model: nn.Module, optimizer: Any, team: Team, adapters: bool) -> Layout:
    parameters = {name: parameter for name, parameter in named(model).items() if parameter.requires_grad}
    if not parameters:
        raise LayoutError("the model has no trainable parameter")
    factor = next((name for name in parameters if ".lora_" in name), None)
    if factor is not None and not adapters:
        raise LayoutError(
            f"this model has peft adapters (such as '{factor}') but is no PEFT model itself; adapters are merged in "
            "trainers that train a PeftModel (GRPO, RLOO, SFT)"
        )
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    optimizer = getattr(next(iter(parameters.values())), "_z3_optimizer", optimizer)  # ZeRO-3 tells by itself
    kind = type(optimizer).__name__
    if type(optimizer).__module__.startswith("deepspeed.runtime"):
        if kind == "DeepSpeedZeroOptimizer_Stage3":
            return Zero3(parameters, optimizer, team)
        if kind in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
            return Zero12(parameters, optimizer, team)
        if kind == "FP16_UnfusedOptimizer":
            return Stage0(parameters, optimizer)
        raise LayoutError(
            f"weights under DeepSpeed's {kind} cannot be merged while they train; use zero_optimization stage 1, 2 "
            "or 3 in bf16 or fp32"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return Fsdp2(parameters, model, optimizer, team)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise LayoutError("FSDP1 parameters cannot be merged while they train; set fsdp_version to 2")
    return Plain(parameters, optimizer)


def share_of(spans: list[Span], team: Team) -> list[Span]:
    """This rank's share of the blocks, where every rank holds everything."""
    number = sum(-(-len(span) // BLOCK) for span in spans)
    low, high = (rank * number // team.world for rank in (team.rank, team.rank + 1))
    owned, passed = [], 0
    for span in spans:
        here = -(-len(span) // BLOCK)
        start, stop = (min(max(edge - passed, 0), here) * BLOCK for edge in (low, high))
        if start < stop:
            owned.append(Span(span.name, start, min(stop, span.stop)))
        passed += here
    return owned
