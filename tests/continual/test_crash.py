"""kill -9 at every system call that changes the hub, and at random times; what is left, and who finishes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ram_trl.continual.export import export_round
from ram_trl.continual.member import MemberState
from ram_trl.continual.semantics import Decision
from tests import crash
from tests.continual.test_member import Toy, World, step_of


def world_in(folder: Path) -> World:
    world = World(folder, "top", carry=True, observe=False)
    world.config = world.config.model_copy(update={"patience": 0.001, "timeout": 0.05})
    return world


def play_round(world: World, publish: tuple[str, ...] = ("tool", "code")) -> None:
    for agent in publish:
        world.train(agent)
        world.publish(agent)
    world.close("tool")
    for agent in world.members:
        world.load(agent)


def nothing(world: World) -> None:
    pass


def one_round(world: World) -> None:
    """Round 1 is loaded by both, they trained on, `code` has published again."""
    for agent in ("tool", "code"):
        world.join(agent)
    play_round(world)
    for agent in ("tool", "code"):
        world.train(agent)
        world.checkpoint(agent)
    world.publish("code")


def both_published(world: World) -> None:
    one_round(world)
    world.publish("tool")


def decided(world: World) -> None:
    both_published(world)
    heads = [world.hub.newest_publication(agent) for agent in ("code", "tool")]
    assert world.hub.decide(Decision(round=2, publications=tuple(heads)))
    world.simulator.close()


def round_two_made(world: World) -> None:
    both_published(world)
    export_round(world.hub, 1, world.folder)
    world.close("code")


def code_is_done(world: World) -> None:
    one_round(world)
    world.members["code"].finish(world.steps["code"])
    world.simulator.publish("code")


def three_rounds(world: World) -> None:
    one_round(world)
    for number in (1, 2, 3):
        if number > 1:
            play_round(world)
        export_round(world.hub, number, world.folder)


def join(world: World) -> None:
    world.join("tool")


def publish(world: World) -> None:
    world.members["tool"].publish(world.steps["tool"])


def decide_and_make(world: World) -> None:
    assert world.members["code"].close(late=True)


def make_and_load(world: World) -> None:
    world.members["code"].load(world.hub.decisions())


def export(world: World) -> None:
    export_round(world.hub, 2, world.folder)


def finish(world: World) -> None:
    world.members["tool"].finish(world.steps["tool"])


def sweep(world: World) -> None:
    world.hub.sweep(1, ["tool", "code"])


def both_join(world: World) -> None:
    world.join("code")
    world.models["tool"] = Toy(world.base)
    world.members["tool"] = world.member("tool", world.models["tool"])
    world.members["tool"].join(0, None, resume=True)
    world.members["tool"].leave()
    world.steps["tool"] = 0
    world.simulator.join("tool")
    play_round(world)
    world.check()


def tell_simulator_what_is_visible(world: World, rounds: int) -> None:
    """The simulator does what the dead process did: all of it or nothing."""
    if world.hub.publication_folder("tool", 2).exists() and world.simulator.agents["tool"].published.base_round == 0:
        world.simulator.publish("tool")
    if len(world.hub.decisions()) == rounds:
        world.simulator.close()


def code_goes_on_alone(world: World) -> None:
    tell_simulator_what_is_visible(world, 2)
    world.close("code")
    world.load("code")
    world.check()


def tool_comes_back(world: World) -> None:
    tell_simulator_what_is_visible(world, 2)
    world.restart("tool")
    world.publish("tool")
    world.close("code")
    world.load("code")
    world.load("tool")
    world.check()


def tool_closes(world: World) -> None:
    if len(world.hub.decisions()) == 2:
        world.simulator.close()
    else:
        world.close("tool")
    world.load("tool")
    world.restart("code")
    world.check()


def tool_loads(world: World) -> None:
    world.load("tool")
    world.restart("code")
    world.check()


def exported_again(world: World) -> None:
    export_round(world.hub, 2, world.folder)
    assert world.hub.latest() == 2


def tool_finishes(world: World) -> None:
    tell_simulator_what_is_visible(world, 2)
    world.restart("tool")
    world.members["tool"].finish(world.steps["tool"])
    world.simulator.publish("tool")
    if len(world.hub.decisions()) == len(world.simulator.states):
        world.simulator.close()
    assert world.hub.is_done("tool")
    world.check()


def swept_again_and_tool_comes_back(world: World) -> None:
    """From a checkpoint of the round that is being removed: its update is carried, or dropped by name."""
    world.restart("tool")
    world.members["tool"].publish(world.steps["tool"])
    sweep(world)


@dataclass
class Case:
    prepare: Callable[[World], None]
    act: Callable[[World], None]
    survive: Callable[[World], None]
    calls: set[str]
    same: bool = True  # whether the states must be those of a run in which nobody died


CASES = {
    "join": Case(nothing, join, both_join, {"write", "fsync", "link", "mkdir", "rename", "replace"}),
    "publish": Case(one_round, publish, tool_comes_back, {"write", "pwrite", "fsync", "mkdir", "rename", "replace"}),
    "publish, no return": Case(one_round, publish, code_goes_on_alone, {"write", "rename"}, same=False),
    "decide": Case(both_published, decide_and_make, tool_closes, {"write", "pwrite", "fsync", "link", "rename"}),
    "state": Case(decided, make_and_load, tool_loads, {"write", "pwrite", "fsync", "mkdir", "rename", "replace"}),
    "export": Case(round_two_made, export, exported_again, {"pwrite", "fsync", "mkdir", "rename", "replace"}),
    "finish": Case(code_is_done, finish, tool_finishes, {"write", "fsync", "link", "rename", "replace"}, same=False),
    "sweep": Case(three_rounds, sweep, swept_again_and_tool_comes_back, {"unlink", "rmdir"}, same=False),
}


LONG = ("publish, no return", "finish")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in CASES])
def test_kill_before_every_system_call(name, tmp_path):
    """Nothing half-made is visible, and whoever is left finishes with the same bytes."""
    kill_at_every_call(CASES[name], ("before",), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kill_after_every_system_call_and_in_the_middle_of_writes(name, tmp_path):
    kill_at_every_call(CASES[name], ("half", "after"), tmp_path)


def kill_at_every_call(case: Case, times: tuple[str, ...], tmp_path: Path) -> None:
    world = world_in(tmp_path)
    case.prepare(world)
    hub, template = world.hub.path, tmp_path / "template"
    if hub.exists():
        shutil.copytree(hub, template)
    before = crash.made_things(hub)

    def act() -> None:
        case.act(world)

    def survive() -> None:
        case.survive(world)
        crash.check_consumed_once(world.hub.decisions())
        crash.check_latest(world.hub, world.folder)

    calls = crash.calls_of(act)
    assert case.calls <= set(calls), calls
    whole = before | crash.made_things(hub)  # also what a sweep removes
    crash.forked(survive)
    whole |= {thing: files for thing, files in crash.made_things(hub).items() if thing not in whole}

    killed = 0
    writes = set(crash.WRITES)
    # Dying after a write or flush leaves what dying before the next call does.
    when_to_kill = {"before": set(calls), "half": writes, "after": set(calls) - writes - {"fsync"}}
    for when in times:
        for number, call in enumerate(calls):
            if call not in when_to_kill[when]:
                continue
            crash.restore(hub, template)
            assert crash.forked(act, number, when) is crash.DIED, f"call {number} of {len(calls)} was not made"
            killed += 1
            told = f"killed {when} call {number} ({call})"
            for thing, files in crash.made_things(hub).items():
                assert files == whole[thing], f"{told}: {thing} is half-made"
            for made in (hub / "state").glob("round-*[1-9]"):
                assert (hub / "rounds" / made.name / "report.json").exists(), f"{told}: {made.name} has no report"
            try:
                crash.check_latest(world.hub, world.folder)
                crash.forked(survive)
            except (AssertionError, ValueError, OSError) as error:
                raise AssertionError(f"{told}: {error}") from error
            if case.same:
                states = {thing: files for thing, files in crash.made_things(hub).items() if "state" in thing}
                assert states == {thing: files for thing, files in whole.items() if "state" in thing}, told
    crash.restore(hub, template)
    assert crash.forked(act, len(calls), "before") is None, "the action makes more calls than were counted"
    assert killed >= len(case.calls)


def checkpoint_path(world: World, agent: str) -> Path:
    return world.folder.parent / f"{agent}.pt"


def save_checkpoint(world: World, agent: str) -> None:
    """As a trainer does: the agent's weights, its member state and its step, in one piece."""
    weights = {name: p.detach().clone() for name, p in world.models[agent].named_parameters()}
    path = checkpoint_path(world, agent)
    torch.save((weights, world.members[agent].state().model_dump(), world.steps[agent]), path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def come_back(world: World, agent: str) -> None:
    path = checkpoint_path(world, agent)
    weights, state, world.steps[agent] = torch.load(path) if path.exists() else (world.base, None, 0)
    world.models[agent] = Toy(weights)
    world.members[agent] = world.member(agent, world.models[agent])
    world.members[agent].join(world.steps[agent], state and MemberState(**state), resume=True)
    world.members[agent].leave()


def advance(world: World, agent: str) -> None:
    for name, move in step_of(agent, world.steps[agent]).items():
        with torch.no_grad():
            world.models[agent].get_parameter(name).add_(move)
    world.steps[agent] += 1


def live(world: World, rounds: int) -> None:
    """Two agents come back and run rounds, saving checkpoints and exporting."""
    for agent in ("code", "tool"):
        come_back(world, agent)
    for _ in range(rounds):
        for agent in ("code", "tool"):
            member = world.members[agent]
            advance(world, agent)
            member.catch_up()
            member.publish(world.steps[agent])
        world.members["code"].close(late=True)
        for agent in ("code", "tool"):
            if len(world.hub.decisions()) > world.members[agent].round:
                world.members[agent].load(world.hub.decisions())
            save_checkpoint(world, agent)
        export_round(world.hub, len(world.hub.decisions()), world.folder)


def kill_at_random(folder: Path, seed: int, kills: int) -> int:
    """Kills the only process of a run again and again; returns how many rounds were made all the same."""
    chance = random.Random(seed)
    world = world_in(folder)
    base = world.base
    crash.forked(lambda: live(world, 1))
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            live(world, 1000)
            os._exit(1)
        time.sleep(chance.uniform(0.005, 0.12))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the child failed by itself: {status}"
        for number in range(1, len(world.hub.decisions()) + 1):
            exported = world.hub.generalist_folder(number)
            assert not exported.exists() or (exported / "model.safetensors").exists()
        crash.check_latest(world.hub, world.folder)
        decisions = len(world.hub.decisions())
        crash.forked(lambda: live(world, 1))
        assert len(world.hub.decisions()) == decisions + 1
        crash.replay(world.hub, base)
        crash.check_latest(world.hub, world.folder)
    return len(world.hub.decisions())


@pytest.mark.parametrize("seed", range(2))
def test_20_kills_at_random_times(seed, tmp_path):
    assert kill_at_random(tmp_path, seed, 10) >= 11


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_300_kills_at_random_times(seed, tmp_path):
    assert kill_at_random(tmp_path, seed, 10) >= 11
