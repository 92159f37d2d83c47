"""`adapter_config.json`: what of it changes the forward pass, and whether that is understood here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ram_trl.problems import Problem

CONFIG_FILE = "adapter_config.json"
INITIAL_ADAPTER = "initial_adapter"
"""Folder inside an agent's folder with the adapter as it was before training, for inits that rewrite the base."""

# What an adapter does is told by these, and by its tensors.
UNDERSTOOD = frozenset(
    {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"}
    | {"target_modules", "target_parameters", "modules_to_save", "trainable_token_indices", "bias"}
    | {"init_lora_weights", "ensure_weight_tying", "peft_type"}
)
# These say which layers got tensors, how training went, or where things came from; the tensors are all that counts.
NO_MATTER = frozenset(
    {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
    | {"exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core", "runtime_config"}
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"}
)
KEEPS_BASE = ("gaussian", "orthogonal", "eva", "mica")
"""Inits that leave the base's weights alone, besides true and false."""
REWRITES_BASE = ("pissa", "olora", "corda", "lora_ga")
"""Inits that move part of the base into the adapter; names may go on, as in `pissa_niter_16`."""
QUANTIZED = re.compile(r"bnb|[48][-_]?bits?\b|\bint[48]\b|\bfp[48]\b|awq|gptq|gguf|hqq|nf4|quantized", re.IGNORECASE)


@dataclass(frozen=True)
class AdapterSettings:
    """
    The settings of a LoRA adapter.

    Args:
        values (`Mapping[str, Any]`):
            What `adapter_config.json` holds, or `LoraConfig.to_dict()`.
    """

    values: Mapping[str, Any]

    def rank(self, layer: str) -> Any:
        """r of a layer (a module, or a parameter that is adapted itself) by `rank_pattern`."""
        return _by_pattern(self.values.get("rank_pattern"), layer, self.values.get("r", 8))

    def scale(self, layer: str, rank: int) -> float:
        """The factor on B·A."""
        alpha = _by_pattern(self.values.get("alpha_pattern"), layer, self.values.get("lora_alpha", 8))
        return float(alpha) / (math.sqrt(rank) if self.values.get("use_rslora") else rank)

    @property
    def rewrites_base(self) -> bool:
        """Whether the adapter's init moved part of the base into it."""
        return str(self.values.get("init_lora_weights", True)).lower().startswith(REWRITES_BASE)

    @property
    def ties(self) -> bool:
        """Whether what is trained on the input embeddings goes for the output embeddings tied to them."""
        return bool(self.values.get("ensure_weight_tying"))

    @property
    def flipped(self) -> bool:
        """Whether adapted layers are stored as (in, out)."""
        return bool(self.values.get("fan_in_fan_out"))

    def targets(self, parameter: str) -> bool:
        """Whether a parameter is one of `target_parameters`."""
        wanted = self.values.get("target_parameters") or []
        return any(parameter == one or parameter.endswith(f".{one}") for one in wanted)

    def tokens(self, module: str) -> list[int] | None:
        """Rows of a module that are trained one by one."""
        given = self.values.get("trainable_token_indices")
        if isinstance(given, Mapping):
            return next((list(rows) for name, rows in given.items() if _is_or_ends_with(module, name)), None)
        return list(given) if given else None

    @property
    def trained_on(self) -> str:
        """Name or path of the base it was trained on; empty if not told."""
        return str(self.values.get("base_model_name_or_path") or "")


def read_settings(folder: Path, where: str) -> tuple[AdapterSettings | None, list[Problem]]:
    """The settings of an adapter folder, and all problems with them."""
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, [Problem(where, f"{path} is missing; give a folder made by save_pretrained of a PEFT model")]
    except (OSError, ValueError, RecursionError) as error:
        return None, [Problem(where, f"{path} cannot be read as JSON: {error}")]
    if not isinstance(values, dict):
        return None, [Problem(where, f"{path} holds {type(values).__name__}, expected a JSON object")]
    settings = AdapterSettings(values)
    return settings, check_settings(settings, where, (folder / INITIAL_ADAPTER).is_dir())


def check_settings(settings: AdapterSettings, where: str, has_initial: bool) -> list[Problem]:
    """What an adapter's settings ask for that is not understood."""
    values = settings.values
    kind = str(getattr(values.get("peft_type"), "value", values.get("peft_type")))
    if kind != "LORA":
        what = f"it is an adapter of type {kind}, expected LORA; merge it into its base with peft (merge_and_unload)"
        return [Problem(where, what)]
    problems = _check_forms(values, where)
    told = {key: values[key] for key in sorted(values.keys() - UNDERSTOOD - NO_MATTER)}
    told = {key: value for key, value in told.items() if value not in (None, False, {}, [])}
    defaults = _defaults() if told else {}
    for key, value in told.items():
        if value != defaults.get(key):
            what = (
                f"{CONFIG_FILE} sets {key} to {value!r}, which changes what the adapter computes and is not "
                "understood here; merge it into its base with peft (merge_and_unload), then merge the model"
            )
            problems.append(Problem(where, what))
    init = values.get("init_lora_weights", True)
    known = isinstance(init, bool) or init is None or str(init).lower() in KEEPS_BASE
    if not known and not (settings.rewrites_base and has_initial):
        what = f"init_lora_weights is '{init}': "
        if settings.rewrites_base:
            what += (
                "training started by moving part of the base into the adapter, so it does not fit the base; put the "
                f"adapter as it was before training into the subfolder '{INITIAL_ADAPTER}' (save_pretrained right "
                "after get_peft_model), or save it converted (save_pretrained with "
                "path_initial_model_for_weight_conversion)"
            )
        else:
            what += "it rewrites the base in a way that cannot be undone; merge it with peft (merge_and_unload)"
        problems.append(Problem(where, what))
    return problems


def _check_forms(values: Mapping[str, Any], where: str) -> list[Problem]:
    """Settings that are not of the form peft writes."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    def are_patterns(value: Any, fit: Callable[[Any], bool]) -> bool:
        return isinstance(value, dict) and all(_is_pattern(key) and fit(one) for key, one in value.items())

    def are_rows(value: Any) -> bool:
        return isinstance(value, list) and all(type(row) is int for row in value)

    def are_names(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(name, str) for name in value)

    forms: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "r": ("a whole number, at least 1", lambda v: type(v) is int and v >= 1),
        "lora_alpha": ("a number", is_number),
        "rank_pattern": ("whole numbers by pattern", lambda v: are_patterns(v, lambda one: type(one) is int)),
        "alpha_pattern": ("numbers by pattern", lambda v: are_patterns(v, is_number)),
        "target_parameters": ("a list of names", are_names),
        "modules_to_save": ("a list of names", are_names),
        "trainable_token_indices": (
            "a list of rows, or such lists by module",
            lambda v: are_rows(v) or (isinstance(v, dict) and all(are_rows(rows) for rows in v.values())),
        ),
    }
    return [
        Problem(where, f"{CONFIG_FILE} sets {key} to {values[key]!r}, expected {what}")
        for key, (what, fits) in forms.items()
        if values.get(key) is not None and not fits(_listed(values[key]))
    ]


def _listed(value: Any) -> Any:
    """Sets, which a config in memory may hold, as lists."""
    return sorted(value) if isinstance(value, set) else value


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _defaults() -> dict[str, Any]:
    from peft import LoraConfig

    return dict(LoraConfig().to_dict())


def _by_pattern(patterns: Mapping[str, Any] | None, layer: str, otherwise: Any) -> Any:
    # The first pattern that fits wins, as in peft.
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise


def _is_or_ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
