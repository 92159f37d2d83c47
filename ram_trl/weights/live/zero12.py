"""
DeepSpeed ZeRO-1 and ZeRO-2: whole working parameters on every rank, fp32 masters cut up.

Per group of the optimizer, DeepSpeed lays the parameters one after another into a flat buffer and gives every rank an
equal piece of it: a rank holds one range of the parameters at the edges of its piece, all of those within, and nothing
of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ram_trl.team import Team
from ram_trl.weights.live.layout import Layout, Part, refuse, require, set_back


class Zero12(Layout):
    """ZeRO-1, ZeRO-2 (`DeepSpeedZeroOptimizer`), and ZeRO-1 with gradients summed in fp32 (`BF16_Optimizer`)."""

    replicated = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], engine: Any, team: Team) -> None:
        self.title = f"DeepSpeed ZeRO-1/2 ({type(engine).__name__})"
        self._engine = engine
        self._flat = "bf16_groups_flat" if hasattr(engine, "bf16_groups") else "bit16_groups_flat"
        self._masters = (
            "fp32_groups_flat_partition" if hasattr(engine, "bf16_groups") else "single_partition_of_fp32_groups"
        )
        groups = (
            ("bf16_groups",)
            if hasattr(engine, "bf16_groups")
            else ("round_robin_bit16_groups", "round_robin_bit16_offsets")
        )
        needed = (*groups, self._flat, self._masters, "real_dp_process_group", "update_lp_params", "optimizer")
        require(engine, needed, self.title)
        masters: list[Tensor] = getattr(engine, self._masters)
        names = {id(parameter): name for name, parameter in parameters.items()}
        stepped = {id(p) for group in getattr(engine, groups[0]) for p in group}
        lost = [name for name, p in parameters.items() if id(p) not in stepped]
        dtypes = {str(master.dtype) for master in masters} - {"torch.float32"}
        refuse(
            self.title,
            {
                f"the optimizer does not step {', '.join(lost[:3])}": bool(lost),
                "fp16 was not shown to work (an overflow skips the step); train in bf16": any(
                    p.dtype == torch.float16 for p in parameters.values()
                ),
                f"its masters are {', '.join(sorted(dtypes))}; switch bf16_master_weights_and_grads off": bool(dtypes),
                "ZenFlow was not shown to work": bool(getattr(engine, "zenflow", False)),
                "experts or sequences are split over ranks (MoE, tensor or sequence parallelism)": any(
                    dist.get_world_size(group=group) != team.world for group in engine.real_dp_process_group
                ),
            },
        )
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.dtypes = dict.fromkeys(parameters, torch.float32)
        self.parts = {
            names[id(parameter)]: self._part(group, parameter, start, length, at)
            for group, parameter, start, length, at in self._pieces()
            if id(parameter) in names  # and not PPO's value model
        }

    def _pieces(self) -> Iterator[tuple[int, nn.Parameter, int, int, int]]:
        """Group, parameter, start and length of what this rank holds of it, and where that begins in its master."""
        # With round_robin_gradients DeepSpeed links parameters to the wrong masters (_hp_mapping); these are right.
        for g, parameters, offsets in self._laid_out():
            group = self._engine.real_dp_process_group[g]
            size = getattr(self._engine, self._flat)[g].numel() // dist.get_world_size(group=group)
            low = dist.get_rank(group=group) * size
            for parameter, offset in zip(parameters, offsets, strict=True):
                start, stop = max(low, offset), min(low + size, offset + parameter.numel())
                if start < stop:
                    yield g, parameter, start - offset, stop - start, start - low

    def _part(self, group: int, parameter: nn.Parameter, start: int, length: int, at: int) -> Part:
        return Part(
            start,
            length,
            lambda: getattr(self._engine, self._masters)[group].data[at : at + length],
            lambda: [parameter.data.view(-1)[start : start + length]],
        )

    def _laid_out(self) -> Iterator[tuple[int, list[nn.Parameter], list[int]]]:
        if hasattr(self._engine, "bf16_groups"):
            for g, parameters in enumerate(self._engine.bf16_groups):
                yield g, parameters, list(accumulate((p.numel() for p in parameters), initial=0))[:-1]
        else:
            groups, offsets = self._engine.round_robin_bit16_groups, self._engine.round_robin_bit16_offsets
            for g, (parameters, starts) in enumerate(zip(groups, offsets, strict=True)):
                yield g, list(parameters), list(starts)

    def commit(self) -> None:
        self._engine.update_lp_params()

    def forget_moments(self) -> None:
        set_back(self._engine.optimizer.state)
