"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from rich import box
from rich.console import Console
from rich.table import Table

from ram_trl.folders.assembly import AdapterReport
from ram_trl.telling.advice import Advice
from ram_trl.telling.report import MergeReport, PairReport, PartReport

MOST_ROWS = 120
WORST_FITS = 8


def show_report(report: MergeReport, console: Console) -> None:
    """Prints agents, pairs and warnings of a merge; "kept" is the share of the squared norm that is active."""
    _show_whole(report, console)
    _show_warnings(report, console)


def show_fit(report: AdapterReport, console: Console) -> None:
    """Prints how well an adapter holds the merge: in all, and the layers it misses most of."""
    table = _table(f"adapter of rank {report.rank}, relative error {report.error:.3g}", ("layer",), ("rank", "error"))
    worst = sorted(report.ranks, key=lambda name: -report.errors[name])[:WORST_FITS]
    for name in worst:
        table.add_row(name, str(report.ranks[name]), f"{report.errors[name]:.3g}")
    console.print(table)
    if len(report.ranks) > len(worst):
        console.print(f"{len(report.ranks) - len(worst)} layers with smaller errors are in adapter_report.json")


def show_probe(report: MergeReport, console: Console) -> None:
    """Prints a report in detail: agents and pairs, by kind, by layer, what the criterion does, and the advice."""
    _show_whole(report, console)
    _show_parts(report.kinds, "by kind of tensor", report, console)
    _show_parts(report.layers, "by layer", report, console)
    if report.advice is not None:
        _show_advice(report.advice, report, console)
    _show_warnings(report, console)


def _show_whole(report: MergeReport, console: Console) -> None:
    weighted = any(agent.weight != 1 for agent in report.agents.values())
    title = f"{report.config.method}, criterion {report.criterion}"
    headings = ("density", "shared", "unique", "rho", "lambda", "norm", "kept") + ("weight",) * weighted
    agents = _table(title, ("agent",), headings)
    for name, agent in report.agents.items():
        agents.add_row(
            name,
            f"{agent.density:.2%}",
            f"{agent.shared:,}",
            f"{agent.unique:,}",
            _number(agent.rho),
            _number(agent.lambda_),
            f"{agent.norm:.4g}",
            f"{agent.kept:.1%}",
            *([f"{agent.weight:g}"] * weighted),
        )
    console.print(agents)
    if report.pairs:
        pairs = _table(None, ("agents",), ("active in both", "Jaccard", "Jaccard by chance", "same sign"))
        for pair in report.pairs:
            pairs.add_row(
                " + ".join(pair.agents),
                f"{pair.both:,}",
                f"{pair.jaccard:.3f}",
                f"{pair.jaccard_by_chance:.3f}",
                "-" if pair.sign_agreement is None else f"{pair.sign_agreement:.1%}",
            )
        console.print(pairs)
    if report.sign_conflict is not None:
        console.print(
            f"{report.shared:,} entries are shared; agents pull in opposite directions in {report.sign_conflict:.1%} "
            "of them",
            highlight=False,
        )


def _show_parts(parts: Mapping[str, PartReport], title: str, report: MergeReport, console: Console) -> None:
    """A row per part and agent; overlap is that with the other agents, on average."""
    if not parts:
        return
    step = ceil(len(parts) * len(report.agents) / MOST_ROWS)
    if step > 1:
        title += f" (one of {step}; all are in --json and --plot)"
    several = len(report.agents) > 1
    # With ρ counted over the model λ is the same in all parts, and stands in the table of agents.
    per_tensor = report.config.method == "ram" and report.config.rho == "tensor"
    headings = ("density", "unique", "rho") + ("lambda",) * per_tensor + ("norm",)
    table = _table(title, ("", "agent"), headings + ("Jaccard", "chance", "same\nsign") * several)
    for label, part in list(parts.items())[::step]:
        for at, (name, agent) in enumerate(part.agents.items()):
            table.add_row(
                "" if at else label,
                name,
                f"{agent.density:.1%}",
                f"{agent.unique / agent.active:.0%}" if agent.active else "-",
                _number(agent.rho, digits=3),
                *([_number(agent.lambda_)] * per_tensor),
                f"{agent.norm:.3g}",
                *(_overlap([pair for pair in part.pairs if name in pair.agents]) if several else ()),
            )
    console.print(table)


def _overlap(pairs: list[PairReport]) -> tuple[str, str, str]:
    """Mean Jaccard and chance; agreement over all entries the pairs share."""
    both = sum(pair.both for pair in pairs)
    agree = sum(pair.both * (pair.sign_agreement or 0) for pair in pairs)
    return (
        f"{sum(pair.jaccard for pair in pairs) / len(pairs):.3f}",
        f"{sum(pair.jaccard_by_chance for pair in pairs) / len(pairs):.3f}",
        f"{agree / both:.1%}" if both else "-",
    )


def _show_advice(advice: Advice, report: MergeReport, console: Console) -> None:
    console.print(f"\nwhat {report.criterion} does", style="bold", markup=False, highlight=False)
    for sentence in advice.effect:
        console.print(f"- {sentence}", markup=False, highlight=False)
    keep = "keep " if advice.in_force else ""
    told = f"recommended: {keep}{advice.criterion} (`{advice.option}`)"
    console.print(f"\n{told}", style="bold", markup=False, highlight=False)
    for sentence in (advice.reason, *(f"note: {note}" for note in advice.notes)):
        console.print(f"- {sentence}", markup=False, highlight=False)


def _show_warnings(report: MergeReport, console: Console) -> None:
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def _table(title: str | None, labels: tuple[str, ...], headings: tuple[str, ...]) -> Table:
    """A table whose first columns are text and whose others are numbers; dense enough for 80 characters."""
    table = Table(
        *labels, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
