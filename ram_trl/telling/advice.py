"""
What to think of a merge, from its report alone: warnings, what the criterion did, and which one to use.

What was counted can tell that a criterion drops an update or leaves nothing to rescale. It cannot tell a score, and
not what another criterion would count; advice says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ram_trl.config import CRITERION_KNOBS, MergeConfig
from ram_trl.engine.criterion import wanted

if TYPE_CHECKING:
    from ram_trl.telling.report import AgentReport, MergeReport

MOSTLY_SHARED = 0.95
MOSTLY_DROPPED = 0.5
ROUNDING = 1e-6
"""A share of the squared norm that the sums themselves may be off by."""

TOP = {"top": 0.2}
SMALLER_TOP = {"top": 0.1}
ULP = {"ulp": True}
ALL = {"epsilon": 0.0}

SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}

CAVEAT = (
    "counts are no scores, and which criterion scores best was measured on small models only (77 k parameters, few "
    "seeds): score the generalist on your tasks"
)


class Advice(BaseModel):
    """
    What the criterion in force did, and which one to use.

    Args:
        effect (`list[str]`):
            What the criterion in force left out, and what became of the rest, in sentences.
        criterion (`str`):
            The recommended criterion in words, as in `MergeConfig.criterion`.
        option (`str`):
            The same as an option of the command line.
        in_force (`bool`):
            Whether it is the criterion that was used.
        reason (`str`):
            Why.
        notes (`list[str]`):
            What else to know before trusting the merge.
    """

    effect: list[str]
    criterion: str
    option: str
    in_force: bool
    reason: str
    notes: list[str]


def advise(report: MergeReport) -> Advice:
    """The advice on a merge; a pure function of what was counted."""
    knobs, reason = _recommended(report)
    criterion = MergeConfig(method=report.config.method, **knobs).criterion
    return Advice(
        effect=_effect(report),
        criterion=criterion,
        option=f"--{criterion}",
        in_force=criterion == report.criterion,
        reason=reason,
        notes=[*_notes(report), CAVEAT],
    )


def warnings(report: MergeReport) -> list[str]:
    """Sentences about outcomes that are probably not wanted."""
    told = []
    for name, agent in report.agents.items():
        if agent.largest == 0:
            told.append(f"agent '{name}' is identical to the base; it adds nothing")
        elif agent.active == 0:
            told.append(
                f"agent '{name}' has no active entry: {_why_inactive(agent, report)}; it adds nothing - "
                f"{_remedy(report)}"
            )
        elif _drops(agent, report):
            told.append(
                f"agent '{name}' loses {1 - agent.kept:.0%} of its update (squared norm): that part lies in entries "
                f"with |τ| of at most epsilon = {agent.threshold:.3g} - is lr × steps below epsilon? Use `top`, or a "
                "smaller `epsilon`"
            )
    if report.config.method == "ram" and len(report.agents) > 1:
        told += _degenerate(report)
    if _counts_rounding(report):
        narrow = [f"'{name}' in {', '.join(agent.dtypes)}" for name, agent in _narrow(report).items()]
        told.append(
            f"the base is stored in {', '.join(report.base_dtypes)}, but agents are in less ({'; '.join(narrow)}): "
            "rounding alone counts as changed - use `ulp`, or as base the checkpoint in the agents' precision"
        )
    stored = {name: ", ".join(agent.dtypes) for name, agent in report.agents.items()}
    if len(set(stored.values())) > 1:
        named = "; ".join(f"'{name}' in {dtypes}" for name, dtypes in stored.items())
        told.append(f"agents are stored in different precision ({named}): what counts as changed differs by agent")
    return told


def _degenerate(report: MergeReport) -> list[str]:
    if _mostly_shared(report):
        names = ", ".join(f"'{name}'" for name in report.agents)
        use = "use `top`, or a larger `epsilon`"
        if report.config.top_fraction is not None:
            use = "use a smaller `top`, or another method"
        return [
            f"{report.shared / report.touched:.1%} of the active entries of agents {names} are shared: RAM is plain "
            f"averaging here - {use}"
        ]
    return [
        f"agent '{name}' has no unique entry (all {agent.active} active ones are shared), so nothing of it is rescaled"
        for name, agent in report.agents.items()
        if agent.active and not agent.unique
    ]


def _why_inactive(agent: AgentReport, report: MergeReport) -> str:
    if report.config.ulp:
        return f"its largest |τ|, {agent.largest:.3g}, changes no weight once rounded to 16 bits"
    return (
        f"its largest |τ| is {agent.largest:.3g}, not above epsilon = {agent.threshold:.3g} (lr × steps is below "
        "epsilon)"
    )


def _remedy(report: MergeReport) -> str:
    """For agents with nothing active."""
    if report.config.ulp:
        return "use `top`, and `--dtype float32`" if _is_16_bit(report) else "use `top`"
    return "use `top`, or a smaller `epsilon`"


def _recommended(report: MergeReport) -> tuple[Mapping[str, Any], str]:
    """The knobs of the recommended criterion, and why."""
    in_force = {knob: value for knob, value in report.config.settled().items() if knob in CRITERION_KNOBS}
    default: Mapping[str, Any] = TOP if report.config.method in ("ram", "ties") else ALL
    changed = {name: agent for name, agent in report.agents.items() if agent.largest > 0}
    if not changed:
        return in_force, "no agent differs from the base, so no criterion makes a difference"
    if _counts_rounding(report):
        return ULP, (
            f"the base is stored in {', '.join(report.base_dtypes)} and {_listed(_narrow(report))} in 16 bits, so "
            "entries differ that no training changed; `ulp` compares both once rounded"
        )
    if report.config.method == "ram" and len(report.agents) == 1:
        return ALL, "a single agent shares nothing with others, and `epsilon 0` keeps all of its update"
    inactive = [name for name, agent in changed.items() if not agent.active]
    if inactive:
        why = f"nothing of {_listed(inactive)} is active: {_why_inactive(changed[inactive[0]], report)}"
        if report.config.ulp and _is_16_bit(report):
            why += f" (nor would a generalist in {report.base_dtypes[0]} show it: merge with `--dtype float32`)"
        return default, f"{why}; {_what_default_does(default)}"
    dropped = [name for name, agent in changed.items() if _drops(agent, report)]
    if dropped:
        worst = min(changed[name].kept for name in dropped)
        return default, (
            f"{report.criterion} keeps {worst:.0%} of the update (squared norm) of {_listed(dropped, 'or less of ')}; "
            f"{_what_default_does(default)}"
        )
    if report.config.method != "ram":
        return in_force, f"every agent keeps {_least_kept(report)} of its update (squared norm)"
    if _mostly_shared(report):
        return _for_mostly_shared(report, in_force)
    contained = [name for name, agent in changed.items() if not agent.unique]
    if contained and report.config.top_fraction is None:
        return TOP, (
            f"every active entry of {_listed(contained)} is active in another agent, so nothing of it is kept at full "
            f"strength; {_what_default_does(TOP)}"
        )
    if report.config.top_fraction is not None and report.config.top_fraction < SMALLER_TOP["top"]:
        lost = [name for name, agent in changed.items() if agent.kept < MOSTLY_DROPPED]
        if lost:
            return TOP, (
                f"{report.criterion} keeps {_least_kept(report)} of the update (squared norm) of {_listed(lost)}; top "
                "0.1 to 0.2 is what was measured"
            )
    unique = 1 - report.shared / report.touched
    reason = (
        f"it tells the agents apart: {unique:.0%} of the active entries are unique, and every agent keeps "
        f"{_least_kept(report)} of its update (squared norm)"
    )
    if report.config.top_fraction is None:
        reason += (
            "; compare it with `top 0.2`, which scored at least as well as a fixed 1e-5 wherever we measured both"
        )
    return in_force, reason


def _for_mostly_shared(report: MergeReport, in_force: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    share = f"{report.shared / report.touched:.1%} of the active entries are shared, so RAM is plain averaging"
    top = report.config.top_fraction
    if report.config.ulp and "float32" in report.base_dtypes and _narrow(report):
        return in_force, f"{share}; with a base in the agents' precision, `top 0.2` may tell the agents apart"
    if top is None or top > TOP["top"]:
        return TOP, f"{share}; {_what_default_does(TOP)}"
    if top > SMALLER_TOP["top"]:
        return SMALLER_TOP, f"{share}; a smaller `top` may tell the agents apart (probe again with it)"
    return in_force, (
        f"{share} even of the largest changes; no criterion that was measured tells such agents apart, and "
        "task_arithmetic and ties scored higher in our experiment of that kind (pure bf16 Adam): compare with them"
    )


def _what_default_does(knobs: Mapping[str, Any]) -> str:
    if "top" in knobs:
        return (
            "`top 0.2` goes by the size of each agent's own update and makes at most its largest 20% active, plus "
            "ties (probe again with it: what it would count is not known from this report)"
        )
    return "`epsilon 0` keeps all that changed"


def _effect(report: MergeReport) -> list[str]:
    told = []
    for name, agent in report.agents.items():
        lost = 1 - agent.kept
        share = "less than 0.1%" if lost < 0.001 else f"{lost:.1%}"
        told.append(
            f"agent '{name}': {agent.active:,} of {agent.entries:,} entries ({agent.density:.1%}) are active; the "
            f"other {agent.entries - agent.active:,}, dropped or never changed, hold {share} of the squared norm of "
            "its update"
        )
    if not report.touched:
        told.append("nothing is active in any agent: the generalist equals the base")
    elif len(report.agents) > 1:
        shared = report.shared / report.touched
        told.append(
            f"{report.touched:,} entries are active in any agent: {shared:.1%} shared, {1 - shared:.1%} unique"
        )
        if report.shared == report.touched and report.config.method == "ram":
            told.append("every active entry is shared: RAM takes means only, and λ applies to nothing")
    return told


def _notes(report: MergeReport) -> list[str]:
    told = []
    epsilon, top = report.config.fixed_epsilon, report.config.top_fraction
    widths = {dtype for agent in report.agents.values() for dtype in agent.dtypes} | set(report.base_dtypes)
    by_epsilon = top is None and not report.config.ulp and epsilon > 0
    drops = any(1 - agent.kept > ROUNDING for agent in report.agents.values())
    if by_epsilon and drops and len(widths) == 1 and _is_16_bit(report):
        (dtype,) = widths
        exponent = math.floor(math.log2(epsilon)) + SIGNIFICANT_BITS[dtype]
        told.append(
            f"stored in {dtype}, a change is at least one ulp of its weight, and that exceeds {report.criterion} only "
            f"where |w| ≥ 2^{exponent} = {2.0**exponent:.3g}: real changes of smaller weights are dropped"
        )
    if top is not None:
        few = [name for name, a in report.agents.items() if 0 < a.active < wanted(top, a.entries)]
        told += [
            f"agent '{name}' changed {report.agents[name].density:.2%} of its entries, fewer than {report.criterion} "
            "asks for: all of them are active"
            for name in few
        ]
    if _is_16_bit(report):
        lost = [
            f"{_unscaled(agent.lambda_):,} ulp (agent '{name}', λ = {agent.lambda_:.4g})"
            for name, agent in report.agents.items()
            if agent.lambda_ is not None and 1 < agent.lambda_ < 1.5 and agent.unique and agent.weight == 1
        ]
        if lost:
            told.append(
                f"in a generalist stored in {report.base_dtypes[0]}, λ does nothing to unique changes of up to about "
                f"{', '.join(lost)}"
            )
    wide = [name for name, agent in report.agents.items() if "float32" in agent.dtypes]
    if wide and _is_16_bit(report):
        dtype = report.base_dtypes[0]
        told.append(
            f"the base is stored in {dtype}, {_listed(wide)} in float32: in a generalist stored as the base changes "
            f"below about |w|/{2 ** SIGNIFICANT_BITS[dtype]} round away whatever the criterion; `--dtype float32` "
            "keeps them"
        )
    return told


def _unscaled(lambda_: float) -> int:
    """The largest n with n · (λ − 1) < ½: n ulp, times λ, round back to n ulp. λ is only fp32 itself."""
    return math.ceil(round(0.5 / (lambda_ - 1), 3)) - 1


def _mostly_shared(report: MergeReport) -> bool:
    return report.touched > 0 and report.shared / report.touched > MOSTLY_SHARED


def _drops(agent: AgentReport, report: MergeReport) -> bool:
    """Whether an epsilon leaves out most of an update; a small `top` is a choice."""
    return agent.kept < MOSTLY_DROPPED and report.config.top_fraction is None and not report.config.ulp


def _counts_rounding(report: MergeReport) -> bool:
    """Whether an agent in 16 bits is compared with a base in float32, not rounded."""
    return bool(_narrow(report)) and "float32" in report.base_dtypes and not report.config.ulp


def _narrow(report: MergeReport) -> dict[str, AgentReport]:
    return {name: agent for name, agent in report.agents.items() if "float32" not in agent.dtypes}


def _is_16_bit(report: MergeReport) -> bool:
    """Whether the base, and so the generalist, is stored in one 16-bit dtype."""
    return len(report.base_dtypes) == 1 and report.base_dtypes[0] in SIGNIFICANT_BITS


def _least_kept(report: MergeReport) -> str:
    least = min(agent.kept for agent in report.agents.values())
    return "all" if 1 - least <= ROUNDING else f"{math.floor(1000 * least) / 10:.1f}% or more"


def _listed(names: Any, more: str = "") -> str:
    named = [f"'{name}'" for name in names]
    return f"{more if len(named) > 1 else ''}agent{'s' * (len(named) > 1)} {', '.join(named)}"
