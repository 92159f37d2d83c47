"""A process under watch: how long it works, and the most anonymous memory its tree of processes holds."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INTERVAL = 0.02


@dataclass(frozen=True)
class Cost:
    """
    What a run took.

    Args:
        wall_s, cpu_s (`float`):
            Seconds of the work alone, imports left out.
        peak_anon_mb (`float`):
            Most anonymous memory at a time, Python and torch included, page cache left out; in MB of 10⁶ bytes.
    """

    wall_s: float
    cpu_s: float
    peak_anon_mb: float


def run(python: str, job: Mapping[str, Any], scratch: Path) -> Cost:
    """
    Runs a job of `programs.py` and watches it.

    Args:
        python (`str`):
            The interpreter that has the program.
        job (`Mapping[str, Any]`):
            `program`, `knobs`, and `base`, `agents`, `out` of `toy` and `model`.
        scratch (`Path`):
            A folder for the job, its result and its log.

    Raises:
        `RuntimeError`: with the end of its log, if it fails.
    """
    result, log = scratch / "result.json", scratch / "log.txt"
    result.unlink(missing_ok=True)
    (scratch / "job.json").write_text(json.dumps({**job, "result": str(result)}, default=str), encoding="utf-8")
    command = [python, "-m", "tests.benchmarks.programs", str(scratch / "job.json")]
    with open(log, "w", encoding="utf-8") as told:
        process = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=subprocess.STDOUT)
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, anonymous_kb(process.pid))
                time.sleep(INTERVAL)
        finally:
            process.kill()
            process.wait()
    if process.returncode or not result.exists():
        end = log.read_text(encoding="utf-8")[-3000:]
        raise RuntimeError(f"{job['program']} failed with code {process.returncode}:\n{end}")
    return Cost(**json.loads(result.read_text(encoding="utf-8")), peak_anon_mb=peak * 1024 / 1e6)


def anonymous_kb(pid: int) -> int:
    """Anonymous and shared memory that a process and its descendants hold now, in KiB; 0 once it is gone."""
    process = Path(f"/proc/{pid}")
    try:
        status = process.joinpath("status").read_text()
        children = [child for task in process.joinpath("task").iterdir() for child in _children(task)]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    held = (line.split() for line in status.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))
    return sum(int(size) for _, size, _ in held) + sum(map(anonymous_kb, children))


def _children(task: Path) -> list[int]:
    try:
        return [int(pid) for pid in task.joinpath("children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
