"""Agents with adapters that take turns compute with one base in memory, and as if each had its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

import ram_trl
from ram_trl.continual.member import Member
from ram_trl.training import callback
from ram_trl.training.turns import take_turns
from ram_trl.weights.live.common_base import CommonBase
from ram_trl.weights.live.lora import LoraWeights
from tests import models
from tests.training.test_callback import QUICK, states
from tests.training.test_lora_training import ADAPTERS, lora_trainer, theta, weights_of

AGENTS = ("tool", "code")
SETTINGS = ADAPTERS | {"code": ADAPTERS["code"] | {"modules_to_save": ["norm"]}}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    models.tiny_model().save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def together(base: Path, out: Path, agents=AGENTS, dtype=torch.float32, **ram):
    """Trainers of agents that merged in turns, and each one's θ at the end; agent `tool` trains for longer."""

    def work(agent: str):
        def run():
            steps = 6 if agent == "tool" else 4
            trainer = lora_trainer(agent, base, out, adapter=SETTINGS[agent], max_steps=steps, dtype=dtype)
            arguments = {"hub": out / "hub", "agent": agent, "base": base, "merge_every": 2, "keep_rounds": 99}
            called = ram_trl.attach(trainer, **arguments, **QUICK | {"agents": agents} | ram)
            trainer.train()
            return trainer, theta(called._live), bases(trainer)

        return run

    return take_turns({agent: work(agent) for agent in agents})


def bases(trainer) -> dict[str, torch.Tensor]:
    """What the agent computes with, apart from what it trains."""
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}


def outcome(runs, out: Path) -> dict[str, torch.Tensor]:
    found = {f"round {k} {n}": t for k, state in enumerate(states(out / "hub")) for n, t in state.items()}
    for agent, (trainer, reached, base) in runs.items():
        factors = get_peft_model_state_dict(trainer.model)
        for kind, tensors in {"factors": factors, "theta": reached, "base": base}.items():
            found |= {f"{agent} {kind} {n}": t.detach().clone() for n, t in tensors.items()}
    return found


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def own_bases(monkeypatch) -> None:
    monkeypatch.setattr(callback, "in_common", lambda key, make: None)


def held(trainers) -> int:
    """Bytes of all weights of these agents, memory that several have counted once."""
    storages = {}
    for trainer in trainers:
        for parameter in trainer.model.parameters():
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def trained(trainer) -> int:
    return sum(p.untyped_storage().nbytes() for p in trainer.model.parameters() if p.requires_grad)


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("fold", False), ("svd", True), ("svd", False))]


@pytest.mark.parametrize(("mode", "park"), [("fold", True), *SLOW])
def test_agents_with_one_base_compute_what_agents_with_their_own_do(base, tmp_path, monkeypatch, mode, park):
    shared = together(base, tmp_path / "shared", lora=mode, park=park)
    trainers = [trainer for trainer, *_ in shared.values()]
    one = sum(p.untyped_storage().nbytes() for p in models.tiny_model().parameters())
    assert held(trainers) == one + sum(map(trained, trainers))
    found = outcome(shared, tmp_path / "shared")
    own_bases(monkeypatch)
    apart = together(base, tmp_path / "apart", lora=mode, park=park)
    assert held(trainer for trainer, *_ in apart.values()) >= 2 * one
    assert same(found, outcome(apart, tmp_path / "apart"))


@pytest.fixture
def failing_hub(monkeypatch):
    """Fails agent `tool` once, when the other has had its turn while it waited; so it trains on without a round."""

    def arm() -> None:
        real, calls = Member._watch_for_round, []

        def watch(self, deadline):
            calls.extend([1] * (self.agent == "tool"))
            if self.agent == "tool" and len(calls) == 2:
                raise OSError("the disk is away")
            return real(self, deadline)

        monkeypatch.setattr(Member, "_watch_for_round", watch)

    return arm


def skipping(base, out, failing_hub):
    failing_hub()
    return outcome(together(base, out, on_hub_error="skip"), out)


def test_an_agent_that_trains_on_without_a_round_has_its_own_base(base, tmp_path, monkeypatch, failing_hub, caplog):
    with monkeypatch.context() as patched:
        own_bases(patched)
        found = skipping(base, tmp_path / "apart", failing_hub)
        assert "agent 'tool' goes on without merging at step" in caplog.text
    assert same(found, skipping(base, tmp_path / "shared", failing_hub))


@pytest.mark.slow
def test_and_would_not_if_it_were_not_put_back(base, tmp_path, monkeypatch, failing_hub):
    found = skipping(base, tmp_path / "right", failing_hub)
    monkeypatch.setattr(LoraWeights, "put_base_back", lambda self: None)
    assert not same(found, skipping(base, tmp_path / "wrong", failing_hub))


@pytest.mark.slow
def test_bf16_bases_are_shared_as_they_are(base, tmp_path, monkeypatch):
    models.tiny_model().to(torch.bfloat16).save_pretrained(base)
    shared = together(base, tmp_path / "shared", dtype=torch.bfloat16)
    found = outcome(shared, tmp_path / "shared")
    assert found["tool base base_model.model.model.norm.weight"].dtype == torch.bfloat16
    own_bases(monkeypatch)
    assert same(found, outcome(together(base, tmp_path / "apart", dtype=torch.bfloat16), tmp_path / "apart"))


def test_a_base_that_is_not_the_same_to_the_bit_is_not_shared_where_it_is_never_written(base):
    def live(drift: float) -> LoraWeights:
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
        model.base_model.model.model.norm.weight.data += drift
        return weights_of(model, base, "svd")

    common, first, drifted = CommonBase(), live(0), live(1e-3)
    common.join(first)
    common.join(drifted)
    places = [{n: t.data_ptr() for n, t in one.frozen_tensors().items()} for one in (first, drifted)]
    assert {n for n in places[0] if places[0][n] != places[1][n]} == {"model.norm.weight"}
    norms = [one.frozen_tensors()["model.norm.weight"] for one in (first, drifted)]
    assert torch.equal(norms[1], norms[0] + 1e-3)
