"""
Runs the jobs of a plan, and stays with them: logs, a live table, restarts, hangs, Ctrl-C, and a report at the end.

What happens when something dies:
- A job (any of its ranks): all its processes are ended, and it is started again from its agents' newest whole
  checkpoints, with new ports, up to `restarts` times, each time after a longer pause. After that, or if it raises the
  same error twice without a step in between (and the error is not of the network), its agents are given up in the hub:
  nobody waits for them, the others finish, and the exit code and the report say so.
- A job without any progress for `hang_after` seconds counts as dead.
- The launcher itself: its jobs die with it. `--resume` goes on from the checkpoints.
- Ctrl-C: every job saves a checkpoint at its next step and ends; jobs that only wait are ended at once. A second
  Ctrl-C ends all at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from rich.console import Console

from ram_trl.continual.hub import Hub, HubError
from ram_trl.files import DamagedFileError, read_json
from ram_trl.runs.board import Board
from ram_trl.runs.builds import abandoned_locks
from ram_trl.runs.job import STOP, agent_folder, ensure_base, finished
from ram_trl.runs.jobs import Job, Plan, threads_per_process
from ram_trl.runs.ports import HeldPort
from ram_trl.runs.trainers import VLLM_PORTS
from ram_trl.telling.run_report import write_run_report

logger = logging.getLogger(__name__)

TICK = 0.1
GRACE = 120.0
"""Seconds that jobs have to save a checkpoint and end after Ctrl-C."""

OLD_LOCK = 10.0
"""Minutes."""

NETWORK = re.compile(
    r"Dist(Network|Store|Backend)Error|EADDRINUSE|address already in use|timed? ?out|connection (reset|refused)"
    r"|connectFullMesh|NCCL error",
    re.IGNORECASE,
)
"""In an error: ranks that did not find each other, or lost each other. The next try has other ports."""

ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


@dataclass
class Failure:
    """Why a job ended: which rank, of what, whether the rank itself raised it, and in which agent's training."""

    job: str
    rank: int | None
    cause: str
    raised: bool = False
    agent: str | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f", rank {self.rank}"
        return f"job '{self.job}'{where}: {self.cause}"


@dataclass
class RunningJob:
    """A job as the launcher sees it: `starting`, `running`, `waiting to restart`, `finished` or `failed`."""

    job: Job
    state: str = "starting"
    process: subprocess.Popen[bytes] | None = None
    ports: list[HeldPort] = field(default_factory=list)
    restarts: int = 0
    start_at: float = 0.0
    moved: float = 0.0
    progress: dict[str, Any] = field(default_factory=dict)
    read: int = 0
    died_at: tuple[str, dict[str, Any]] | None = None
    failures: list[Failure] = field(default_factory=list)


class Launcher:
    """
    Runs a plan.

    Args:
        plan ([`Plan`]):
            The jobs.
        resume (`bool`):
            Go on with a run that ended early.
        console ([`~rich.console.Console`]):
            Where logs and the table go.
    """

    def __init__(self, plan: Plan, resume: bool, console: Console) -> None:
        self.plan = plan
        self.hub = Hub(plan.hub)
        self._resume = resume
        self._console = console
        self._jobs = [RunningJob(job) for job in plan.jobs]
        self._stopping: float | None = None
        self._stops = 0
        self._given_up: tuple[str, ...] = ()
        self._board = Board(plan, console)

    def run(self) -> int:
        """Runs all jobs to their end; returns the exit code."""
        self._claim()
        self._base = make_base(self.plan)
        before = signal.signal(signal.SIGINT, self._interrupt), signal.signal(signal.SIGTERM, self._interrupt)
        try:
            with self._board:
                while any(job.state not in ("finished", "failed", "stopped") for job in self._jobs):
                    for job in self._jobs:
                        self._look_after(job)
                    self._board.show({job.job.name: job.state for job in self._jobs})
                    time.sleep(TICK)
        finally:
            for job in self._jobs:
                self._end(job)
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])
        return self._conclude()

    def _claim(self) -> None:
        out = self.plan.out
        if not self._resume and (self.plan.hub / "hub.json").exists():
            raise ValueError(
                f"{self.plan.hub} holds a run; go on with it by --resume, or name another folder "
                "(--set launch.out=FOLDER)"
            )
        out.mkdir(parents=True, exist_ok=True)
        (out / STOP).unlink(missing_ok=True)
        lock = out / "launcher.pid"
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            holder = int(lock.read_text(encoding="utf-8"))
            os.kill(holder, 0)
            if b"launch" in Path(f"/proc/{holder}/cmdline").read_bytes() and holder != os.getpid():
                raise RuntimeError(f"another launcher (process {holder}) is running {out}; stop it first")
        lock.write_text(str(os.getpid()), encoding="utf-8")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1

    # ---- one job ------------------------------------------------------------------------------------------------

    def _look_after(self, job: RunningJob) -> None:
        if job.state in ("finished", "failed", "stopped"):
            return
        if self._stops and self._stopping is None:
            self._stopping = time.monotonic()
            (self.plan.out / STOP).touch()
            self._board.say("launcher", "stopping: jobs save a checkpoint and end (Ctrl-C again ends them at once)")
        if job.process is None:
            if self._stopping is not None:
                job.state = "stopped"
            elif time.monotonic() >= job.start_at:
                self._start(job)
            return
        self._read_log(job)
        code = job.process.poll()
        if code is not None:
            self._ended(job, code)
        elif self._stopping is not None:
            late = time.monotonic() - self._stopping > GRACE or self._stops > 1
            if late or self._only_waits(job):
                self._end(job)
        elif self._hangs(job):
            failure = Failure(job.job.name, None, f"no progress for {self.plan.recipe.launch.hang_after:g} seconds")
            self._end(job)
            self._retry(job, failure)

    def _start(self, job: RunningJob) -> None:
        folder = self._folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("failure-rank-*.json"):
            path.unlink()
        self._free_builds(again=(self._resume or job.restarts > 0) and job.job.machines == 1)
        for held in job.ports:
            held.close()
        job.ports = [HeldPort() for _ in range(1 + len(job.job.agents))]
        port = job.ports[0].number
        explicit = self.plan.hardware.explicit(job.job.processes, job.job.machines, port)
        config = self.plan.config_file(job.job)
        config.write_text(yaml.safe_dump(explicit, sort_keys=False), encoding="utf-8")
        command = self.plan.command(job.job, port, self._resume or job.restarts > 0, config)
        own = self.plan.environment(job.job) | {
            "RAM_TRL_FAILURES": str(folder),
            "MASTER_PORT": str(port),
            VLLM_PORTS: ",".join(f"{a}={p.number}" for a, p in zip(job.job.agents, job.ports[1:], strict=True)),
        }
        shown = " ".join([*(f"{k}={shlex.quote(v)}" for k, v in own.items()), shlex.join(command)])
        self._board.say(job.job.name, f"$ {shown}")
        tether = [sys.executable, str(Path(__file__).with_name("tether.py")), str(os.getpid())]
        with self._log(job).open("ab") as log:
            log.write(f"$ {shown}\n".encode())
            job.read = log.tell()
            job.process = subprocess.Popen(
                [*tether, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | own | {"PYTHONUNBUFFERED": "1"},
            )
        job.state, job.moved = "running", time.monotonic()

    def _free_builds(self, again: bool) -> None:
        """
        Takes away what a build of DeepSpeed left that was killed: jobs would wait for it, and never start.

        A young lock is taken away when a job starts `again`, as its own end may have left it; where machines share
        folders, another may be building.
        """
        if self.plan.hardware.kind != "DEEPSPEED":
            return
        for lock in abandoned_locks():
            with suppress(FileNotFoundError):
                old = time.time() - lock.stat().st_mtime > 60 * OLD_LOCK
                if old or again:
                    lock.unlink()
                what = "it is removed" if old or again else "remove it, unless another machine is building there"
                self._board.say(
                    "launcher",
                    f"{lock}: no process of this machine holds this lock; a build of DeepSpeed that was killed leaves "
                    f"one, and every later one waits for it; {what}",
                )

    def _ended(self, job: RunningJob, code: int) -> None:
        assert job.process is not None
        self._read_log(job)
        self._end(job)
        if self._stopping is not None:
            job.state = "stopped"
        elif code == 0:
            job.state = "finished"
            self._board.say(job.job.name, "finished")
        else:
            self._retry(job, self._why(job, code))

    def _retry(self, job: RunningJob, failure: Failure) -> None:
        launch = self.plan.recipe.launch
        job.failures.append(failure)
        self._board.say("launcher", str(failure))
        steps = {agent: held.get("step") for agent, held in job.progress.items()}
        # What raises the same again, without a step in between, will raise it for ever; but a network may come back.
        lasting = failure.raised and NETWORK.search(failure.cause) is None
        hopeless = lasting and job.died_at == (failure.cause, steps)
        job.died_at = (failure.cause, steps)
        if job.restarts >= launch.restarts or hopeless:
            why = "it fails the same way each time" if hopeless else f"after {job.restarts} restarts"
            lost = (failure.agent,) if failure.agent is not None else job.job.agents
            self._given_up += lost
            for agent in lost:
                self._board.say("launcher", f"agent '{agent}' is given up: {why}")
                if (self.plan.hub / "hub.json").exists() and not self.hub.is_done(agent):
                    self.hub.give_up(agent, str(failure))
            left = tuple(agent for agent in job.job.agents if agent not in lost)
            if not left:
                job.state = "failed"
                return
            job.job, job.restarts, job.died_at = replace(job.job, agents=left), 0, None
        pause = launch.backoff * 2**job.restarts
        job.restarts += 1
        job.state, job.start_at = "waiting to restart", time.monotonic() + pause
        self._board.say("launcher", f"restart {job.restarts} of {launch.restarts} in {pause:g} s")

    def _end(self, job: RunningJob) -> None:
        """Ends all processes of a job. Ranks die with the process that started them."""
        if job.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
        if job.state == "running" and self._stopping is not None:
            job.state = "stopped"
        job.process = None
        for port in job.ports:
            port.close()
        job.ports = []

    def _why(self, job: RunningJob, code: int) -> Failure:
        """The rank that failed first, and its error; or what torchrun or the exit code tells."""
        told = []
        for path in self._folder(job).glob("failure-rank-*.json"):
            with suppress(ValueError, OSError):
                told.append(json.loads(path.read_text(encoding="utf-8")))
        if told:
            first = min(told, key=lambda failure: float(failure["time"]))
            return Failure(job.job.name, int(first["rank"]), first["cause"], raised=True, agent=first["agent"])
        tail = self._log(job).read_bytes()[-40000:].decode(errors="replace")
        found = ROOT_CAUSE.search(tail)
        if found is not None:
            code = int(found[2])
        rank = int(found[1]) if found is not None else 0 if job.job.processes == 1 else None
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Failure(job.job.name, rank, f"{cause}; see {self._log(job)}")

    def _hangs(self, job: RunningJob) -> bool:
        """Whether no agent of the job moved for too long. Agents that wait for a round have the round's time."""
        seen = {agent: self._progress(agent) for agent in job.job.agents}
        if seen != job.progress:
            job.progress, job.moved = seen, time.monotonic()
        allowed = self.plan.recipe.launch.hang_after
        if any(held.get("state") == "merging" for held in seen.values()) and self.plan.recipe.continual:
            allowed += self.plan.recipe.continual.timeout
        return time.monotonic() - job.moved > allowed

    def _only_waits(self, job: RunningJob) -> bool:
        unfinished = [agent for agent in job.job.agents if not self._is_done(agent)]
        return all(self._progress(agent).get("state") == "merging" for agent in unfinished)

    def _progress(self, agent: str) -> dict[str, Any]:
        try:
            return read_json(agent_folder(self.plan.out, agent) / "progress.json")
        except (FileNotFoundError, DamagedFileError):
            return {}

    def _is_done(self, agent: str) -> bool:
        return finished(self.hub, agent)

    def _folder(self, job: RunningJob) -> Path:
        return self.plan.out / "jobs" / job.job.name

    def _log(self, job: RunningJob) -> Path:
        return self._folder(job) / "log.txt"

    def _read_log(self, job: RunningJob) -> None:
        with self._log(job).open("rb") as log:
            log.seek(job.read)
            new = log.read()
        whole = new.rfind(b"\n") + 1
        job.read += whole
        for line in new[:whole].decode(errors="replace").splitlines():
            self._board.say(job.job.name, line.rsplit("\r", 1)[-1])

    # ---- the end ------------------------------------------------------------------------------------------------

    def _conclude(self) -> int:
        stopped = any(job.state == "stopped" for job in self._jobs)
        (self.plan.out / "launcher.pid").unlink(missing_ok=True)
        (self.plan.out / STOP).unlink(missing_ok=True)
        if not stopped and (self.plan.hub / "hub.json").exists() and self._may_be_incomplete():
            self._complete()
        for job in self._jobs:
            for failure in job.failures:
                lost = job.state == "failed" or failure.agent in self._given_up
                verdict = "failed" if lost else "was restarted"
                self._console.print(f"{verdict}: {failure}", markup=False, highlight=False, soft_wrap=True)
        if stopped:
            self._console.print("stopped; go on with --resume")
            return 130
        with suppress(FileNotFoundError, DamagedFileError):
            latest = self.hub.latest()
            if latest is not None:
                self._console.print(f"generalist: {self.hub.generalist_folder(latest)}", soft_wrap=True)
        with suppress(HubError, DamagedFileError, OSError):  # the run is what counts
            report = write_run_report(self.hub, self.plan.out / "report")
            self._console.print(f"report: {report}", soft_wrap=True)
        return 1 if self._given_up else 0

    def _may_be_incomplete(self) -> bool:
        """Whether something died in this run, or an export is missing."""
        return (
            self._resume
            or any(job.failures for job in self._jobs)
            or not self.hub.generalist_folder(len(self.hub.decisions())).exists()
        )

    def _complete(self) -> None:
        """What killed jobs may have left undone at the very end: a last round, its state, its export."""
        command = [sys.executable, "-m", "ram_trl.continual.completing", str(self.plan.hub), str(self._base)]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        done = subprocess.run(command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, check=False)
        if done.returncode:
            logger.warning("the last round could not be completed; see above")


def make_base(plan: Plan) -> Path:
    """
    The base's folder: downloaded or made before any job starts, as no job would show progress meanwhile.

    Raises:
        `RuntimeError`: if that fails.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(int(threads_per_process()))
    torch.set_flush_denormal(True)  # as jobs on the CPU do, which may make it, too
    try:
        return ensure_base(plan.recipe, plan.path.parent, plan.out, first=True)
    except Exception as error:
        made = plan.recipe.base.make or plan.recipe.base.model
        raise RuntimeError(f"the base ({made}) cannot be had: {type(error).__name__}: {error}") from error
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
