"""What tensor names tell about how a checkpoint was saved, for hints when base and agent do not fit together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

WRAPPERS = {
    "_orig_mod.": "torch.compile; save the model it wraps (`model._orig_mod.save_pretrained`)",
    "base_model.model.": "an unmerged peft model; merge it into its base first (`merge_and_unload`, then "
    "`save_pretrained`)",
    ".base_layer": "an unmerged peft model; merge it into its base first (`merge_and_unload`, then `save_pretrained`)",
    "module.": "DistributedDataParallel or DeepSpeed; save the model it wraps (`model.module.save_pretrained`)",
    "policy.": "TRL's policy-and-value wrapper; save the policy alone (`model.policy.save_pretrained`)",
    "language_model.": "a vision-language model, where the other is its text model alone; merge models of one kind",
}
"""What is found in names, and what leaves it there."""

EXPERT = re.compile(
    r"(?P<layer>.*\.experts)\.(?:(?P<number>\d+)\.|(?P<fused>gate_up|gate|up|down|w[123]|fc[12])(?:_|\b))"
)


def hints(base: Collection[str], agent: Collection[str]) -> list[str]:
    """
    Sentences on why names of an agent are not the base's, if a known reason explains it.

    Args:
        base (`Collection[str]`), agent (`Collection[str]`):
            Names of their tensors.
    """
    missing, extra = set(base) - set(agent), set(agent) - set(base)
    told = []
    for text, cause in WRAPPERS.items():
        for theirs, ours, who in ((extra, missing, "the agent's"), (missing, extra, "the base's")):
            bare = {strip(name) for name in ours if text not in name}
            fitting = sum(strip(name) in bare for name in theirs if text in name)
            if fitting:
                told.append(f"{fitting} of {who} names would fit without '{text}', which comes from {cause}")
    stored = {side: _expert_kinds(names) for side, names in (("here", extra), ("in the base", missing))}
    if stored["here"] and stored["in the base"] and stored["here"] != stored["in the base"]:
        told.append(
            f"experts are stored {_and(stored['here'])} here, {_and(stored['in the base'])} in the base; open the "
            "agent with from_pretrained and save it with save_pretrained, by the version of transformers that saved "
            "the base"
        )
    return told


def strip(name: str) -> str:
    """A name without what wrappers add to it."""
    for text in WRAPPERS:
        name = name.replace(text, "")
    return name


def mixed_experts(names: Iterable[str]) -> list[str]:
    """Sentences on the layers of one checkpoint that hold experts both fused and one by one."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if found := EXPERT.match(name):
            kinds[found["layer"]].add("one by one" if found["number"] else "fused")
    return [
        f"'{layer}' is stored both fused and one by one; save the model again into an empty folder"
        for layer, found in sorted(kinds.items())
        if len(found) > 1
    ]


def _expert_kinds(names: Iterable[str]) -> set[str]:
    return {"one by one" if found["number"] else "fused" for name in names if (found := EXPERT.match(name))}


def _and(words: Iterable[str]) -> str:
    return " and ".join(sorted(words))
