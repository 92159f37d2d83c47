"""Agents that take turns compute, to the bit, what each computes alone; and not if something is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ram_trl.runs.hardware import LAUNCH
from ram_trl.runs.ports import HeldPort
from ram_trl.training import turns
from ram_trl.training.turns import _ProcessState
from tests import models, ring

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ring") / "base"
    models.tiny_model().save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(base: Path) -> dict[str, str]:
    return ring.run(["tool"], base, base.parent) | ring.run(["code"], base, base.parent)


@pytest.mark.parametrize("park", [False, True], ids=["", "parked"])
def test_turns_leave_no_trace(base, alone, park):
    assert ring.run(ring.UNLIKE, base, base.parent, park=park) == alone


def test_resting_at_the_start_of_a_step_leaves_no_trace_either(base, alone):
    assert ring.run(ring.UNLIKE, base, base.parent, at_begin=True) == alone


def test_without_own_random_numbers_both_agents_differ(base, alone, monkeypatch):
    real = _ProcessState.show

    def show(self: _ProcessState) -> None:
        torch_cpu, python, numpy = torch.get_rng_state(), turns.random.getstate(), turns.np.random.get_state()
        real(self)
        torch.set_rng_state(torch_cpu)
        turns.random.setstate(python)
        turns.np.random.set_state(numpy)

    monkeypatch.setattr(_ProcessState, "show", show)
    found = ring.run(ring.UNLIKE, base, base.parent)
    assert found["tool"] != alone["tool"]
    assert found["code"] != alone["code"]


def test_without_own_singletons_the_other_agent_s_accumulation_is_seen(base, alone, monkeypatch):
    real = _ProcessState.show

    def show(self: _ProcessState) -> None:
        held = dict(turns.GradientState._shared_state)
        real(self)
        turns.GradientState._shared_state.clear()
        turns.GradientState._shared_state.update(held)

    monkeypatch.setattr(_ProcessState, "show", show)
    assert ring.run(ring.UNLIKE, base, base.parent, at_begin=True)["tool"] != alone["tool"]


def digests(folder: Path, layout: str, kind: str = "grpo") -> dict:
    """Runs the ring in a job of two ranks; what its ranks found, which has to be the same."""
    models.tiny_model().save_pretrained(folder / "base")
    models.tokenizer().save_pretrained(folder / "base")
    port = HeldPort()
    job = ["-m", "tests.ring", str(folder), kind]
    if layout == "cpu_ddp":
        command = ["torch.distributed.run", "--nproc-per-node=2", "--master-port", str(port.number), *job]
    else:
        config = str(LAUNCH / "accelerate" / f"{layout}.yaml")
        command = [
            "accelerate.commands.launch",
            "--config_file",
            config,
            "--main_process_port",
            str(port.number),
            *job,
        ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, "-m", *command]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=400, check=False
        )
    port.close()
    assert done.returncode == 0, (folder / "log.txt").read_text()[-4000:]
    ranks = [json.loads((folder / f"digests-{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    return ranks[0]


LAYOUTS = {"cpu_ddp": "MULTI_CPU", "cpu_zero2": "DEEPSPEED", "cpu_zero3": "DEEPSPEED"}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param("cpu_zero3", "grpo"),
        pytest.param("cpu_ddp", "grpo", marks=pytest.mark.slow),
        pytest.param("cpu_zero2", "grpo", marks=pytest.mark.slow),
        pytest.param("cpu_zero3", "rloo", marks=pytest.mark.slow),
    ],
)
def test_one_baton_across_two_ranks(tmp_path, layout, kind):
    found = digests(tmp_path, layout, kind)
    assert (found["world"], found["layouts"]) == (2, [LAYOUTS[layout]])
    assert found["alone"]["tool"] != found["alone"]["code"]
    assert found["in turns"] == found["alone"]
    assert found["parked"] == found["alone"]


def test_an_agent_s_failure_ends_all_and_is_the_one_raised():
    order = []

    def good() -> None:
        try:
            for _ in range(3):
                order.append("good")
                turns.rest(0)
        except BaseException:
            order.append("unwound")
            raise

    def bad() -> None:
        turns.rest(0)
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        turns.take_turns({"good": good, "bad": bad})
    assert order == ["good", "good", "unwound"]
