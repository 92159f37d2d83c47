"""The README.md that goes with a generalist: a model card with front matter the Hub understands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ram_trl.config import METHOD_KNOBS
from ram_trl.folders.assembly import AdapterReport
from ram_trl.telling.report import MergeReport

RAM_PAPER = "https://arxiv.org/abs/2601.13572"


def model_card(
    report: MergeReport,
    base_config: Mapping[str, Any],
    plots: Sequence[str] = (),
    fit: AdapterReport | None = None,
) -> str:
    """
    The card's text.

    Args:
        report (`MergeReport`):
            The report of a merge of folders.
        base_config (`Mapping[str, Any]`):
            The base's `config.json`; tells its name on the Hub, if it has one.
        plots (`Sequence[str]`, *optional*):
            Pictures to show, as paths relative to the card.
        fit (`AdapterReport`, *optional*):
            What a generalist that is an adapter misses of the merge.

    Returns:
        `str`: Markdown with YAML front matter.
    """
    data = ModelCardData(
        base_model=_hub_name(report.base, base_config),
        base_model_relation="merge" if fit is None else "adapter",
        library_name="transformers" if fit is None else "peft",
        tags=["merge", "ram_trl"] if fit is None else ["lora", "merge", "ram_trl"],
    )
    config = report.config
    knobs = [f"criterion: {report.criterion}"]
    knobs += [f"{knob}: {getattr(config, knob)}" for knob in sorted(METHOD_KNOBS[config.method])]
    lines = [
        "---",
        data.to_yaml(),
        "---",
        f"# {report.out.name if report.out else 'generalist'}",
        "",
        f"A generalist merged from {len(report.agents)} agents by ram_trl.",
        *(() if fit is None else ("", _fit(fit))),
        "",
        f"- method: `{config.method}` ({', '.join(knobs)})",
        f"- base: `{report.base}`",
        *(f"- agent {name}: `{source}`" for name, source in report.sources.items()),
        "",
        "| agent | density | shared | unique | rho | lambda | weight |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {agent.density:.2%} | {agent.shared} | {agent.unique} | {_number(agent.rho)} "
            f"| {_number(agent.lambda_)} | {agent.weight:g} |"
            for name, agent in report.agents.items()
        ),
        "",
        "Density is the share of entries an agent changed by the criterion; shared and unique count those that "
        "others changed too, or not.",
        *(line for plot in plots for line in ("", f"![{Path(plot).stem}]({plot})")),
    ]
    if report.warnings:
        lines += ["", "Warnings:", "", *(f"- {warning}" for warning in report.warnings)]
    if config.method == "ram":
        lines += ["", f"Method: Reinforced Agent Merging, {RAM_PAPER}."]
    return "\n".join(lines) + "\n"


def _fit(fit: AdapterReport) -> str:
    return (
        f"It is a LoRA adapter of rank {fit.rank}, which misses {fit.error:.1%} of what the merge changes of the base "
        "(Frobenius norm; by layer in `adapter_report.json`)."
    )


def _hub_name(base: Path | None, config: Mapping[str, Any]) -> str | None:
    name = config.get("_name_or_path")
    if isinstance(name, str) and name.count("/") == 1 and not name.startswith(("/", ".")):
        return str(name)
    if base is None:
        return None
    # A snapshot in the cache of huggingface_hub: models--Qwen--Qwen3-1.7B/snapshots/<revision>.
    for folder in base.absolute().parents:
        if folder.name.startswith("models--"):
            return folder.name.removeprefix("models--").replace("--", "/", 1)
    return re.sub(r"[^\w.-]+", "-", base.resolve().name).strip("-.") or None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
