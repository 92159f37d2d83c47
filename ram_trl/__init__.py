"""Continual merging of reinforcement-learned agents (RAM, arXiv 2601.13572)."""

from ram_trl.config import MergeConfig
from ram_trl.engine import merge_state_dicts
from ram_trl.offline import merge, probe
from ram_trl.problems import MergeInputError, Problem
from ram_trl.report import MergeReport

__all__ = ["MergeConfig", "MergeInputError", "MergeReport", "Problem", "merge", "merge_state_dicts", "probe"]
