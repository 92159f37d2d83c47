"""
DeepSpeed ZeRO-3: every parameter is cut into as many equal pieces as there are ranks, the last ones padded.

A rank keeps its piece twice: as a working copy (`ds_tensor`, 16 bits under bf16) and as an fp32 master, in a flat
buffer per sub-group of the optimizer. Small parameters are *persistent*: whole on every rank between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ram_trl.team import Team
from ram_trl.weights.live.layout import Layout, Part, refuse, require, set_back


class Zero3(Layout):
    """ZeRO-3, also with optimizer and parameters offloaded to the CPU."""

    title = "DeepSpeed ZeRO-3"
    replicated = False

    def __init__(self, parameters: Mapping[str, Any], engine: Any, team: Team) -> None:
        needed = (
            "grad_position", "get_param_id", "fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat",
            "fp16_groups", "_reassign_or_swap_out_partitioned_parameters", "checkpoint_event_prologue",
            "checkpoint_event_epilogue", "optimizer", "zero_hpz_partition_size", "swap_optimizer",
            "params_in_nvme_and_cpu", "partial_offload",
        )  # fmt: skip
        require(engine, needed, self.title)
        for parameter in parameters.values():
            require(parameter, ("ds_tensor", "ds_numel", "ds_shape", "ds_process_group"), self.title)
        self._engine = engine
        self._parameters = parameters
        self._check(team)
        self.shapes = {name: tuple(p.ds_shape) for name, p in parameters.items()}
        self.dtypes = dict.fromkeys(parameters, torch.float32)
        parts = {name: self._part(p) for name, p in parameters.items()}
        self.parts = {name: part for name, part in parts.items() if part is not None}

    def _check(self, team: Team) -> None:
        engine, parameters = self._engine, self._parameters
        lost = [name for name, p in parameters.items() if engine.get_param_id(p) not in engine.grad_position]
        masters = {str(flat.dtype) for flat in engine.fp32_partitioned_groups_flat if flat is not None}
        refuse(
            self.title,
            {
                f"the optimizer does not step {', '.join(lost[:3])}": bool(lost),
                "fp16 was not shown to work (an overflow skips the step); train in bf16": any(
                    p.ds_tensor.dtype == torch.float16 for p in parameters.values()
                ),
                "weights or optimizer are offloaded to NVMe; offload them to the CPU": engine.swap_optimizer
                or engine.params_in_nvme_and_cpu
                or any(flat is None for flat in engine.fp16_partitioned_groups_flat),
                f"its masters are {', '.join(sorted(masters))}; switch bf16_master_weights_and_grads off": masters
                != {"torch.float32"},
                "hpZ keeps second copies (zero_hpz_partition_size); set it to 1": engine.zero_hpz_partition_size != 1,
                "weights are quantized (zero_quantized_weights); switch it off": any(
                    hasattr(p.ds_tensor, "ds_quant_scale")
                    or getattr(engine.parameter_offload, "zero_quantized_weights", False)
                    for p in parameters.values()
                ),
                "part of the optimizer is offloaded (offload_optimizer.ratio); set it to 1": engine.partial_offload
                != 1.0,
                "ZenFlow was not shown to work": bool(getattr(engine, "zenflow", False)),
                "parameters are split over a part of the ranks (MiCS, tensor, expert or sequence parallelism)": any(
                    dist.get_world_size(group=p.ds_process_group) != team.world for p in parameters.values()
                ),
            },
        )

    def _part(self, parameter: Any) -> Part | None:
        start, length = _range(parameter)
        if length <= 0:  # all padding
            return None
        group, offset, _ = self._engine.grad_position[self._engine.get_param_id(parameter)]
        flat = self._engine.fp32_partitioned_groups_flat

        def copies() -> list[Tensor]:
            here = [parameter.ds_tensor.data.view(-1)[:length]]
            if parameter.data.numel() == parameter.ds_numel:  # persistent
                here.append(parameter.data.view(-1)[start : start + length])
            return here

        return Part(start, length, lambda: flat[group].data[offset : offset + length], copies)

    def commit(self) -> None:
        # The prologue frees the whole copies of persistent parameters, the epilogue makes them anew.
        self._engine.checkpoint_event_prologue()
        for group in range(len(self._engine.fp16_groups)):
            self._engine._reassign_or_swap_out_partitioned_parameters(group)
        self._engine.checkpoint_event_epilogue()

    def forget_moments(self) -> None:
        set_back(self._engine.optimizer.state)


class Zero3Frozen(Layout):
    """A model under ZeRO-3 without an optimizer: the pieces are all there is."""

    title = "DeepSpeed ZeRO-3 without an optimizer"
    replicated = False

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        for parameter in parameters.values():
            require(parameter, ("ds_tensor", "ds_numel", "ds_shape", "ds_process_group", "ds_persist"), self.title)
        self._persistent = [parameter for parameter in parameters.values() if parameter.ds_persist]
        self.shapes = {name: tuple(p.ds_shape) for name, p in parameters.items()}
        self.dtypes = {name: p.ds_tensor.dtype for name, p in parameters.items()}
        self.parts = {name: _frozen(p) for name, p in parameters.items() if _range(p)[1] > 0}

    def commit(self) -> None:
        if self._persistent:
            self._persistent[0].partition(self._persistent)  # frees the whole copies, for the next line to make anew
            self._persistent[0].all_gather(self._persistent)

    def forget_moments(self) -> None:
        """It has none."""


def _range(parameter: Any) -> tuple[int, int]:
    """Where this rank's piece starts, and how many of its entries are not padding."""
    size = parameter.ds_tensor.ds_numel
    start = dist.get_rank(group=parameter.ds_process_group) * size
    return start, min(size, parameter.ds_numel - start)


def _frozen(parameter: Any) -> Part:
    start, length = _range(parameter)
    return Part(start, length, lambda: parameter.ds_tensor.data.view(-1)[:length])
