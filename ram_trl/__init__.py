"""Continual merging of reinforcement-learned agents (RAM, arXiv 2601.13572)."""

from typing import TYPE_CHECKING, Any

from ram_trl.config import MergeConfig
from ram_trl.engine.merging import merge_state_dicts
from ram_trl.folders.offline import merge, probe
from ram_trl.problems import MergeInputError, Problem
from ram_trl.telling.report import MergeReport

if TYPE_CHECKING:
    from ram_trl.folders.adapters import merge_adapters
    from ram_trl.training.callback import RAMCallback, attach
    from ram_trl.training.turns import take_turns

__all__ = [
    "MergeConfig",
    "MergeInputError",
    "MergeReport",
    "Problem",
    "RAMCallback",
    "attach",
    "merge",
    "merge_adapters",
    "merge_state_dicts",
    "probe",
    "take_turns",
]


def __getattr__(name: str) -> Any:
    # These need transformers and accelerate, which take seconds to import; merging folders does not.
    if name in ("RAMCallback", "attach"):
        from ram_trl.training import callback

        return getattr(callback, name)
    if name == "merge_adapters":
        from ram_trl.folders.adapters import merge_adapters

        return merge_adapters
    if name == "take_turns":
        from ram_trl.training.turns import take_turns

        return take_turns
    raise AttributeError(f"module 'ram_trl' has no attribute '{name}'")
