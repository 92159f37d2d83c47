"""FSDP2 (`fully_shard`): every parameter is a DTensor, cut along its first dimension; the shard is the master."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ram_trl.team import Team
from ram_trl.weights.live.layout import Layout, Part, refuse


class Fsdp2(Layout):
    """FSDP2 over all ranks of the job, with fp32 shards."""

    title = "FSDP2"
    replicated = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        team: Team,
    ) -> None:
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._optimizer = optimizer
        whole = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
        spread = [p for p in parameters.values() if isinstance(p, DTensor)]
        dtypes = {str(p.dtype) for p in spread} - {"torch.float32"}
        refuse(
            self.title,
            {
                f"{', '.join(whole[:3])} are not sharded": bool(whole),
                "parameters are split otherwise than by rows over all ranks (tensor parallelism, HSDP)": any(
                    p.placements != (Shard(0),) or p.device_mesh.size() != team.world for p in spread
                ),
                f"its shards are {', '.join(sorted(dtypes))}; load the model in float32, train with bf16=True": bool(
                    dtypes
                ),
                "it offloads parameters to the CPU, which was not shown to work": any(map(_offloads, self._sharded)),
            },
        )
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.dtypes = {name: p.dtype for name, p in parameters.items()}
        parts = {name: _part(p) for name, p in parameters.items()}
        self.parts = {name: part for name, part in parts.items() if part is not None}

    def commit(self) -> None:
        for module in self._sharded:
            module.reshard()  # forward passes gather anew

    def forget_moments(self) -> None:
        if self._optimizer is not None:
            self._optimizer.state.clear()


def _part(parameter: Any) -> Part | None:
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if prod(shape) == 0:  # fewer rows than ranks
        return None
    start = (offset[0] if offset else 0) * prod(parameter.shape[1:])
    return Part(start, prod(shape), lambda: parameter._local_tensor.detach().view(-1))


def _offloads(module: FSDPModule) -> bool:
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and type(group.offload_policy).__name__ == "CPUOffloadPolicy"
