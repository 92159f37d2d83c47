"""What goes wrong in jobs of several ranks: a rank raises, a rank is killed, the job comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ram_trl.continual.hub import Hub
from tests import models
from tests.distributed.launching import end, finish
from tests.distributed.odd import OddModel, odd_model
from tests.distributed.test_shards import ALL, QUICK, Case, Peer, alone, assert_same, seen, start, state

SLOW = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    odd_model().save_pretrained(tmp_path / "base")
    models.tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path


def fails(job: Any, timeout: float = 200) -> None:
    """The job ends by itself, and not well."""
    try:
        assert job.wait(timeout) != 0
    finally:
        end(job)


@SLOW
@pytest.mark.parametrize("where", ["count", "publish", "load"])
@pytest.mark.parametrize("layout", ["zero2-bf16", "zero3-bf16"])
def test_an_error_on_one_rank_is_raised_on_all_before_anything_is_committed(folder, layout, where):
    fails(alone(QUICK[layout], folder, fail={"rank": 1, "where": where}))
    first, second = (json.loads((folder / f"error-rank{rank}.json").read_text()) for rank in (0, 1))
    assert second == "OSError: the disk of this rank is gone"
    assert first == f"JobOSError: rank 1 of this job failed: {second}"
    for rank in (0, 1):
        assert_same(seen(folder, "error", rank, "copy"), seen(folder, "before-4", rank, "copy"), rank)
    made = 2 if where == "load" else 1
    hub = Hub(folder / "hub")
    assert len(hub.decisions()) == made
    assert all(torch.isfinite(tensor).all() for tensor in state(folder, made).values())  # every checksum fits
    for generalist in (hub.path / "generalist").glob("round-*"):
        OddModel.from_pretrained(generalist)


@SLOW
def test_an_error_in_what_rank_0_does_for_all_is_raised_on_all(folder):
    fails(alone(QUICK["zero2-bf16"], folder, fail={"rank": 0, "where": "sweep"}), timeout=100)
    first, second = (json.loads((folder / f"error-rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == "OSError: the disk of this rank is gone"
    assert second == f"JobOSError: rank 0 of this job failed: {first}"


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}


@SLOW
@pytest.mark.parametrize(
    "layout", ["zero1-fp32", "zero2-bf16", "zero3-fp32", "zero3-bf16", "zero3-bf16-offload", "fsdp2-fp32"]
)
def test_a_job_with_a_killed_rank_dies_and_goes_on_from_its_checkpoint(folder, layout):
    """Killed at step 5 of rounds of 2 steps, back from the checkpoint of step 4: as if nothing had happened."""
    case = (QUICK | ALL)[layout]
    job = {"training": CHECKPOINTS, "still": False}
    fails(alone(case, folder, **job, die={"rank": 1, "step": 5}))
    assert len(Hub(folder / "hub").decisions()) == 2
    broken = replace(case, settings={"resume": str(folder / "out" / "checkpoint-4")})
    finish(alone(broken, folder, **job), folder)
    unbroken = folder / "unbroken"
    unbroken.mkdir()
    shutil.copytree(folder / "base", unbroken / "base")
    finish(alone(case, unbroken, **job), unbroken)
    assert len(Hub(folder / "hub").decisions()) == len(Hub(unbroken / "hub").decisions()) >= 3
    for number in (1, 2, 3):
        assert_same(state(folder, number), state(unbroken, number), number)
    for rank in (0, 1):
        for kind in ("master", "copy"):
            assert_same(seen(folder, "after-6", rank, kind), seen(unbroken, "after-6", rank, kind), (rank, kind))


@SLOW
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_job_goes_on_with_another_number_of_ranks(folder, stage, ranks):
    """Through DeepSpeed's universal checkpoints; what the callback keeps in a checkpoint knows of no ranks."""
    case = Case(stage, bf16=True)
    fails(alone(case, folder, training=CHECKPOINTS, still=False, record=1, die={"rank": 1, "step": 4}))
    checkpoint = folder / "out" / "checkpoint-3"
    convert = ["--input_folder", checkpoint / "global_step3", "--output_folder", checkpoint / "global_step3_universal"]
    convert += ["--inject_missing_state"] if stage == 2 else []
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *convert],
        env=environment,
        check=True,
        timeout=200,
    )
    other = replace(case, ranks=ranks, engine={"checkpoint": {"load_universal": True}})
    finish(alone(other, folder, training=CHECKPOINTS, still=False, resume=str(checkpoint)), folder)
    held = seen(folder, "before-3", 0, "master")
    assert any(not torch.equal(held[n], t) for n, t in state(folder, 1).items())  # its own update since round 1
    for rank in range(ranks):
        assert_same(seen(folder, "after-begin", rank, "master"), held, rank)
        assert_same(seen(folder, "after-begin", rank, "copy"), {n: t.bfloat16() for n, t in held.items()}, rank)
    assert len(Hub(folder / "hub").decisions()) >= 3


@SLOW
@pytest.mark.parametrize("layout", ["zero2-bf16", "zero3-bf16", "fsdp2-bf16"])
def test_no_collective_times_out_while_the_job_waits_for_another(folder, layout):
    """TRAPS 2.13: collectives may take 15 s here, and the other agent comes after 40; only rank 0 watches the hub."""
    case = replace(QUICK[layout], settings={"training": {"ddp_timeout": 15, "max_steps": 2}, "still": False})
    job = start(case, folder)
    peer = Peer(folder)
    try:
        deadline = time.monotonic() + 150
        while not list((folder / "hub" / "agents" / "tool").glob("publication-*/manifest.json")):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(40)
        assert job.poll() is None
        peer.join()
        peer.meet(2)
        peer.member.finish(2)
        finish(job, folder)
    finally:
        end(job)
        peer.member.leave()
    for rank in (0, 1):
        assert (folder / f"after-2-rank{rank}.safetensors").exists()
    assert [p.agent for p in Hub(folder / "hub").decisions()[0].publications] == ["code", "tool"]


def digests(hub: Hub, number: int) -> list[dict[str, str]]:
    return [json.loads(path.read_text())["content"] for path in sorted(hub.round_folder(number).glob("digest-*.json"))]


def test_jobs_of_different_kinds_load_the_same_generalists(folder):
    """ZeRO-3 on two ranks, a process alone, ZeRO-2 on two ranks, all in one hub that starts from the rounded base."""
    kinds = {"mem": QUICK["zero3-bf16"], "code": Case(layout="unsharded", ranks=1), "tool": QUICK["zero2-bf16"]}
    jobs = {}
    try:
        for agent, case in kinds.items():
            (folder / agent).mkdir()
            ram = {"agent": agent, "hub": str(folder / "hub"), "agents": sorted(kinds), "carry": False}
            jobs[agent] = start(replace(case, settings={"base": str(folder / "base")}), folder / agent, **ram)
        for agent, job in jobs.items():
            finish(job, folder / agent, 280)
    finally:
        for job in jobs.values():
            end(job)
    hub = Hub(folder / "hub")
    for number in (1, 2, 3):
        found = digests(hub, number)
        assert len(found) == 3
        assert found[0] == found[1] == found[2]
        expected = state(folder, number)
        for agent, case in kinds.items():
            for rank in range(case.ranks):
                assert_same(seen(folder / agent, f"after-{2 * number}", rank, "master"), expected, (agent, rank))
    rounded = {name: tensor.bfloat16().float() for name, tensor in state(folder, 0).items()}
    if hub.described()["founding"]["rounded"]:
        assert_same(state(folder, 0), rounded, "state 0")
