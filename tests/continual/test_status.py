"""`ram-trl status` tells what the files of a hub say."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from ram_trl.cli import app
from ram_trl.continual.export import round_report
from ram_trl.continual.status import hub_status, show_status
from tests.continual.test_member import World


def two_rounds(tmp_path) -> World:
    world = World(tmp_path, "top", carry=True, observe=False)
    for agent in ("tool", "code"):
        world.join(agent)
    for _ in range(2):
        for agent in ("tool", "code"):
            world.train(agent)
            world.publish(agent)
        world.close("tool")
        for agent in ("tool", "code"):
            world.load(agent)
            world.members[agent]._tell(world.steps[agent])
    return world


def test_status_matches_the_hub(tmp_path):
    world = two_rounds(tmp_path)
    world.hub.finish("code", 2)
    status = hub_status(world.hub)
    assert [(a.name, a.state, a.step, a.round, a.publication) for a in status.agents] == [
        ("code", "done", 2, 2, 2),
        ("tool", "joined", 2, 2, 2),
    ]
    assert [row.agents for row in status.rounds] == [{"code": 0, "tool": 0}] * 2
    assert status.rounds[0].density.keys() == {"code", "tool"}
    assert 0 < status.rounds[0].density["tool"] < 0.5
    assert status.rounds[1].lambda_["tool"] >= 1
    assert status.latest is None
    told = round_report(world.hub, 1)
    assert told is not None
    assert told[1].criterion == "top 0.25"
    assert [a.state for a in hub_status(world.hub, alive=["tool"]).agents] == ["done", "alive"]
    assert [a.state for a in hub_status(world.hub, alive=[]).agents] == ["done", "silent"]
    show_status(status)


def test_command_prints_tables_json_and_errors(tmp_path):
    two_rounds(tmp_path)
    printed = CliRunner().invoke(app, ["status", str(tmp_path / "hub")])
    assert printed.exit_code == 0
    assert "tool" in printed.output
    as_json = CliRunner().invoke(app, ["status", str(tmp_path / "hub"), "--json"])
    assert len(json.loads(as_json.stdout)["rounds"]) == 2
    wrong = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "is not a hub" in wrong.output


def test_watching_ends_when_all_agents_are_done(tmp_path):
    world = two_rounds(tmp_path)
    for agent in ("tool", "code"):
        world.hub.finish(agent, 2)
    watched = CliRunner().invoke(app, ["status", str(tmp_path / "hub"), "--watch", "--every", "0.01"])
    assert watched.exit_code == 0
    assert "done" in watched.output
