"""The life of agents in a hub, against the simulator of the contract, bit for bit."""

from __future__ import annotations

import copy
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ram_trl.config import ContinualConfig, MergeConfig
from ram_trl.continual.hub import Hub
from ram_trl.continual.member import Member, MemberState
from ram_trl.team import Team
from ram_trl.weights.live import LiveWeights
from tests import models
from tests.simulator import Simulator

SHAPES = {"model.a.weight": (9, 5), "model.b.weight": (1,), "model.c.bias": (7,), "model.d.weight": (33, 2)}
CRITERIA = {
    "epsilon": ({"epsilon": 0.002}, ("epsilon", 0.002)),
    "top": ({"top": 0.25}, ("top", 0.25)),
    "ulp": ({"ulp": True}, ("ulp", 0.0)),
}


class Toy(torch.nn.Module):
    """A model with parameters of the given shapes; names hold dots, as real ones do."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            module: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(tensor.clone()))


def base_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}


def save_base(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    models.save_tensors(folder, weights)
    return folder


def step_of(agent: str, step: int) -> dict[str, torch.Tensor]:
    """A training step: some entries move a little, some a lot, most not at all."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{agent} {step}".encode()))
    moves = {}
    for name, shape in SHAPES.items():
        size = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0005, 0.01)
        size = torch.where(torch.rand(shape, generator=generator) < 0.4, size, 0.0)
        moves[name] = torch.randn(shape, generator=generator) * size
    return moves


class World:
    """Real members over one hub, and the simulator beside them; `check` compares everything."""

    def __init__(self, folder: Path, criterion: str, carry: bool, observe: bool, merge: dict | None = None) -> None:
        knobs, simulated = CRITERIA[criterion]
        self.base = base_weights()
        self.folder = save_base(folder / "base", self.base)
        self.hub = Hub(folder / "hub")
        self.config = ContinualConfig(
            merge_every=1,
            merge=MergeConfig(**knobs, **(merge or {})),
            resync="none" if observe else "generalist",
            carry=carry,
            heartbeat=0.001,
            on_hub_error="raise",
        )
        self.simulator = Simulator(self.base, simulated, carry=carry, observe=observe)
        self.members: dict[str, Member] = {}
        self.models: dict[str, Toy] = {}
        self.steps: dict[str, int] = {}
        self.checkpoints: dict[str, tuple[dict[str, torch.Tensor], MemberState, int]] = {}

    def member(self, agent: str, model: Toy) -> Member:
        return Member(self.hub, agent, self.folder, LiveWeights(model, Team()), self.config)

    def join(self, agent: str) -> None:
        self.models[agent] = Toy(self.base)
        self.members[agent] = self.member(agent, self.models[agent])
        self.members[agent].join(0, None, resume=False)
        self.members[agent].leave()
        self.steps[agent] = 0
        self.simulator.join(agent)
        self.checkpoint(agent)

    def train(self, agent: str) -> None:
        for name, move in step_of(agent, self.steps[agent]).items():
            with torch.no_grad():
                self.models[agent].get_parameter(name).add_(move)
            self.simulator.agents[agent].theta[name] = self.simulator.agents[agent].theta[name] + move
        self.steps[agent] += 1

    def publish(self, agent: str) -> None:
        self.members[agent].catch_up()
        self.members[agent].publish(self.steps[agent])
        self.simulator.publish(agent)

    def close(self, agent: str) -> None:
        member = self.members[agent]
        closed = member.close(late=True)
        if self.simulator.eligible() and closed:
            self.simulator.close()
        assert len(self.hub.decisions()) == len(self.simulator.states) - 1

    def meet(self, agent: str) -> None:
        """A merge point at which this agent does not wait for the others."""
        self.train(agent)
        self.publish(agent)
        self.close(agent)
        self.load(agent)

    def load(self, agent: str) -> None:
        decisions = self.hub.decisions()
        if len(decisions) > self.members[agent].round and not self.members[agent].observes:
            self.members[agent].load(decisions)
            self.simulator.load(agent)

    def finish(self, agent: str) -> None:
        """The agent ends; if all others have, the last one closes a final round."""
        before = len(self.hub.decisions())
        self.simulator.publish(agent)
        self.members[agent].finish(self.steps[agent])
        if len(self.hub.decisions()) > before:
            assert all(self.hub.is_done(name) for name in self.members)
            self.simulator.close()

    def checkpoint(self, agent: str) -> None:
        weights = {name: p.detach().clone() for name, p in self.models[agent].named_parameters()}
        self.checkpoints[agent] = (weights, self.members[agent].state(), self.steps[agent])

    def restart(self, agent: str) -> None:
        """The process dies and comes back from its last checkpoint."""
        weights, state, self.steps[agent] = self.checkpoints[agent]
        self.models[agent] = Toy(weights)
        self.members[agent] = self.member(agent, self.models[agent])
        self.members[agent].join(self.steps[agent], copy.deepcopy(state), resume=True)
        self.members[agent].leave()
        self.simulator.restart(agent, weights, state.round)

    def merged_then_restarted(self, agent: str) -> None:
        """A round consumes what the checkpoint holds, or part of it; then the process dies."""
        self.train(agent)
        self.checkpoint(agent)
        self.meet(agent)
        self.restart(agent)
        self.meet(agent)

    def passed_by_then_restarted(self, agent: str) -> None:
        """Rounds go on without the agent after its checkpoint; it comes back with an update of its own."""
        self.train(agent)
        self.checkpoint(agent)
        for other in sorted(self.members.keys() - {agent}):
            self.meet(other)
        self.restart(agent)
        self.meet(agent)

    def check(self) -> None:
        for agent, model in self.models.items():
            for name, parameter in model.named_parameters():
                expected = self.simulator.agents[agent].theta[name]
                assert torch.equal(parameter.detach(), expected), (agent, name)
        for number, state in enumerate(self.simulator.states):
            made = next(iter(self.members.values())).state_of(number)
            for name, expected in state.items():
                assert torch.equal(made.read(name, 0, expected.numel()), expected.flatten()), (number, name)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "train",
                "publish",
                "close",
                "load",
                "meet",
                "meet",
                "checkpoint",
                "restart",
                "join",
                "finish",
                "merged_then_restarted",
                "passed_by_then_restarted",
            ]
        ),
        st.sampled_from(["code", "mem", "tool"]),
    ),
    min_size=4,
    max_size=30,
)


CASES = {
    "operations": OPERATIONS,
    "criterion": st.sampled_from(sorted(CRITERIA)),
    "carry": st.booleans(),
    "observe": st.booleans(),
}


@pytest.mark.parametrize("criterion", sorted(CRITERIA))
@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("setback", ["merged_then_restarted", "passed_by_then_restarted"])
def test_restarts_after_rounds_match_the_simulator(setback, carry, criterion):
    """Whether a round consumed something since the checkpoint decides what may be carried."""
    run_schedule([("meet", "tool"), ("meet", "code"), (setback, "tool"), ("meet", "code")], criterion, carry, False)


@given(**CASES)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_schedule_matches_the_simulator_bit_for_bit(operations, criterion, carry, observe):
    """Missed rounds, late joiners, uneven steps, restarts at every point."""
    run_schedule(operations, criterion, carry, observe)


@pytest.mark.slow
@given(**CASES)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_hundreds_of_schedules_match_the_simulator_bit_for_bit(operations, criterion, carry, observe):
    run_schedule(operations, criterion, carry, observe)


def run_schedule(operations: list[tuple[str, str]], criterion: str, carry: bool, observe: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), criterion, carry, observe)
        world.join("tool")
        world.join("code")
        for operation, agent in operations:
            if operation == "join":
                if agent not in world.members:
                    world.join(agent)
            elif agent in world.members:
                getattr(world, operation)(agent)
        world.check()


@pytest.mark.parametrize("observe", [False, True])
def test_the_end_of_a_run_with_nothing_left_closes_no_further_round(tmp_path, observe):
    world = World(tmp_path, "epsilon", carry=False, observe=observe)
    for agent in ("code", "tool"):
        world.join(agent)
        world.train(agent)
    for agent in ("code", "tool"):
        world.publish(agent)
    world.close("code")
    for agent in ("code", "tool"):
        world.load(agent)
        world.finish(agent)
    assert len(world.hub.decisions()) == 1
    world.check()


def test_the_end_of_a_run_merges_what_is_left_of_a_single_agent(tmp_path):
    world = World(tmp_path, "epsilon", carry=True, observe=False)
    for agent in ("code", "tool"):
        world.join(agent)
    world.meet("code")
    world.load("tool")
    world.train("tool")
    world.finish("code")
    world.finish("tool")
    assert len(world.hub.decisions()) == 2
    world.check()


@pytest.mark.parametrize("damaged", ["publication", "older state"])
def test_what_stands_on_damaged_numbers_is_refused_by_name_and_left_out(tmp_path, caplog, damaged):
    """An agent that never loaded round 1 publishes against state 0, which no other agent reads any more."""
    world = World(tmp_path, "epsilon", carry=True, observe=False)
    for agent in ("code", "tool"):
        world.join(agent)
    world.meet("code")
    for agent in ("tool", "code"):
        world.train(agent)
        world.members[agent].publish(world.steps[agent])
    folder = world.hub.state_folder(0) if damaged == "older state" else world.hub.publication_folder("tool", 1)
    path = next(folder.glob("*.safetensors"))
    flip_payload(path)
    assert world.members["code"].close(late=True)
    assert [p.agent for p in world.hub.decisions()[-1].publications] == ["code"]
    assert "agent 'tool': its publication is refused, rounds go on without it" in caplog.text
    assert str(path) in caplog.text


def flip_payload(path: Path) -> None:
    """Flips a bit of the first stored value."""
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    path.write_bytes(content)
