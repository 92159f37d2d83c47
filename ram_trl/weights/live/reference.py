"""The reference model of a trainer (β > 0), which may follow the generalist."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ram_trl.team import Team
from ram_trl.weights import Span, Store, cut
from ram_trl.weights.live.fsdp2 import Fsdp2
from ram_trl.weights.live.layout import Layout, named
from ram_trl.weights.live.plain import Plain
from ram_trl.weights.live.zero3 import Zero3Frozen
from ram_trl.weights.sparse import BLOCK


class Reference:
    """
    A frozen model, overwritten by states of the hub.

    Args:
        model (`nn.Module`):
            The trainer's reference model, as it made it ready for its engine.
        team (`Team`):
            The ranks of the job.

    Raises:
        `LayoutError`: if the model is laid out in a way that was not shown to work.
    """

    def __init__(self, model: nn.Module, team: Team) -> None:
        self._team = team
        self._layout = team.together(lambda: frozen_layout(named(model), model, team))

    def load(self, opened: Callable[[], Store]) -> None:
        """
        Overwrites the tensors of a state, each rank its own ranges; others are left as they are. Collective.

        Args:
            opened (`Callable[[], Store]`):
                Opens the state.
        """

        def write() -> None:
            state = opened()
            names = set(state.names())
            held = [Span(name, p.start, p.stop) for name, p in self._layout.parts.items() if name in names]
            for span in cut(held, BLOCK):
                part = self._layout.parts[span.name]
                part.master()[span.start - part.start : span.stop - part.start].copy_(span.of(state))

        with torch.no_grad():
            self._team.together(write)
            self._layout.commit()


def frozen_layout(parameters: Mapping[str, nn.Parameter], model: nn.Module, team: Team) -> Layout:
    """
    How parameters that no optimizer steps are spread over the ranks.

    Raises:
        `LayoutError`: if that was not shown to work.
    """
    if parameters and all(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        return Zero3Frozen(parameters)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return Fsdp2(parameters, model, None, team)
    return Plain(parameters, None)
