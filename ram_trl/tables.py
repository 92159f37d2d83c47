"""Reports as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ram_trl.report import MergeReport


def show_report(report: MergeReport, console: Console) -> None:
    """Prints agents, pairs and warnings of a merge; "kept" is the share of the squared norm that is active."""
    title = f"{report.config.method}, criterion {report.criterion}"
    weighted = any(agent.weight != 1 for agent in report.agents.values())
    agents = Table("agent", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("density", "shared", "unique", "rho", "lambda", "norm", "kept") + ("weight",) * weighted:
        agents.add_column(heading, justify="right")
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
        pairs = Table("agents", box=box.SIMPLE_HEAD)
        for heading in ("active in both", "Jaccard", "Jaccard by chance", "same sign"):
            pairs.add_column(heading, justify="right")
        for pair in report.pairs:
            agreement = "-" if pair.sign_agreement is None else f"{pair.sign_agreement:.1%}"
            pairs.add_row(
                " + ".join(pair.agents),
                f"{pair.both:,}",
                f"{pair.jaccard:.3f}",
                f"{pair.jaccard_by_chance:.3f}",
                agreement,
            )
        console.print(pairs)
    if report.sign_conflict is not None:
        console.print(
            f"{report.shared:,} entries are shared; agents pull in opposite directions in {report.sign_conflict:.1%} "
            "of them",
            highlight=False,
        )
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
