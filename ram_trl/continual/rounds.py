"""
The work of a round: from a decision to the state, its report and its export.

State and export are pure functions of the decisions, so whoever makes them may be replaced at any time: an unfinished
folder is invisible, and the next one to try writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ram_trl.config import MergeConfig
from ram_trl.continual.hub import Hub
from ram_trl.continual.semantics import Decision, Publication
from ram_trl.engine.counting import make_plan
from ram_trl.engine.merging import merge_spans
from ram_trl.engine.workers import Workers
from ram_trl.files import write_json
from ram_trl.team import Team
from ram_trl.telling.report import MergeReport, make_report
from ram_trl.weights import Span, Store
from ram_trl.weights.block_folders import open_folder, write_folder
from ram_trl.weights.sparse import BLOCK, Blocks, BlockWriter, blocks

Shapes = Mapping[str, tuple[int, ...]]


class Rounds:
    """
    The states and publications of a hub's run, as stores.

    Args:
        hub (`Hub`):
            The hub.
        team (`Team`):
            The ranks of this job.
        identity (`Mapping[str, Any]`):
            The `identity` in `hub.json`.
    """

    def __init__(self, hub: Hub, team: Team, identity: Mapping[str, Any]) -> None:
        self._hub = hub
        self._team = team
        self.shapes: Shapes = {name: tuple(shape) for name, shape in identity["shapes"].items()}
        self.observes = identity["resync"] == "none"
        # Publications hold active entries only, so here everything that differs from its reference is active.
        self.merge = MergeConfig(**identity["merge"])
        self.config = self.merge.as_published()

    def state(self, number: int) -> Blocks:
        """
        S_k, the state of a finished round, or the base (round 0).

        Raises:
            `FileNotFoundError`: if it is not made yet, or removed.
            `DamagedFileError`, `BlockFileError`: if it cannot be trusted.
        """
        return Blocks(open_folder(self._hub.state_folder(number), {"round": number}), self.shapes)

    def publication(self, head: Publication) -> Blocks:
        """θ̂ of a publication: its entries, and elsewhere the state it is measured against."""
        folder = self._hub.publication_folder(head.agent, head.sequence)
        return Blocks(open_folder(folder, head.model_dump()), self.shapes, self.reference(head))

    def reference(self, head: Publication) -> Blocks:
        """What the task vector of a publication is measured against: S_b, or the base in observe mode."""
        return self.state(0 if self.observes else head.base_round)

    def make_state(self, decision: Decision, spans: list[Span], workers: Workers) -> MergeReport | None:
        """
        Makes S_k = S_{k−1} + RAM(τ̂ of the decision); in observe mode S_0 + RAM(τ̂).

        Collective: all ranks of the job, each with the spans it owns.

        Args:
            decision (`Decision`):
                The round.
            spans (`list[Span]`):
                What this rank merges and writes.
            workers (`Workers`):
                An entered pool.

        Returns:
            `MergeReport`: of the round, on every rank; `None` if the state was there already.
        """
        folder = self._hub.state_folder(decision.round)
        if self._team.ask(folder.exists):
            return None

        def opened() -> tuple[Blocks, dict[str, Store], dict[str, Store]]:
            base = self.state(0 if self.observes else decision.round - 1)
            agents: dict[str, Store] = {p.agent: self.publication(p) for p in decision.publications}
            references: dict[str, Store] = {
                p.agent: base if self.observes or p.base_round == decision.round - 1 else self.state(p.base_round)
                for p in decision.publications
            }
            return base, agents, references

        base, agents, references = self._team.together(opened)
        reduce, pieces = self._team.reduce, list(blocks(spans))
        plan = self._team.together(
            lambda: make_plan(base, agents, self.config, workers, references=references, spans=pieces, reduce=reduce)
        )
        # Readers want the criterion that the agents applied when they published.
        told = {"config": self.merge, "criterion": self.merge.criterion}
        report = make_report(base, agents, plan, in_detail=False).model_copy(update=told)
        path = self._hub.round_folder(decision.round) / "report.json"
        # Before the state: a round that is made has a report, whoever dies when.
        self._team.together(lambda: write_json(path, _described(report, decision)) if self._team.first else None)

        def write(writer: BlockWriter) -> None:
            merged = merge_spans(
                base, agents, plan, lambda span, values: values, workers,
                references=references, spans=pieces, chunk=BLOCK,
            )  # fmt: skip
            for span, values in zip(pieces, merged, strict=True):
                writer.add(span, values)

        write_folder(self._team, folder, {"round": decision.round}, dict.fromkeys(self.shapes, torch.float32), write)
        return report


def _described(report: MergeReport, decision: Decision) -> dict[str, Any]:
    return report.model_dump(mode="json", by_alias=True) | {"decision": decision.model_dump(mode="json")}
