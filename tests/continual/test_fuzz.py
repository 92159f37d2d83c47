"""Random damage to the files of a hub: refused by an error that names the file, or harmless. Never a wrong merge."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ram_trl.continual.export import export_round
from ram_trl.continual.heartbeat import Watch
from ram_trl.continual.hub import HubError
from ram_trl.continual.semantics import Decision
from ram_trl.files import DamagedFileError
from ram_trl.problems import MergeInputError
from ram_trl.weights.sparse import BlockFileError
from tests import crash
from tests.continual.test_crash import play_round, world_in
from tests.continual.test_member import Toy, World

REFUSALS = (HubError, DamagedFileError, BlockFileError, MergeInputError, OSError)
AGENTS = ("code", "tool")
Result = dict[str, Any]


# ---- damage ---------------------------------------------------------------------------------------------------------


def damage(hub: Path, chance: random.Random) -> tuple[str, list[Path]]:
    """Damages something below `hub`; what was done, and every path that was touched."""
    everything = sorted(path for path in hub.rglob("*") if path.suffix != ".md")
    files = [path for path in everything if path.is_file()]
    kind = chance.choices(("flip", "cut", "move", "remove", "swap"), (5, 2, 3, 1, 3))[0]
    if kind == "flip":
        path = chance.choice([file for file in files if file.stat().st_size])
        content = bytearray(path.read_bytes())
        # Headers are short and matter; half of all flips go there.
        at = chance.randrange(len(content) if chance.random() < 0.5 else min(len(content), 500))
        content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        return f"flipped a bit of byte {at} of {path}", [path]
    if kind == "cut":
        path = chance.choice(files)
        size = chance.randrange(path.stat().st_size + 1)
        os.truncate(path, size)
        return f"cut {path} to {size} bytes", [path]
    if kind == "remove":
        path = chance.choice(everything)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return f"removed {path}", [path]
    if kind == "move":
        path = chance.choice(everything)
        target = path.with_name(chance.choice([*next_numbers(path), path.name + ".bak", f"x{path.name}"]))
        if target.exists():
            return swap(path, target)
        path.rename(target)
        return f"moved {path} to {target}", [path, target]
    one = chance.choice(everything)
    alike = [p for p in everything if p != one and p.is_dir() == one.is_dir() and p.suffix == one.suffix]
    alike = [p for p in alike if one not in p.parents and p not in one.parents]
    same_name = [p for p in alike if p.name == one.name]
    return swap(one, chance.choice(same_name if same_name and chance.random() < 0.7 else alike or files))


def swap(one: Path, other: Path) -> tuple[str, list[Path]]:
    aside = one.with_name("aside")
    one.rename(aside)
    if other.exists():
        other.rename(one)
    aside.rename(other)
    return f"swapped {one} and {other}", [one, other]


def next_numbers(path: Path) -> list[str]:
    """Names like this one with another number: `round-0002` for `round-0001`."""
    kind, _, number = path.name.rpartition("-")
    return [f"{kind}-{int(number) + by:0{len(number)}d}" for by in (1, 2, -1)] if number.isdecimal() else []


# ---- a visit --------------------------------------------------------------------------------------------------------


class Visit:
    """What `tool`, coming back from its checkpoint, finds in the hub; every step may be refused."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.refusals: list[Exception] = []
        self.found: Result = {}

    def attempt(self, what: str, step: Callable[[], Any]) -> None:
        try:
            self.found[what] = step()
        except REFUSALS as error:
            self.refusals.append(error)

    def run(self) -> None:
        world, hub = self.world, self.world.hub
        weights, state, step = world.checkpoints["tool"]
        model = Toy(weights)
        member = world.member("tool", model)
        self.attempt("before", hub.decisions)
        for number in range(3):
            self.attempt(f"state {number}", lambda number=number: read(crash.stores(hub).state(number)))
        for decision in self.found.get("before", []):
            for head in decision.publications:
                what = f"publication {head.agent} {head.sequence}"
                self.attempt(what, lambda head=head: read(crash.stores(hub).publication(head)))
        self.attempt("alive", lambda: Watch(hub, 9).alive(hub.agents()))
        self.attempt("joined", lambda: member.join(step, state, resume=True))
        member.leave()
        if "joined" not in self.found:
            return
        self.attempt("closed", lambda: member.close(late=True))
        self.attempt("after", hub.decisions)
        if len(self.found.get("after", [])) == 3:
            self.attempt("loaded", lambda: member.load(hub.decisions()))
            self.attempt("exported", lambda: load_file(export_round(hub, 3, world.folder) / "model.safetensors"))
        if "loaded" in self.found:
            self.found["theta"] = {n: p.detach().clone() for n, p in model.named_parameters()}
            self.attempt("state 3", lambda: read(member.state_of(3)))
        self.attempt("latest", hub.latest)
        self.attempt("swept", lambda: hub.sweep(1, AGENTS))


def read(store: Any) -> dict[str, torch.Tensor]:
    return {n: store.read(n, 0, torch.Size(store.shape(n)).numel()).reshape(store.shape(n)) for n in store.names()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def named(error: Exception, touched: list[Path], hub: Path) -> bool:
    """Whether the message has the path of what was damaged, or of the folder in which it is missing."""
    told = str(error)
    places = [place for path in touched for place in (path, *path.parents) if hub in place.parents]
    return any(str(place) in told or (str(hub) in told and place.name in told) for place in places)


# ---- the hub that is damaged ----------------------------------------------------------------------------------------


class Range:
    """A hub with two rounds made and exported and a third one published, and what may come of the third."""

    def __init__(self, folder: Path) -> None:
        world = self.world = world_in(folder)
        for agent in AGENTS:
            world.join(agent)
        for number in (1, 2):
            play_round(world)
            export_round(world.hub, number, world.folder)
        for agent in AGENTS:
            world.train(agent)
            world.publish(agent)
        world.checkpoint("tool")
        self.template = folder / "template"
        shutil.copytree(world.hub.path, self.template)
        whole = Visit(world)
        whole.run()
        assert whole.refusals == []
        assert whole.found["closed"]
        self.whole = whole.found
        self.expected = {frozenset(names): self.outcome(names) for n in (1, 2) for names in combinations(AGENTS, n)}
        assert same(whole.found["state 3"], self.expected[frozenset(AGENTS)]["state 3"])
        assert same(whole.found["theta"], self.expected[frozenset(AGENTS)]["theta"])

    def outcome(self, names: Iterable[str]) -> Result:
        """State and weights of `tool` after a third round of these agents, by the simulator."""
        crash.restore(self.world.hub.path, self.template)
        hub = self.world.hub
        heads = tuple(hub.newest_publication(name) for name in sorted(names))
        third = Decision(round=3, publications=heads)
        states = crash.merged(self.world.base, [crash.published(hub, d) for d in [*hub.decisions(), third]])
        weights, state, _ = self.world.checkpoints["tool"]
        simulator = self.world.simulator
        simulator.states = states
        agent = simulator.agents["tool"]
        agent.theta, agent.round = {n: t.clone() for n, t in weights.items()}, state.round
        agent.taken = {3: agent.published} if "tool" in names else {}
        simulator.load("tool")
        return {"state 3": states[3], "theta": agent.theta, "publications": heads}

    def check(self, seed: int, caplog: pytest.LogCaptureFixture) -> None:
        hub = self.world.hub.path
        crash.restore(hub, self.template)
        caplog.clear()
        done, touched = damage(hub, random.Random(seed))
        visit = Visit(self.world)
        try:
            visit.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {done}: {type(error).__name__}: {error}") from error
        for error in visit.refusals:
            assert named(error, touched, hub), f"seed {seed}: {done}: not named: {error!r}"
        found = visit.found
        for what in found:
            if what.startswith(("state", "publication")) and what != "state 3":
                assert same(found[what], self.whole[what]), f"seed {seed}: {done}: '{what}' is another"
        if len(found.get("after", [])) < 3:
            refused = visit.refusals or caplog.messages
            hidden = any("heartbeat" in str(path) or path.is_dir() or not path.exists() for path in touched)
            assert refused or hidden, f"seed {seed}: {done}: no round was closed, and nobody said why"
            assert found.get("after", []) == self.whole["after"][:2] or visit.refusals, (
                f"seed {seed}: {done}: a round was decided again"
            )
            return
        assert found["after"][:2] == self.whole["after"][:2], f"seed {seed}: {done}: earlier decisions changed"
        taken = found["after"][2].publications
        expected = self.expected.get(frozenset(head.agent for head in taken))
        assert expected is not None, f"seed {seed}: {done}: round 3 has {taken}"
        assert taken == expected["publications"], f"seed {seed}: {done}: round 3 has {taken}"
        for what, wanted in (("state 3", "state 3"), ("exported", "state 3"), ("theta", "theta")):
            if what in found:
                assert same(found[what], expected[wanted]), f"seed {seed}: {done}: '{what}' is wrong"


@pytest.fixture(scope="module")
def shooting(tmp_path_factory: pytest.TempPathFactory) -> Range:
    return Range(tmp_path_factory.mktemp("fuzz"))


def shoot(shooting: Range, seeds: Iterable[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    wrong = []
    for seed in seeds:
        try:
            shooting.check(seed, caplog)
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)


def test_200_random_damages(shooting, caplog):
    shoot(shooting, range(200), caplog)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_2000_random_damages(first, shooting, caplog):
    shoot(shooting, range(first, first + 250), caplog)
