"""The two tested sets differ in what PPO needs, and in nothing else."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def pins(file: str) -> dict[str, str]:
    lines = (REPOSITORY / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_set_for_ppo_differs_in_trl_alone():
    usual, ppo = pins("constraints.txt"), pins("constraints-ppo.txt")
    assert {name for name, version in usual.items() if ppo[name] != version} == {"trl"}
    assert ppo["trl"] == "1.12.0"
    # What TRL 1.12 imports without asking for it, with its own needs.
    assert ppo.keys() - usual.keys() == {"requests", "certifi", "charset_normalizer", "urllib3"}
