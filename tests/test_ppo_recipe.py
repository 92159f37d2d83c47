"""The recipe with a PPO agent, as shipped but shorter: reward functions score for PPO, and both agents merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from ram_trl.hub import Hub
from ram_trl.recipe import RECIPES
from tests.test_launcher import check_hub, finish, start

pytestmark = pytest.mark.ppo

SHORT = {
    "base.args": "{learning_steps: 20, careless_steps: 10}",
    "agents.tool.args.total_episodes": 256,
    "agents.mem.args.max_steps": 4,
    "continual.merge_every": 2,
    "continual.heartbeat": 0.5,
    "scoring.dev": 4,
    "launch.restarts": 0,
}


@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("concurrent", marks=pytest.mark.slow)])
def test_a_ppo_and_a_grpo_agent_are_launched_and_merged(tmp_path: Path, schedule: str) -> None:
    recipe = tmp_path / "ppo.yaml"
    recipe.write_text((RECIPES / "ppo.yaml").read_text())
    (tmp_path / "tasks").symlink_to(RECIPES / "tasks")
    changes = [f"{path}={value}" for path, value in (SHORT | {"launch.out": tmp_path / "run"}).items()]
    options = [part for change in changes for part in ("--set", change)]
    finish(start(recipe, "--schedule", schedule, *options), recipe)
    decisions = Hub(tmp_path / "run" / "hub").decisions()
    assert [sorted(p.agent for p in d.publications) for d in decisions[:2]] == [["mem", "tool"]] * 2
    check_hub(tmp_path / "run", ("tool", "mem"))
