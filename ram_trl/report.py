"""The account of a merge: what each agent changed, how agents overlap, what was applied, what to worry about."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, field_serializer

from ram_trl.config import MergeConfig
from ram_trl.plan import Plan, rho
from ram_trl.weights import Store, mergeable

MOSTLY_SHARED = 0.95
MOSTLY_DROPPED = 0.5


class AgentReport(BaseModel):
    """
    One agent in a merge.

    Args:
        entries (`int`):
            Entries of the model, tied ones once.
        active, shared, unique (`int`):
            Entries its criterion counts as changed; of those, active in another agent too; active in it alone.
        density (`float`):
            active / entries.
        rho (`float`, *optional*):
            shared / unique over the whole model; `None` without unique entries.
        lambda_ (`float`, *optional*):
            Rescale of its unique entries (`ram` only); with ρ counted per tensor, the mean over unique entries.
        weight (`float`):
            Factor on its task vector.
        threshold (`float`, *optional*):
            |τ| above this is active; `None` for `ulp`.
        norm (`float`):
            L2 norm of its task vector.
        kept (`float`):
            Share of the squared norm that lies in active entries.
        largest (`float`):
            Largest |τ|.
        dtypes (`list[str]`):
            Dtypes its weights are stored in: where "changed" was decided.
    """

    entries: int
    active: int
    shared: int
    unique: int
    density: float
    rho: float | None
    lambda_: float | None = Field(validation_alias=AliasChoices("lambda", "lambda_"), serialization_alias="lambda")
    weight: float
    threshold: float | None
    norm: float
    kept: float
    largest: float
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
        base (`Path`, *optional*), sources (`dict[str, Path]`), out (`Path`, *optional*):
            Folders, for merges of folders.
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
    base: Path | None = None
    sources: dict[str, Path] = Field(default_factory=dict)
    out: Path | None = None

    @field_serializer("config")
    def _knobs_in_force(self, config: MergeConfig) -> dict[str, Any]:
        return config.settled()

    def to_json(self) -> str:
        """The report as indented JSON, with λ under the key `lambda`."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


def make_report(base: Store, agents: Mapping[str, Store], plan: Plan) -> MergeReport:
    """The report of a merge, from its plan alone; `base` and `agents` are asked for dtypes only."""
    total = plan.total
    reports = {name: _agent_report(agents[name], name, plan) for name in plan.agents}
    return MergeReport(
        config=plan.config,
        criterion=plan.config.criterion,
        agents=reports,
        pairs=[_pair_report(i, j, plan) for i, j in combinations(range(len(plan.agents)), 2)],
        touched=total.touched,
        shared=total.touched_by_many,
        sign_conflict=total.conflicting / total.touched_by_many if total.touched_by_many else None,
        base_dtypes=_dtypes(base),
        warnings=_warnings(reports, _dtypes(base), plan),
    )


def _agent_report(store: Store, name: str, plan: Plan) -> AgentReport:
    i, total = plan.agents.index(name), plan.total
    active, shared, unique = int(total.active[i]), int(total.shared[i]), int(total.unique[i])
    square = float(total.square[i])
    return AgentReport(
        entries=total.entries,
        active=active,
        shared=shared,
        unique=unique,
        density=active / total.entries if total.entries else 0.0,
        rho=rho(shared, unique),
        lambda_=_mean_lambda(i, plan) if plan.config.method == "ram" else None,
        weight=plan.config.weight(name),
        threshold=None if plan.config.ulp else plan.thresholds[i],
        norm=square**0.5,
        kept=float(total.square_active[i]) / square if square else 1.0,
        largest=float(total.largest[i]),
        dtypes=_dtypes(store),
    )


def _mean_lambda(i: int, plan: Plan) -> float:
    if plan.config.rho == "global" or not plan.total.unique[i]:
        return plan.lambdas("")[i] if plan.config.rho == "global" else 1.0
    weighted = sum(plan.lambdas(name)[i] * int(counts.unique[i]) for name, counts in plan.counts.items())
    return weighted / int(plan.total.unique[i])


def _pair_report(i: int, j: int, plan: Plan) -> PairReport:
    total = plan.total
    both = int(total.both[i, j])
    density_i, density_j = (int(total.active[k]) / max(total.entries, 1) for k in (i, j))
    either = int(total.active[i]) + int(total.active[j]) - both
    by_chance = density_i + density_j - density_i * density_j
    return PairReport(
        agents=(plan.agents[i], plan.agents[j]),
        both=both,
        jaccard=both / either if either else 0.0,
        jaccard_by_chance=density_i * density_j / by_chance if by_chance else 0.0,
        sign_agreement=int(total.agree[i, j]) / both if both else None,
    )


def _dtypes(store: Store) -> list[str]:
    return sorted({str(store.dtype(name)).removeprefix("torch.") for name in mergeable(store)})


def _warnings(agents: Mapping[str, AgentReport], base_dtypes: list[str], plan: Plan) -> list[str]:
    warnings = []
    for name, agent in agents.items():
        if agent.largest == 0:
            warnings.append(f"agent '{name}' is identical to the base; it adds nothing")
        elif agent.active == 0:
            warnings.append(
                f"agent '{name}' has no active entry: {_why_inactive(agent, plan)}; it adds nothing - use `top`, or a "
                "smaller `epsilon`"
            )
        elif agent.kept < MOSTLY_DROPPED and plan.config.top_fraction is None and not plan.config.ulp:
            warnings.append(
                f"agent '{name}' loses {1 - agent.kept:.0%} of its update (squared norm): that part lies in entries "
                f"with |τ| of at most epsilon = {agent.threshold:.3g} - is lr × steps below epsilon? Use `top`, or a "
                "smaller `epsilon`"
            )
    if plan.config.method == "ram" and len(agents) > 1:
        warnings += _degenerate(agents, plan)
    narrow = [f"'{name}' in {', '.join(a.dtypes)}" for name, a in agents.items() if "float32" not in a.dtypes]
    if narrow and "float32" in base_dtypes and not plan.config.ulp:
        warnings.append(
            f"the base is stored in {', '.join(base_dtypes)}, but agents are in less ({'; '.join(narrow)}): rounding "
            "alone counts as changed - use `ulp`, or as base the checkpoint in the agents' precision"
        )
    kinds = {name: ", ".join(agent.dtypes) for name, agent in agents.items()}
    if len(set(kinds.values())) > 1:
        told = "; ".join(f"'{name}' in {kind}" for name, kind in kinds.items())
        warnings.append(f"agents are stored in different precision ({told}): what counts as changed differs by agent")
    return warnings


def _degenerate(agents: Mapping[str, AgentReport], plan: Plan) -> list[str]:
    total = plan.total
    if total.touched and total.touched_by_many / total.touched > MOSTLY_SHARED:
        names = ", ".join(f"'{name}'" for name in agents)
        return [
            f"{total.touched_by_many / total.touched:.1%} of the active entries of agents {names} are shared: RAM is "
            "plain averaging here - use `top`, or a larger `epsilon`"
        ]
    return [
        f"agent '{name}' has no unique entry (all {agent.active} active ones are shared), so nothing of it is rescaled"
        for name, agent in agents.items()
        if agent.active and not agent.unique
    ]


def _why_inactive(agent: AgentReport, plan: Plan) -> str:
    if plan.config.ulp:
        return f"its largest |τ|, {agent.largest:.3g}, changes no weight once rounded to 16 bits"
    return (
        f"its largest |τ| is {agent.largest:.3g}, not above epsilon = {agent.threshold:.3g} (lr × steps is below "
        "epsilon)"
    )
