"""
Base and agents as folders, opened and compared: from headers, small side files and buffers alone.

Nothing raises for what is wrong with a folder: problems are collected, so that a user hears of everything at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ram_trl.config import MergeConfig
from ram_trl.engine.counting import CHUNK, find_non_finite
from ram_trl.problems import Problem, agent_place
from ram_trl.progress import bar
from ram_trl.weights import MERGEABLE, Span, cut, entries, mergeable, whole
from ram_trl.weights.adapter import Adapter, OpenedAdapter, is_adapter, open_adapter
from ram_trl.weights.checkpoint import Checkpoint, Opened, open_checkpoint
from ram_trl.weights.preflight import check_layout, check_names

# Keys of config.json that may differ between a base and what was trained from it.
INCIDENTAL_KEYS = frozenset(
    {"_name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id"}
    | {"pad_token_id", "tie_word_embeddings", "quantization_config", "_attn_implementation_autoset", "architectures"}
    | {"model_type"}
)

PARAMETERS = ("weight", "bias")
"""How names of trained parameters end, as against buffers."""


@dataclass(frozen=True)
class Inputs:
    """
    Base and agents.

    Args:
        base (`Checkpoint`):
            The checkpoint the agents started from.
        agents (`dict[str, Checkpoint | Adapter]`):
            By name, sorted.
        warnings (`list[str]`):
            What does not keep them from being merged, but should be known.
    """

    base: Checkpoint
    agents: dict[str, Checkpoint | Adapter]
    warnings: list[str]

    def without(self, names: frozenset[str]) -> Inputs:
        """The same with fewer tensors."""
        agents = {name: store.without(names) for name, store in self.agents.items()}
        return Inputs(self.base.without(names), agents, self.warnings)


def open_inputs(base: Path, agents: Mapping[str, Path], config: MergeConfig) -> tuple[Inputs, list[Problem]]:
    """
    Opens base and agents and compares them.

    Args:
        base (`Path`), agents (`Mapping[str, Path]`):
            The folders.
        config (`MergeConfig`):
            The knobs; weights in it have to be for agents that are there.

    Returns:
        `tuple[Inputs, list[Problem]]`: they can be merged if there are no problems.
    """
    problems = check_names(agents, config)
    problems += [Problem("base", f"{link} is a link to nothing; restore it or remove it") for link in _dead(base)]
    opened_base = open_checkpoint(base, "base")
    opened = {name: _open_agent(agents[name], opened_base.store, agent_place(name)) for name in sorted(agents)}
    warnings = opened_base.warnings + _dtype_warnings(opened_base.store)
    problems += opened_base.problems
    for name, agent in opened.items():
        where = agent_place(name)
        problems += agent.problems
        warnings += agent.warnings
        if not agent.store.names() or not opened_base.store.names():
            continue  # already reported as unreadable
        problems += _check_architecture(opened_base.store.config, agent.store.config, where)
        unreadable = agent.unreadable | opened_base.unreadable
        problems += check_layout(opened_base.store, agent.store, where, unreadable)
        warnings += _config_warnings(opened_base.store.config, agent.store.config, where)
        warnings += _vocabulary_warnings(base, agents[name], where)
    stores = {name: agent.store for name, agent in opened.items()}
    return Inputs(opened_base.store, stores, warnings), problems


def _open_agent(folder: Path, base: Checkpoint, where: str) -> Opened | OpenedAdapter:
    return open_adapter(folder, base, where) if is_adapter(folder) else open_checkpoint(folder, where)


def check_precision(inputs: Inputs, config: MergeConfig) -> list[Problem]:
    """
    A problem if one agent is stored wider than another.

    Whether an entry counts as changed depends on the precision it is read in: fp32 shows nearly every entry of an
    update, 16 bits show those that exceed half a unit in the last place. Between agents that must not differ. It may
    differ from the base's: TRL trains a bf16 base in fp32, for all agents alike. Under `ulp` all are compared in 16
    bits, whatever they are stored in.
    """
    if config.ulp:
        return []
    held = {
        agent: {n: store.dtype(n) for n in store.names() if store.dtype(n) in MERGEABLE}
        for agent, store in inputs.agents.items()
    }
    common = set.intersection(*(set(dtypes) for dtypes in held.values())) if held else set()
    mixed = sorted(name for name in common if len({dtypes[name] for dtypes in held.values()}) > 1)
    if not mixed:
        return []
    told = ", ".join(f"agent '{agent}' has it in {_plain(dtypes[mixed[0]])}" for agent, dtypes in held.items())
    what = (
        f"agents are stored in different precision: {len(mixed)} tensors, the first '{mixed[0]}' ({told}), so what "
        "counts as changed would differ by agent; save them alike, or use the `ulp` criterion (--ulp), or allow it "
        "(--allow-mixed-dtypes, `allow_mixed_dtypes=True`)"
    )
    return [Problem("config", what, mixed[0])]


def check_finite(inputs: Inputs) -> list[Problem]:
    """Problems of all tensors with NaN or Inf, but for buffers that are the same everywhere; reads all weights."""
    places = {"base": inputs.base} | {agent_place(name): store for name, store in inputs.agents.items()}
    spans = {place: whole(store) for place, store in places.items()}
    problems = []
    with bar("looking for NaN", sum(len(span) for held in spans.values() for span in held)) as advance:
        for place, store in places.items():
            problems += find_non_finite(place, store, spans[place])
            advance(sum(map(len, spans[place])))
    kept = infinite_buffers(inputs, problems)
    return [problem for problem in problems if problem.tensor not in kept]


def infinite_buffers(inputs: Inputs, problems: list[Problem]) -> frozenset[str]:
    """
    Of the tensors that hold NaN or Inf, the buffers that are the same in base and agents, such as a mask of -inf.

    Args:
        inputs (`Inputs`):
            Base and agents.
        problems (`list[Problem]`):
            What was found to be not finite.
    """
    names = {problem.tensor for problem in problems if problem.kind == "not finite" and problem.tensor is not None}
    return frozenset(
        name
        for name in names
        if not name.endswith(PARAMETERS) and all(_same(inputs.base, store, name) for store in inputs.agents.values())
    )


def _same(base: Checkpoint, agent: Checkpoint | Adapter, name: str) -> bool:
    """Whether a tensor has the same values, bit for bit in fp32: an agent may be stored wider than its base."""
    if name not in base.names() or name not in agent.names() or base.shape(name) != agent.shape(name):
        return False
    return all(
        torch.equal(span.of(base).view(torch.int32), span.of(agent).view(torch.int32))
        for span in cut([Span(name, 0, entries(base, name))], CHUNK)
    )


def _check_architecture(base: Mapping[str, Any], agent: Mapping[str, Any], where: str) -> list[Problem]:
    problems = []
    for key in ("model_type", "architectures"):
        # null says nothing, as a missing key does.
        if base.get(key) is not None and agent.get(key) is not None and base[key] != agent[key]:
            what = (
                f"{key} is {_told(agent[key])}, the base's is {_told(base[key])}; only one architecture can be merged"
            )
            problems.append(Problem(where, what))
    return problems


def _config_warnings(base: Mapping[str, Any], agent: Mapping[str, Any], where: str) -> list[str]:
    keys = (base.keys() & agent.keys()) - INCIDENTAL_KEYS
    differing = [
        f"{key} {_told(agent[key])} (base: {_told(base[key])})" for key in sorted(keys) if base[key] != agent[key]
    ]
    if not differing:
        return []
    return [f"{where}: config.json differs from the base's: {'; '.join(differing)}; the generalist has the base's"]


def _dtype_warnings(base: Checkpoint) -> list[str]:
    said = base.config.get("dtype", base.config.get("torch_dtype"))
    held = {_plain(base.dtype(name)) for name in mergeable(base)}
    if not isinstance(said, str) or not held or said in held:
        return []
    return [
        f"base: config.json says {said}, but the weights are in {', '.join(sorted(held))}; the generalist is stored "
        "as the weights are, and from_pretrained may load it otherwise"
    ]


def _vocabulary_warnings(base: Path, agent: Path, where: str) -> list[str]:
    ours, theirs = base / "tokenizer.json", agent / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file() or ours.read_bytes() == theirs.read_bytes():
        return []
    tokens, others = _tokens(ours), _tokens(theirs)
    if tokens is None or others is None or tokens == others:
        return []
    example = sorted(tokens.items() ^ others.items(), key=str)[0][0]
    return [
        f"{where}: tokenizer.json holds {len(others)} tokens, the base's {len(tokens)}, and they differ, in "
        f"'{example}' among others; the generalist has the base's"
    ]


def _tokens(path: Path) -> dict[str, int] | None:
    """Numbers by token; `None` if the file is not of a form we know."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = held["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram models list pairs of token and score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return dict(vocabulary) | {token["content"]: token["id"] for token in held.get("added_tokens") or []}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _dead(folder: Path) -> list[Path]:
    """Links in a folder that lead nowhere, as a pruned cache leaves them."""
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if path.is_symlink() and not path.exists()]


def _told(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
