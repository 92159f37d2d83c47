"""The demo's merges and their scores: trained agents by every rule of the recipe, and the rounds of its hubs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import PreTrainedModel

from ram_trl.config import MergeConfig
from ram_trl.continual.export import round_report
from ram_trl.continual.hub import Hub
from ram_trl.continual.rounds import Rounds
from ram_trl.demo.lab import Lab, SeedRun
from ram_trl.demo.report import Choice, RoundScores, Scores
from ram_trl.engine.merging import merge_state_dicts
from ram_trl.evaluate import ScoreRow, accuracies
from ram_trl.recipe import FactorRow, MergeRow, Progress
from ram_trl.team import Team
from ram_trl.weights import entries

MERGED = "merged"
"""The adapter that peft merges into."""


def compare(lab: Lab, run: SeedRun, progress: Progress) -> None:
    """Scores base, agents and every merge of the recipe on the test split; before, tunes on dev what is tuned."""
    rows = lab.recipe.one_shot
    on_dev = run.seed == 0 and bool(lab.recipe.runs)
    done, total = 0, 1 + len(run.agents) + sum(len(row.candidates()) * bool(row.tune) + 1 + on_dev for row in rows)

    def score(model: PreTrainedModel, prompts: Mapping[str, list[ScoreRow]]) -> Scores:
        nonlocal done
        scores = accuracies(model, run.tokenizer, prompts)
        done += 1
        progress(done, total)
        return scores

    def add(row: FactorRow | MergeRow, made: Callable[[Any], AbstractContextManager[PreTrainedModel]]) -> None:
        """Scores a row, as its best candidate if it is tuned; `made` makes a candidate's model."""
        candidates = row.candidates()
        best = 0
        if row.tune:
            tried = []
            for knobs, candidate in candidates:
                with made(candidate) as model:
                    tried.append((knobs, score(model, lab.dev)["average"]))
            best = max(range(len(tried)), key=lambda number: tried[number][1])
            run.choices[row.name] = Choice(seed=run.seed, chosen=tried[best][0], tried=tried)
        with made(candidates[best][1]) as model:
            run.scores[row.name] = score(model, lab.test)
            if on_dev:
                run.dev[row.name] = score(model, lab.dev)

    run.scores["base"] = score(run.base, lab.test)
    for name, agent in run.agents.items():
        run.scores[f"agent:{name}"] = score(agent, lab.test)
    if lab.recipe.factors:
        adapters = _in_one_model(run)
        for factor_row in lab.recipe.factors:
            add(factor_row, lambda weight: _merged_by_peft(adapters, list(run.agents), weight))

    base = run.base.state_dict()
    states = {agent.name: run.weights(agent) for agent in lab.recipe.agents}
    model = copy.deepcopy(run.base)

    @contextmanager
    def merged(config: MergeConfig) -> Iterator[PreTrainedModel]:
        weights, report = merge_state_dicts(base, states, config)
        run.merges[row.name] = report  # of the last one made, which is the one that is scored on test
        model.load_state_dict(weights)
        yield model

    for row in lab.recipe.rows:
        add(row, merged)


def _in_one_model(run: SeedRun) -> PeftModel:
    """The base with the adapters of all agents, by name."""
    model: PeftModel | None = None
    for name, agent in run.agents.items():
        config = copy.deepcopy(agent.peft_config["default"])
        if model is None:
            model = get_peft_model(copy.deepcopy(run.base), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        set_peft_model_state_dict(model, get_peft_model_state_dict(agent), adapter_name=name)
    assert model is not None
    return model


@contextmanager
def _merged_by_peft(model: PeftModel, agents: list[str], weight: float | Literal["mean"]) -> Iterator[PreTrainedModel]:
    """The model with the adapter that peft's `linear` makes of the agents': sums of A and of B, each apart."""
    # peft multiplies A as well as B with the root of the weight.
    factor = 1 / len(agents) ** 2 if weight == "mean" else weight
    model.add_weighted_adapter(agents, [factor] * len(agents), MERGED, combination_type="linear")
    model.set_adapter(MERGED)
    yield model
    model.set_adapter(agents[0])
    model.delete_adapter(MERGED)


def scores_of_newest(lab: Lab, run: SeedRun, hub: Hub) -> Scores:
    """Scores of a hub's last generalist on the test split."""
    return accuracies(_generalist(run, hub, len(hub.decisions())), run.tokenizer, lab.test)


def score_rounds(lab: Lab, run: SeedRun, hubs: Mapping[str, Hub], progress: Progress) -> None:
    """Scores every round of every hub on the dev split, and reads what the round's report counted."""
    rounds = [(name, d.round) for name, hub in hubs.items() for d in hub.decisions()]
    run.dev["base"] = accuracies(run.base, run.tokenizer, lab.dev)
    for done, (name, number) in enumerate(rounds, 1):
        told = round_report(hubs[name], number)
        assert told is not None
        report = told[1]
        agents = {agent.name: report.agents[agent.name] for agent in lab.recipe.agents if agent.name in report.agents}
        row = RoundScores(
            round=number,
            scores=accuracies(_generalist(run, hubs[name], number), run.tokenizer, lab.dev),
            density={agent: found.density for agent, found in agents.items()},
            lambda_={agent: found.lambda_ for agent, found in agents.items()},
            shared={agent: found.shared / found.active if found.active else None for agent, found in agents.items()},
            sign_conflict=report.sign_conflict,
        )
        run.rounds.setdefault(name, []).append(row)
        progress(done, len(rounds))


def _generalist(run: SeedRun, hub: Hub, number: int) -> PreTrainedModel:
    """The generalist of a round in fp32, as the hub's state has it."""
    state = Rounds(hub, Team(), hub.described()["identity"]).state(number)
    model = copy.deepcopy(run.base)
    for name in state.names():
        parameter = model.get_parameter(name)
        parameter.data.copy_(state.read(name, 0, entries(state, name)).view_as(parameter))
    return model
