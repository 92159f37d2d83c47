"""What every layout of a model in training tells: which entries this rank holds, and where they are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class LayoutError(ValueError):
    """The model is laid out in a way that cannot be merged while it trains; the message names the layout."""


@dataclass(frozen=True)
class Part:
    """
    The contiguous range of a parameter that this rank holds.

    Args:
        start (`int`):
            Flat index of its first entry.
        length (`int`):
            Number of entries, at least 1.
        master (`Callable[[], Tensor]`):
            A live 1-D view of the entries where the optimizer keeps them. Called anew for every use: engines move
            their buffers.
        copies (`Callable[[], list[Tensor]]`):
            Live 1-D views of the copies of these entries that forward passes read; empty if they read `master`.
    """

    start: int
    length: int
    master: Callable[[], Tensor]
    copies: Callable[[], list[Tensor]] = list

    @property
    def stop(self) -> int:
        """Flat index after the last entry."""
        return self.start + self.length


class Layout(ABC):
    """How an engine spreads the trainable parameters of a model over the ranks of a job."""

    title: str
    """How messages name it."""
    replicated: bool
    """Whether every rank holds everything."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every trainable parameter, whole."""
    dtypes: Mapping[str, torch.dtype]
    """The dtype the optimizer keeps every parameter in."""
    parts: Mapping[str, Part]
    """What this rank holds, by name; a parameter of which it holds nothing is not in it."""

    @abstractmethod
    def commit(self) -> None:
        """Makes the copies that forward passes read follow the masters. Collective."""

    @abstractmethod
    def forget_moments(self) -> None:
        """Sets the optimizer's moments and their step count back to the start. Not collective."""


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters, sorted, by the name `save_pretrained` gives them; tied ones once."""
    found = {}
    for name, parameter in model.named_parameters():
        plain = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
        found[".".join(plain).removeprefix("module.")] = parameter
    return dict(sorted(found.items()))


def require(owner: Any, attributes: Iterable[str], title: str) -> None:
    """
    Checks that an engine has the private attributes that its layout is read from.

    Raises:
        `LayoutError`: naming those that are missing.
    """
    missing = [name for name in attributes if not hasattr(owner, name)]
    if missing:
        import deepspeed

        raise LayoutError(
            f"{title}: {type(owner).__name__} of DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}; "
            "ram_trl reads the shards from there, as DeepSpeed 0.19.8 keeps them: install that version"
        )


def refuse(title: str, reasons: Mapping[str, bool]) -> None:
    """
    Refuses what was not shown to work.

    Raises:
        `LayoutError`: naming every reason that holds.
    """
    holding = [reason for reason, holds in reasons.items() if holds]
    if holding:
        raise LayoutError(f"{title} cannot be merged while it trains: {'; '.join(holding)}")


def set_back(state: Mapping[Any, dict[str, Any]]) -> None:
    """Zeroes every moment and step count in an optimizer's state, in place: the engine keeps views of them."""
    for moments in state.values():
        for name, value in moments.items():
            if isinstance(value, Tensor):
                value.zero_()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                moments[name] = 0
