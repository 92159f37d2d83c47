"""The recipe with a PPO agent, as shipped but shorter: reward functions score for PPO, and both agents merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from ram_trl.continual.hub import Hub
from ram_trl.recipe import RECIPES
from tests.runs.test_launcher import check_hub, finish, same, start

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


def run(folder: Path, schedule: str, layout: str = "cpu") -> Path:
    folder.mkdir(exist_ok=True)
    recipe = folder / "ppo.yaml"
    recipe.write_text((RECIPES / "ppo.yaml").read_text())
    (folder / "tasks").symlink_to(RECIPES / "tasks")
    settings = SHORT | {"launch.out": folder / "run", "launch.accelerate": layout, "continual.keep_rounds": 99}
    options = [part for path, value in settings.items() for part in ("--set", f"{path}={value}")]
    finish(start(recipe, "--schedule", schedule, *options), recipe)
    return folder / "run"


def check(out: Path) -> None:
    decisions = Hub(out / "hub").decisions()
    assert [sorted(p.agent for p in d.publications) for d in decisions[:2]] == [["mem", "tool"]] * 2
    check_hub(out, ("tool", "mem"))


def test_a_ppo_and_a_grpo_agent_are_launched_and_merged(tmp_path: Path) -> None:
    check(run(tmp_path, "interleaved"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cpu", "cpu_ddp", "cpu_zero2", "cpu_zero3"])
def test_both_schedules_make_the_same_generalists(tmp_path: Path, layout: str) -> None:
    """Reward functions score for PPO on every rank, also where DeepSpeed wraps what scores."""
    concurrent = run(tmp_path / "concurrent", "concurrent", layout)
    check(concurrent)
    assert same(concurrent, run(tmp_path / "interleaved", "interleaved", layout))
