"""Weights that every rank holds whole: one process, DistributedDataParallel, DeepSpeed without ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ram_trl.weights.live.layout import Layout, LayoutError, Part, refuse, require, set_back


class Plain(Layout):
    """One process or DDP, or DeepSpeed stage 0 in fp32: the optimizer steps the parameters themselves."""

    title = "unsharded training"
    replicated = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        _check_plain(parameters)
        self._optimizer = optimizer
        if optimizer is not None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if stepped and not any(id(p) in stepped for p in parameters.values()):
                raise LayoutError(
                    f"the optimizer ({type(optimizer).__name__}) steps none of the model's parameters, so it keeps "
                    "copies of them somewhere; use ram_trl.attach(trainer, …), which finds them"
                )
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self.parts = {name: _alone(p) for name, p in parameters.items()}

    def commit(self) -> None:
        """Nothing to do: what was written is what is read."""

    def forget_moments(self) -> None:
        if self._optimizer is not None:
            self._optimizer.state.clear()  # made anew at the next step, whatever the optimizer


class Stage0(Layout):
    """DeepSpeed stage 0 in bf16: fp32 masters beside bf16 parameters, both whole on every rank."""

    title = "DeepSpeed stage 0 (FP16_UnfusedOptimizer)"
    replicated = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], engine: Any) -> None:
        require(engine, ("fp16_groups", "fp32_groups", "optimizer"), self.title)
        pairs = {
            id(low): (low, high)
            for lows, highs in zip(engine.fp16_groups, engine.fp32_groups, strict=True)
            for low, high in zip(lows, highs, strict=True)
        }
        lost = [name for name, p in parameters.items() if id(p) not in pairs]
        masters = {high.dtype for _, high in pairs.values()}
        refuse(
            self.title,
            {
                f"the optimizer does not step {', '.join(lost[:3])}": bool(lost),
                "fp16 was not shown to work (an overflow skips the step); train in bf16": any(
                    low.dtype == torch.float16 for low, _ in pairs.values()
                ),
                f"its masters are {masters}, not float32": masters != {torch.float32},
            },
        )
        self._engine = engine
        self._pairs = [pairs[id(p)] for p in parameters.values()]
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.dtypes = dict.fromkeys(parameters, torch.float32)
        self.parts = {name: _pair(*pairs[id(p)]) for name, p in parameters.items()}

    def commit(self) -> None:
        for low, high in self._pairs:
            low.data.copy_(high.data)

    def forget_moments(self) -> None:
        set_back(self._engine.optimizer.state)


def _alone(parameter: Tensor) -> Part:
    return Part(0, parameter.numel(), lambda: parameter.data.view(-1))


def _pair(low: Tensor, high: Tensor) -> Part:
    return Part(0, low.numel(), lambda: high.data.view(-1), lambda: [low.data.view(-1)])


def _check_plain(parameters: Mapping[str, nn.Parameter]) -> None:
    reasons = {}
    for name, parameter in parameters.items():
        if hasattr(parameter, "ds_id"):
            reasons["DeepSpeed ZeRO-3 parameters without their optimizer"] = name
        elif hasattr(parameter, "_hp_mapping"):
            reasons["DeepSpeed ZeRO parameters without their optimizer: use ram_trl.attach(trainer, …)"] = name
        elif type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
            reasons["DTensor parameters that FSDP2 did not make (tensor parallelism)"] = name
        elif getattr(parameter, "_is_flat_param", False) or type(parameter).__name__ == "FlatParameter":
            reasons["FSDP1 flat parameters"] = name
        elif parameter.dtype not in (torch.float32, torch.bfloat16):
            reasons[f"{parameter.dtype} parameters"] = name
        elif parameter.numel() == 0:
            reasons["empty parameters"] = name
        elif not parameter.is_contiguous():
            reasons["non-contiguous parameters"] = name
    if reasons:
        told = ", ".join(f"{layout} (such as '{name}')" for layout, name in sorted(reasons.items()))
        raise LayoutError(
            f"this model cannot be merged while it trains: it has {told}. Supported: one process, DDP, DeepSpeed "
            "stage 0 to 3 and FSDP2, in fp32 (autocast is fine) or bf16"
        )
