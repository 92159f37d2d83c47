"""Which adapters in training were shown to work: all others are refused by name."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch

from ram_trl.weights.adapter_settings import AdapterSettings, check_settings
from ram_trl.weights.adapter_tensors import plain_name
from ram_trl.weights.live.layout import LayoutError, named

Mode = Literal["fold", "svd"]


def checked(model: Any, agent: str, mode: Mode) -> tuple[str, AdapterSettings]:
    """The adapter that is trained, and its settings; refuses what was not shown to work."""
    active = list(model.active_adapters)
    settings = AdapterSettings(model.peft_config[active[0]].to_dict())
    values = settings.values
    reasons = [str(problem) for problem in check_settings(settings, f"agent '{agent}'", False)]
    trained = [name for name, parameter in named(model).items() if parameter.requires_grad]
    foreign = [name for name in trained if ".lora_" in name and f".{active[0]}" not in name]
    dtypes = {parameter.dtype for name, parameter in named(model).items() if plain_name(name)}
    kinds = {type(module).__name__ for module in model.modules()}
    halves = {re.sub(r"lora_(embedding_)?[AB]", "", n) for n in trained if re.search(r"lora_(embedding_)?A", n)}
    others = {re.sub(r"lora_(embedding_)?[AB]", "", n) for n in trained if re.search(r"lora_(embedding_)?B", n)}
    others = {name for name in others if not name.endswith(".bias")}
    refused = {
        'one of the two factors of a layer is frozen (init_lora_weights="mica")': halves != others,
        f"several adapters are active or trained ({', '.join(active)}); train one": len(active) > 1 or bool(foreign),
        'init_lora_weights="orthogonal", with which the agent starts near the base but not from it': (
            values.get("init_lora_weights") == "orthogonal"
        ),
        "use_dora": bool(values.get("use_dora")),
        "trainable_token_indices": bool(values.get("trainable_token_indices")),
        "target_parameters (fused experts)": bool(values.get("target_parameters")),
        'lora_bias with lora="svd"; use lora="fold"': bool(values.get("lora_bias")) and mode == "svd",
        'ensure_weight_tying with lora="svd"; use lora="fold"': settings.ties and mode == "svd",
        "a reference adapter beside modules_to_save; hand peft_config to the trainer in place of a PEFT model": (
            "ref" in model.peft_config and bool(values.get("modules_to_save"))
        ),
        "a quantized base; load it unquantized": getattr(model, "is_quantized", False)
        or bool(dtypes - {torch.float32, torch.bfloat16}),
        "FSDP": any("FSDP" in kind or kind == "FullyShardedDataParallel" for kind in kinds),
    }
    reasons += [
        f"agent '{agent}': adapters in training were not shown to work with {w}" for w, h in refused.items() if h
    ]
    refuse(agent, reasons)
    return active[0], settings


def refuse(agent: str, reasons: list[str]) -> None:
    if reasons:
        raise LayoutError(f"agent '{agent}' cannot be merged while it trains:\n  " + "\n  ".join(reasons))
