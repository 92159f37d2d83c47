"""
The programs that the offline benchmark compares, each run in a process of its own.

`python -m tests.benchmarks.programs JOB.json` imports the program, lets it merge a toy (which brings in what it
imports late), and only then measures: wall and CPU time of the work alone go to the job's `result` file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Program = Callable[[Path, Mapping[str, Path], Path], Any]
"""Merges a base and agents by name into a folder that does not exist yet."""

COPY_BUFFER = 4 << 20


def ours(knobs: Mapping[str, Any]) -> Program:
    """`ram_trl.merge`."""
    from ram_trl import MergeConfig, merge

    config = MergeConfig.layered(knobs)
    return lambda base, agents, out: merge(base, agents, out, config)


def mergekit(knobs: Mapping[str, Any]) -> Program:
    """mergekit's `ramplus_tl`; `knobs` are its options, and the dtypes it computes in and writes."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    def run(base: Path, agents: Mapping[str, Path], out: Path) -> None:
        recipe = {
            "merge_method": "ramplus_tl",
            "base_model": str(base),
            "models": [{"model": str(agents[name])} for name in sorted(agents)],
            **knobs["recipe"],
        }
        run_merge(MergeConfiguration.model_validate(recipe), str(out), MergeOptions(quiet=True, **knobs["options"]))

    return run


def copy(knobs: Mapping[str, Any]) -> Program:
    """The floor: `read` every weight file of base and agents in turn, `write` the base's, flush it to disk."""

    def run(base: Path, agents: Mapping[str, Path], out: Path) -> None:
        buffer = memoryview(bytearray(COPY_BUFFER))
        out.mkdir()
        for folder in (base, *agents.values()):
            for file in sorted(folder.glob("*.safetensors")):
                with open(file, "rb", buffering=0) as source:
                    if folder != base:
                        while source.readinto(buffer):
                            pass
                        continue
                    with open(out / file.name, "wb", buffering=0) as target:
                        while length := source.readinto(buffer):
                            target.write(buffer[:length])
                        os.fsync(target.fileno())

    return run


PROGRAMS = {"ours": ours, "mergekit": mergekit, "copy": copy}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    program = PROGRAMS[job["program"]](job["knobs"])
    for work in ("toy", "model"):
        base, out = Path(job[work]["base"]), Path(job[work]["out"])
        agents = {name: Path(folder) for name, folder in job[work]["agents"].items()}
        before, start = os.times(), time.perf_counter()
        program(base, agents, out)
        wall, after = time.perf_counter() - start, os.times()
    # The first four are user and system time of the process and of its children.
    result = {"wall_s": wall, "cpu_s": sum(after[:4]) - sum(before[:4])}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
