"""Real jobs, each in a process (or two) of its own, that meet in a hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ram_trl
from ram_trl.continual.hub import Hub
from tests import models
from tests.training.test_callback import QUICK, states, trainer_of

REPOSITORY = Path(__file__).parents[2]
AGENTS = ("code", "mem", "tool")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.tiny_model().save_pretrained(tmp_path / "base")
    models.tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path


def start(agent: str, folder: Path, ram: dict | None = None, ranks: int = 1) -> subprocess.Popen:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, "tests.distributed.agent", agent, str(folder), json.dumps(ram or {})]
    log = (folder / f"{agent}.log").open("w")
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(jobs: dict[str, subprocess.Popen], folder: Path) -> None:
    for agent, job in jobs.items():
        assert job.wait(timeout=200) == 0, (folder / f"{agent}.log").read_text()[-3000:]


def digests(hub: Hub, number: int) -> list[dict]:
    return [json.loads(path.read_text())["content"] for path in sorted(hub.round_folder(number).glob("digest-*.json"))]


def test_three_processes_make_the_same_generalists_as_turns_in_one(folder):
    """Same digest in all jobs, bit-equal to the same agents taking turns; `latest` loads and generates."""
    finish({agent: start(agent, folder) for agent in AGENTS}, folder)
    hub = Hub(folder / "hub")
    assert len(hub.decisions()) == 4
    for number in (1, 2, 3):
        found = digests(hub, number)
        assert len(found) == 3
        assert found[0] == found[1] == found[2]

    def work(agent: str):
        def run() -> None:
            trainer = trainer_of(agent, folder / "base", folder / "ring")
            arguments = QUICK | {"agents": AGENTS}
            ram_trl.attach(
                trainer,
                hub=folder / "ring" / "hub",
                agent=agent,
                base=folder / "base",
                merge_every=2,
                keep_rounds=99,
                **arguments,
            )
            trainer.train()

        return run

    ram_trl.take_turns({agent: work(agent) for agent in AGENTS})
    for one, other in zip(states(folder / "hub"), states(folder / "ring" / "hub"), strict=True):
        assert all(torch.equal(one[n], other[n]) for n in one)
    latest = hub.generalist_folder(hub.latest())
    generalist = AutoModelForCausalLM.from_pretrained(latest)
    assert generalist.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False).shape[1] > 2


def test_two_ranks_of_a_ddp_job_load_what_the_hub_holds(folder):
    finish({"tool": start("tool", folder, {"agents": ["tool"], "carry": False}, ranks=2)}, folder)
    generalists = states(folder / "hub")
    for number in (1, 2, 3):
        expected = {n: t.double().sum().item() for n, t in generalists[number].items()}
        for rank in (0, 1):
            seen = json.loads((folder / f"seen-tool-{2 * number}-rank{rank}.json").read_text())
            assert seen["world"] == 2
            assert seen["weights"] == expected
    folders = sorted((folder / "hub" / "state" / "round-0001").glob("rank-*"))
    assert [path.name for path in folders] == [f"rank-0000{r}-of-00002.safetensors" for r in (0, 1)]


def test_a_killed_job_is_left_behind_and_the_others_finish(folder):
    ram = {"patience": 3, "agents": list(AGENTS[:2])}
    jobs = {agent: start(agent, folder, ram) for agent in AGENTS[:2]}
    hub = Hub(folder / "hub")
    deadline = time.monotonic() + 120
    while not (hub.path / "rounds" / "round-0001" / "decision.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    jobs["code"].send_signal(signal.SIGKILL)
    jobs["code"].wait()
    finish({"mem": jobs["mem"]}, folder)
    decisions = hub.decisions()
    assert decisions[-1].of("mem") is not None
    consumed = [(p.agent, p.sequence) for d in decisions for p in d.publications]
    assert len(consumed) == len(set(consumed))
    AutoModelForCausalLM.from_pretrained(hub.generalist_folder(hub.latest()))
