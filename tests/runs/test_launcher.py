"""`ram-trl launch`: real jobs on this machine, in every schedule; what dies comes back or is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from ram_trl.continual.hub import Hub
from ram_trl.recipe import load_recipe
from ram_trl.runs import jobs
from ram_trl.runs.hardware import read_hardware
from ram_trl.runs.job import whole_checkpoint
from ram_trl.runs.jobs import make_plan
from ram_trl.runs.launcher import Failure, Launcher
from ram_trl.runs.ports import HeldPort
from ram_trl.runs.trainers import VLLM_PORTS, trainer_args
from tests import small_run
from tests.training.test_callback import states

REPOSITORY = Path(__file__).parents[2]
TWO = ("tool", "code")


def start(recipe: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ram_trl.cli", "launch", str(recipe), *options]
    log = recipe.with_name("out.txt").open("ab")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(run: subprocess.Popen, recipe: Path, code: int = 0) -> str:
    """Waits for a launcher; what it printed. Nothing of it is left running."""
    try:
        assert run.wait(500) == code, printed(recipe)[-5000:]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return printed(recipe)


def printed(recipe: Path) -> str:
    return recipe.with_name("out.txt").read_text()


def wait_for(holds: Callable[[], object], recipe: Path, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline, printed(recipe)[-5000:]
        assert run.poll() is None, printed(recipe)[-5000:]
        time.sleep(0.05)


def processes_of(run: Path) -> list[psutil.Process]:
    """Processes of a run that are alive, whoever their parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and any(str(run.parent) in part for part in line):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def ranks_of(run: Path, agent: str) -> list[psutil.Process]:
    """The processes that train an agent, by rank."""
    found = []
    for process in processes_of(run):
        try:
            line = process.cmdline()
            if any(part.endswith("train.py") for part in line[1:3]) and agent in line[line.index("--agents") + 1]:
                found.append((process.environ().get("RANK", "0"), process))
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            continue
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def check_hub(run: Path, agents=TWO) -> None:
    """All agents finished, nothing was merged twice, the newest round is exported and loads."""
    hub = Hub(run / "hub")
    decisions = hub.decisions()
    consumed = [(p.agent, p.sequence) for d in decisions for p in d.publications]
    assert len(consumed) == len(set(consumed))
    assert all(hub.is_done(agent) and hub.gave_up(agent) is None for agent in agents)
    assert hub.latest() == len(decisions)
    model = AutoModelForCausalLM.from_pretrained(hub.generalist_folder(len(decisions)))
    state = states(run / "hub")[-1]
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], state[name]) for name in state)
    # Nothing is lost: what an agent published last is in a round, or was measured against a newer one.
    for agent in agents:
        newest = hub.newest_publication(agent)
        assert newest is not None
        assert (agent, newest.sequence) in consumed or not active(run, agent, newest.sequence)


def active(run: Path, agent: str, sequence: int) -> int:
    from ram_trl.continual.rounds import Rounds
    from ram_trl.team import Team

    hub = Hub(run / "hub")
    rounds = Rounds(hub, Team(), hub.described()["identity"])
    return rounds.publication(hub.publication(agent, sequence)).stored()


def same(one: Path, other: Path) -> bool:
    first, second = states(one / "hub"), states(other / "hub")
    return len(first) == len(second) and all(
        torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a
    )


# ---- schedules --------------------------------------------------------------------------------------------------


def run(folder: Path, *options: str, agents=TWO, **launch) -> Path:
    recipe = small_run.recipe(folder, agents=agents, **launch)
    finish(start(recipe, *options), recipe)
    return folder / "run"


def test_two_jobs_and_one_with_turns_make_the_same_generalists(tmp_path):
    concurrent = run(tmp_path / "concurrent")
    check_hub(concurrent)
    assert len(states(concurrent / "hub")) == 4
    interleaved = run(tmp_path / "interleaved", "--schedule", "interleaved")
    assert same(concurrent, interleaved)
    scores = [json.loads(path.read_text()) for path in (concurrent / "hub" / "rounds").glob("*/score-*.json")]
    assert {score["content"]["task"] for score in scores} == set(TWO)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cpu", "cpu_ddp", "cpu_zero2", "cpu_zero3"])
def test_every_schedule_makes_the_same_generalists(tmp_path, layout):
    runs = [
        run(tmp_path / schedule, "--schedule", schedule, agents=small_run.AGENTS, accelerate=layout)
        for schedule in ("concurrent", "interleaved", "mixed")
    ]
    check_hub(runs[0], small_run.AGENTS)
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fold", "svd"])
@pytest.mark.parametrize("layout", ["cpu", "cpu_ddp", "cpu_zero2", "cpu_zero3"])
def test_adapters_on_one_base_in_memory_make_the_same_generalists(tmp_path, layout, mode):
    """Each agent in a job of its own, with a base of its own; and all in turns, with one."""
    changes = ("agents.*.peft={r: 3, target_modules: [q_proj, down_proj]}", f"continual.lora={mode}")
    adapters = [part for change in changes for part in ("--set", change)]
    alone = run(tmp_path / "concurrent", *adapters, accelerate=layout)
    check_hub(alone)
    assert len(states(alone / "hub")) == 4
    turns = run(tmp_path / "interleaved", "--schedule", "interleaved", *adapters, accelerate=layout)
    assert same(alone, turns)
    told = "agent 'code' computes with the base that others have in memory"
    assert told in (turns / "jobs" / "agents" / "log.txt").read_text()
    assert told not in (alone / "jobs" / "code" / "log.txt").read_text()


@pytest.mark.slow
def test_parking_changes_nothing(tmp_path):
    parked = run(tmp_path / "parked", "--schedule", "interleaved", park=True)
    assert same(parked, run(tmp_path / "kept", "--schedule", "interleaved", park=False))


# ---- what dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["concurrent", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_an_agent_that_stays_dead_is_named_and_the_others_finish(tmp_path, schedule):
    recipe = small_run.recipe(tmp_path, agents=TWO, restarts=9)
    broken = ["--schedule", schedule, "--set", "agents.code.task=tests.small_run:broken"]
    told = finish(start(recipe, *broken), recipe, code=1)
    name = "code" if schedule == "concurrent" else "agents"
    assert f"failed: job '{name}', rank 0: RuntimeError: the data is gone" in told
    assert "agent 'code' is given up: it fails the same way each time" in told
    report = (tmp_path / "run" / "report" / "report.md").read_text()
    assert f"Agent 'code' was given up: job '{name}', rank 0: RuntimeError: the data is gone" in report
    hub = Hub(tmp_path / "run" / "hub")
    assert hub.is_done("tool")
    assert "the data is gone" in (hub.gave_up("code") or "")
    assert [d.of("code") for d in hub.decisions()] == [None] * len(hub.decisions())
    assert hub.latest() == len(hub.decisions()) > 1
    assert not processes_of(tmp_path / "run")


@pytest.mark.slow
def test_a_killed_rank_ends_its_job_alone_and_the_job_comes_back(tmp_path):
    recipe = small_run.recipe(tmp_path, agents=TWO, steps=6, accelerate="cpu_ddp")
    launched = start(recipe)
    out = tmp_path / "run"
    wait_for(lambda: whole_checkpoint(out / "agents" / "code"), recipe, launched)
    others = [process.pid for process in ranks_of(out, "tool")]
    ranks_of(out, "code")[1].kill()
    wait_for(lambda: "restart 1 of" in printed(recipe), recipe, launched)
    assert [process.pid for process in ranks_of(out, "tool")] == others
    told = finish(launched, recipe)
    assert "was restarted: job 'code', rank 1: killed by SIGKILL" in told
    check_hub(out)


@pytest.mark.slow
def test_a_job_that_stands_still_is_started_again(tmp_path):
    recipe = small_run.recipe(tmp_path, agents=("tool",), steps=6, hang_after=20)
    launched = start(recipe)
    wait_for(lambda: whole_checkpoint(tmp_path / "run" / "agents" / "tool"), recipe, launched)
    ranks_of(tmp_path / "run", "tool")[0].suspend()
    told = finish(launched, recipe)
    assert "was restarted: job 'tool': no progress for 20 seconds" in told
    check_hub(tmp_path / "run", ("tool",))


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_goes_on(tmp_path):
    recipe = small_run.recipe(tmp_path, agents=TWO, steps=30)
    launched = start(recipe, "--schedule", "interleaved")
    out = tmp_path / "run"
    wait_for(lambda: whole_checkpoint(out / "agents" / "code"), recipe, launched)
    launched.send_signal(signal.SIGINT)
    assert "stopped; go on with --resume" in finish(launched, recipe, code=130)
    assert not processes_of(out)
    assert not Hub(out / "hub").is_done("tool")
    finish(start(recipe, "--schedule", "interleaved", "--resume"), recipe)
    check_hub(out)
    assert json.loads((out / "agents" / "tool" / "progress.json").read_text())["content"]["step"] == 30


@pytest.mark.slow
def test_a_hub_that_is_not_empty_needs_resume(tmp_path):
    run(tmp_path, agents=("tool",))
    recipe = tmp_path / "recipe.yaml"
    assert "holds a run; go on with it by --resume" in finish(start(recipe), recipe, code=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_chaos(tmp_path, seed):
    """A random process is killed at a random moment, the launcher included; in the end nothing is lost or doubled."""
    generator = random.Random(seed)
    schedule = generator.choice(["concurrent", "interleaved", "mixed"])
    recipe = small_run.recipe(tmp_path, agents=TWO, steps=8)
    out = tmp_path / "run"
    launched = start(recipe, "--schedule", schedule)
    wait_for(lambda: processes_of(out), recipe, launched)
    time.sleep(generator.uniform(0, 40))
    victims = [launched.pid, *(p.pid for p in processes_of(out) if p.pid != launched.pid)]
    victim = generator.choice(victims)
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        victim = 0  # it ended by itself just now
    if victim == launched.pid:
        launched.wait()
        gone = time.monotonic() + 30
        while processes_of(out):
            assert time.monotonic() < gone, [p.cmdline() for p in processes_of(out)]
            time.sleep(0.1)
        finish(start(recipe, "--schedule", schedule, "--resume"), recipe)
    else:
        finish(launched, recipe)
    check_hub(out)


@pytest.mark.parametrize(("age", "again", "removed"), [(0, False, False), (0, True, True), (3600, False, True)])
def test_the_lock_of_a_build_that_was_killed_is_told_and_does_not_keep_jobs_from_starting_again(
    tmp_path, monkeypatch, age, again, removed
):
    """TRAPS 4.15. Who builds has the lock open."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    left, held = (tmp_path / "extensions" / name / "lock" for name in ("left", "held"))
    for path in (left, held):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (time.time() - age, time.time() - age))
    recipe = small_run.recipe(tmp_path, agents=("tool",), accelerate="cpu_zero2")
    console = Console(file=StringIO(), width=10_000)
    with held.open():
        Launcher(make_plan(recipe, load_recipe(recipe)), False, console)._free_builds(again)
    assert f"{left}: no process of this machine holds this lock" in console.file.getvalue()
    assert str(held) not in console.file.getvalue()
    assert left.exists() != removed
    assert held.exists()


# ---- ports (TRAPS 5.1–5.3) --------------------------------------------------------------------------------------


def test_a_held_port_is_given_to_nobody_else_and_can_be_listened_on():
    held = [HeldPort() for _ in range(50)]
    assert len({port.number for port in held}) == 50
    store = torch.distributed.TCPStore("127.0.0.1", held[0].number, 1, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"
    others = [HeldPort() for _ in range(200)]
    assert not {port.number for port in held} & {port.number for port in others}
    for port in [*held, *others]:
        port.close()


MEETING = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
if dist.get_rank() == 0:  # as vLLM does
    port = int(os.environ["RAM_TRL_VLLM_PORTS"].split("=")[1])
    dist.TCPStore("127.0.0.1", port, 1, is_master=True).set("key", "value")
dist.barrier()
"""


def launch_meeting(folder: Path, layout: str) -> None:
    """A launcher with one job of two ranks; its exit code tells whether all went well at the first try."""
    recipe = small_run.recipe(folder, agents=("tool",), accelerate=layout, processes=2)
    log = (folder / "out.txt").open("w")
    launcher = Launcher(make_plan(recipe, load_recipe(recipe)), False, Console(file=log))
    code = launcher.run()
    log.flush()
    os._exit(code or len(launcher._jobs[0].failures))


def eight_at_once(folder: Path) -> None:
    layouts = ["cpu_ddp", "cpu_zero2"] * 4
    folders = [folder / str(number) for number in range(8)]
    fork = multiprocessing.get_context("fork")
    launches = [fork.Process(target=launch_meeting, args=pair) for pair in zip(folders, layouts, strict=True)]
    for each in launches:
        each.start()
    for each in launches:
        each.join(400)
    told = {path.name: (path / "out.txt").read_text() for path in folders}
    codes = [each.exitcode for each in launches]
    assert codes == [0] * 8, "\n".join(told[str(n)][-6000:] for n, code in enumerate(codes) if code)
    ports = [line.split("MASTER_PORT=")[1].split()[0] for text in told.values() for line in text.splitlines() if
             "MASTER_PORT=" in line]  # fmt: skip
    assert len(ports) == len(set(ports)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("time", range(10))
def test_eight_launches_at_once_never_clash(tmp_path, monkeypatch, time):
    """Launchers as users start them, with jobs that meet and end: ports are what is shown."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.py").write_text(MEETING)
    monkeypatch.setattr(jobs, "LAUNCH", tmp_path / "launch")
    eight_at_once(tmp_path)


@pytest.mark.parametrize(
    ("cause", "hopeless"),
    [
        ("ValueError: the data is gone", True),
        ("DistNetworkError: The server socket has failed to listen on any local network address. EADDRINUSE", False),
        ("RuntimeError: Gloo connectFullMesh failed with [../gloo/pair.cc:1] Connection reset by peer", False),
        ("RuntimeError: [1] Timed out waiting 1800000ms for recv operation to complete", False),
    ],
)
def test_what_the_network_may_get_over_is_tried_again_as_often_as_is_allowed(tmp_path, cause, hopeless):
    recipe = small_run.recipe(tmp_path, agents=("tool",))
    console = Console(file=StringIO())
    launcher = Launcher(make_plan(recipe, load_recipe(recipe)), False, console)
    (job,) = launcher._jobs
    for _ in range(2):
        launcher._retry(job, Failure("tool", 0, cause, raised=True, agent="tool"))
    assert ("it fails the same way each time" in console.file.getvalue()) == hopeless
    assert job.state == ("failed" if hopeless else "waiting to restart")


def test_agents_with_vllm_get_the_ports_that_are_held_for_them(tmp_path, monkeypatch):
    """In TRL's config all have 51216."""
    monkeypatch.setenv(VLLM_PORTS, "tool=41001,code=41002")
    recipe = load_recipe(small_run.recipe(tmp_path), [("agents.*.args.use_vllm", True)])
    hardware = read_hardware("cpu", tmp_path)
    given = {a.name: trainer_args(a, recipe, tmp_path, hardware).get("vllm_group_port") for a in recipe.agents}
    assert given == {"tool": 41001, "code": 41002, "mem": None}


@pytest.mark.slow
def test_a_job_s_ports_are_its_own(tmp_path):
    """TRL's 12345 and 51216 are the same in every job; each job is given others."""
    out = run(tmp_path)
    ports = []
    for agent in TWO:
        first = (out / "jobs" / agent / "log.txt").read_text().splitlines()[0]
        ports += [part.split("=")[-1] for part in first.split() if part.startswith(("MASTER_PORT", "RAM_TRL_VLLM"))]
    assert len(set(ports)) == 4
    assert not {"12345", "51216", "29500"} & set(ports)
