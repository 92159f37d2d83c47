"""The account of a merge: what each agent changed, how agents overlap, what was applied, what to worry about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, field_serializer

from ram_trl.config import MergeConfig
from ram_trl.engine.plan import Counts, Plan, rho
from ram_trl.telling import advice, parts
from ram_trl.telling.advice import Advice
from ram_trl.weights import Store, mergeable


class Update(BaseModel):
    """
    What an agent changed in the model or in a part of it.

    Args:
        entries (`int`):
            Entries there, tied ones once.
        active, shared, unique (`int`):
            Entries its criterion counts as changed; of those, active in another agent too; active in it alone.
        density (`float`):
            active / entries.
        rho (`float`, *optional*):
            shared / unique, counted there; `None` without unique entries.
        lambda_ (`float`, *optional*):
            Rescale of its unique entries there (`ram` only); where several tensors have their own, the mean over
            unique entries.
        norm (`float`):
            L2 norm of its task vector.
        kept (`float`):
            Share of the squared norm that lies in active entries.
        largest (`float`):
            Largest |τ|.
    """

    entries: int
    active: int
    shared: int
    unique: int
    density: float
    rho: float | None
    lambda_: float | None = Field(validation_alias=AliasChoices("lambda", "lambda_"), serialization_alias="lambda")
    norm: float
    kept: float
    largest: float


class AgentReport(Update):
    """
    One agent in a merge: what it changed in the whole model, and how that was decided.

    Args:
        weight (`float`):
            Factor on its task vector.
        threshold (`float`, *optional*):
            |τ| above this is active; `None` for `ulp`.
        dtypes (`list[str]`):
            Dtypes its weights are stored in: where "changed" was decided.
    """

    weight: float
    threshold: float | None
    dtypes: list[str]


class PairReport(BaseModel):
    """
    Two agents in a merge.

    Args:
        agents (`tuple[str, str]`):
            Their names.
        both (`int`):
            Entries active in both.
        jaccard (`float`):
            both / active in either.
        jaccard_by_chance (`float`):
            What `jaccard` would be if the two masks were independent.
        sign_agreement (`float`, *optional*):
            Share of `both` where the task vectors have the same sign; `None` when nothing is shared.
    """

    agents: tuple[str, str]
    both: int
    jaccard: float
    jaccard_by_chance: float
    sign_agreement: float | None


class PartReport(BaseModel):
    """
    A part of the model: the tensors of one kind, or one layer.

    Args:
        entries (`int`):
            Entries there.
        agents (`dict[str, Update]`):
            What each agent changed there, by name, sorted.
        pairs (`list[PairReport]`):
            Every two agents; chance is that of masks that are independent within the part.
        touched, shared (`int`), sign_conflict (`float`, *optional*):
            As in [`MergeReport`], within the part.
    """

    entries: int
    agents: dict[str, Update]
    pairs: list[PairReport]
    touched: int
    shared: int
    sign_conflict: float | None


class MergeReport(BaseModel):
    """
    What a merge did, or would do.

    Args:
        config (`MergeConfig`):
            The knobs that were in force.
        criterion (`str`):
            The criterion in words.
        agents (`dict[str, AgentReport]`):
            By name, sorted.
        pairs (`list[PairReport]`):
            Every two agents.
        touched (`int`):
            Entries active in at least one agent; all others equal the base.
        shared (`int`):
            Entries active in at least two.
        sign_conflict (`float`, *optional*):
            Share of the shared entries where agents pull in opposite directions.
        base_dtypes (`list[str]`):
            Dtypes the base is stored in, and so the generalist.
        warnings (`list[str]`):
            Sentences about outcomes that are probably not wanted.
        kinds, layers (`dict[str, PartReport]`):
            The same by what tensors do (`attention q`, `mlp up`, `norms`, …) and by layer; tensors outside layers are
            in the kinds only. Empty in the reports of rounds.
        density_map (`dict[str, dict[str, list[float | None]]]`):
            By agent and kind, the density in each of `layers`, in order; `None` where a layer has no such tensor.
        advice (`Advice`, *optional*):
            What the criterion did, and which one to use; `None` in the reports of rounds.
        base (`Path`, *optional*), out (`Path`, *optional*):
            Folders, for merges of folders and exports of rounds.
        sources (`dict[str, str]`):
            By agent, the folder it was read from, or the publication of it that a round took.
    """

    config: MergeConfig
    criterion: str
    agents: dict[str, AgentReport]
    pairs: list[PairReport]
    touched: int
    shared: int
    sign_conflict: float | None
    base_dtypes: list[str]
    warnings: list[str]
    kinds: dict[str, PartReport] = Field(default_factory=dict)
    layers: dict[str, PartReport] = Field(default_factory=dict)
    density_map: dict[str, dict[str, list[float | None]]] = Field(default_factory=dict)
    advice: Advice | None = None
    base: Path | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    out: Path | None = None

    @field_serializer("config")
    def _knobs_in_force(self, config: MergeConfig) -> dict[str, Any]:
        return config.settled()

    def to_json(self) -> str:
        """The report as indented JSON, with λ under the key `lambda`."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


def make_report(base: Store, agents: Mapping[str, Store], plan: Plan, *, in_detail: bool = True) -> MergeReport:
    """
    The report of a merge, from its plan alone.

    Args:
        base (`Store`), agents (`Mapping[str, Store]`):
            Asked for dtypes only.
        plan (`Plan`):
            What was counted.
        in_detail (`bool`, *optional*, defaults to `True`):
            By kind and layer too, and with advice.

    Returns:
        `MergeReport`: without folders.
    """
    total = plan.total
    report = MergeReport(
        config=plan.config,
        criterion=plan.config.criterion,
        agents={name: _agent_report(agents[name], i, plan) for i, name in enumerate(plan.agents)},
        pairs=_pair_reports(total, plan),
        touched=total.touched,
        shared=total.touched_by_many,
        sign_conflict=_sign_conflict(total),
        base_dtypes=_dtypes(base),
        warnings=[],
    )
    found: dict[str, Any] = {"warnings": advice.warnings(report)}
    if in_detail:
        found |= _by_part(plan) | {"advice": advice.advise(report)}
    return report.model_copy(update=found)


def _by_part(plan: Plan) -> dict[str, Any]:
    """The fields of a report that tell of kinds and layers."""
    kind_of, layer_of = parts.kinds(plan.counts), parts.layers(plan.counts)
    kinds, layers, cells = defaultdict(list), defaultdict(list), defaultdict(list)
    for name, kind in kind_of.items():
        kinds[kind].append(name)
    for name, layer in layer_of.items():
        layers[layer].append(name)
        cells[kind_of[name], layer].append(name)
    active = {cell: _sum(names, plan) for cell, names in cells.items()}
    density_map: dict[str, dict[str, list[float | None]]] = {
        agent: {
            kind: [
                int(active[kind, layer].active[i]) / max(active[kind, layer].entries, 1)
                if (kind, layer) in active
                else None
                for layer in layers
            ]
            for kind in kinds
            if any(kind == cell[0] for cell in active)
        }
        for i, agent in enumerate(plan.agents)
    }
    return {
        "kinds": {kind: _part_report(names, plan) for kind, names in kinds.items()},
        "layers": {layer: _part_report(names, plan) for layer, names in layers.items()},
        "density_map": density_map,
    }


def _part_report(names: list[str], plan: Plan) -> PartReport:
    counts = _sum(names, plan)
    return PartReport(
        entries=counts.entries,
        agents={agent: Update(**_numbers(i, counts, names, plan)) for i, agent in enumerate(plan.agents)},
        pairs=_pair_reports(counts, plan),
        touched=counts.touched,
        shared=counts.touched_by_many,
        sign_conflict=_sign_conflict(counts),
    )


def _agent_report(store: Store, i: int, plan: Plan) -> AgentReport:
    return AgentReport(
        **_numbers(i, plan.total, plan.counts, plan),
        weight=plan.config.weight(plan.agents[i]),
        threshold=None if plan.config.ulp else plan.thresholds[i],
        dtypes=_dtypes(store),
    )


def _numbers(i: int, counts: Counts, names: Iterable[str], plan: Plan) -> dict[str, Any]:
    """The fields of an [`Update`]: agent `i` in the tensors `names`, whose counts are `counts`."""
    active, shared, unique = int(counts.active[i]), int(counts.shared[i]), int(counts.unique[i])
    square = float(counts.square[i])
    return {
        "entries": counts.entries,
        "active": active,
        "shared": shared,
        "unique": unique,
        "density": active / counts.entries if counts.entries else 0.0,
        "rho": rho(shared, unique),
        "lambda": _mean_lambda(i, unique, names, plan) if plan.config.method == "ram" else None,
        "norm": square**0.5,
        "kept": float(counts.square_active[i]) / square if square else 1.0,
        "largest": float(counts.largest[i]),
    }


def _mean_lambda(i: int, unique: int, names: Iterable[str], plan: Plan) -> float:
    """λ of agent `i` in the tensors `names`, which hold `unique` unique entries of it."""
    if plan.config.rho == "global" or not unique:
        return plan.lambdas("")[i] if plan.config.rho == "global" else 1.0
    return sum(plan.lambdas(name)[i] * int(plan.counts[name].unique[i]) for name in names) / unique


def _pair_reports(counts: Counts, plan: Plan) -> list[PairReport]:
    return [_pair_report(i, j, counts, plan) for i, j in combinations(range(len(plan.agents)), 2)]


def _pair_report(i: int, j: int, counts: Counts, plan: Plan) -> PairReport:
    both = int(counts.both[i, j])
    density_i, density_j = (int(counts.active[k]) / max(counts.entries, 1) for k in (i, j))
    either = int(counts.active[i]) + int(counts.active[j]) - both
    by_chance = density_i + density_j - density_i * density_j
    return PairReport(
        agents=(plan.agents[i], plan.agents[j]),
        both=both,
        jaccard=both / either if either else 0.0,
        jaccard_by_chance=density_i * density_j / by_chance if by_chance else 0.0,
        sign_agreement=int(counts.agree[i, j]) / both if both else None,
    )


def _sign_conflict(counts: Counts) -> float | None:
    return counts.conflicting / counts.touched_by_many if counts.touched_by_many else None


def _sum(names: Iterable[str], plan: Plan) -> Counts:
    return reduce(Counts.__add__, (plan.counts[name] for name in names), Counts.zero(len(plan.agents)))


def _dtypes(store: Store) -> list[str]:
    return sorted({str(store.dtype(name)).removeprefix("torch.") for name in mergeable(store)})
