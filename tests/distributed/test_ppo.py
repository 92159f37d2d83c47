"""PPO on shards (TRL 1.12): real jobs of two ranks, beside an agent in this process. Run by `make test-ppo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import models
from tests.distributed.launching import end
from tests.distributed.odd import odd_model
from tests.distributed.test_shards import ALL, QUICK, ROUNDS, Case, alone, check, run, seen
from tests.training.test_turns import LAYOUTS, digests

pytestmark = pytest.mark.ppo


def ppo(case: Case) -> Case:
    """That layout for PPO, which heeds no `bf16` of its arguments: the launch has to say it."""
    engine = case.engine | ({"bf16": {"enabled": True}} if case.bf16 else {})
    flags = ("--mixed_precision", "bf16") if case.bf16 and case.shipped else ()
    return replace(case, settings={"kind": "ppo"}, engine=engine, flags=flags)


REPRESENTATIVE = {"zero2-bf16": ppo(QUICK["zero2-bf16"]), "zero3-bf16": ppo(QUICK["zero3-bf16"])}
REST = {
    name: ppo((QUICK | ALL)[name])
    for name in (
        "ddp-fp32", "stage0-fp32", "zero1-fp32", "zero2-fp32", "zero2-bf16-offload", "zero3-fp32", "zero3-bf16-offload"
    )
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    odd_model().save_pretrained(tmp_path / "base")
    models.tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path


def check_ppo(case: Case, folder: Path) -> None:
    """The policy is what the simulator says, on every rank; the value model is what it was before the merge."""
    peer = run(case, folder)
    check(case, folder, peer, rounded=case.bf16 and case.stage is not None)
    for step in ROUNDS:
        for rank in (0, 1):
            before = seen(folder, f"before-{step}", rank, "value")
            after = seen(folder, f"after-{step}", rank, "value")
            assert len(before) > 20
            assert all(torch.equal(before[n], after[n]) for n in before)
    first, last = (seen(folder, f"before-{step}", 0, "value") for step in (2, 6))
    assert any(not torch.equal(first[n], last[n]) for n in first)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_policy_matches_the_simulator_on_every_rank(folder, name):
    check_ppo(REPRESENTATIVE[name], folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_the_policy_matches_the_simulator_in_every_layout(folder, name):
    check_ppo(REST[name], folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_baton_across_two_ranks(tmp_path, layout):
    found = digests(tmp_path, layout, "ppo")
    assert (found["world"], found["layouts"]) == (2, [LAYOUTS[layout]])
    assert found["alone"]["tool"] != found["alone"]["code"]
    assert found["in turns"] == found["alone"]
    assert found["parked"] == found["alone"]


def test_the_plain_callback_refuses_zero_2_and_names_attach(folder):
    """It is handed the optimizer as it was before DeepSpeed took it over, so it cannot know the masters."""
    job = alone(REPRESENTATIVE["zero2-bf16"], folder, attach=False)
    try:
        assert job.wait(200) != 0
    finally:
        end(job)
    log = (folder / "log.txt").read_text()
    assert "LayoutError: this model cannot be merged while it trains: it has DeepSpeed ZeRO parameters without" in log
    assert "use ram_trl.attach(trainer, …)" in log
