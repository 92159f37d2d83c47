"""
What a merge costs a job in training: python -m tests.benchmarks.live [--json FILE] [layout …]

Real GRPO jobs of two ranks on the CPU with a model of 51 M parameters, alone in their hub. Prints, per layout, the
time of a training step (8 completions of 64 tokens on each rank, far less than in real runs) and of a merge, and what
share of training time merges take at `merge_every=50`; publishing, making the state, loading it and, within that, the
engine's commit are told apart. Times are the longer of both ranks, waits excluded. Then the most memory that a merge
took on a rank beyond what was in use before it, and of that the engine's commit: anonymous memory, without the pages
of mapped hub files. Memory is watched in merges of their own, as that takes time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import ram_trl
from ram_trl.continual.member import Member, Met
from ram_trl.continual.rounds import Rounds
from ram_trl.weights.live import LiveWeights
from tests import models
from tests.distributed.launching import FSDP2, deepspeed_config, finish, launch


@dataclass(frozen=True)
class Layout:
    """A DeepSpeed stage, FSDP2, or neither: DDP."""

    stage: int | None
    bf16: bool
    environment: dict[str, str] = field(default_factory=dict)


LAYOUTS = {
    "DDP fp32": Layout(None, False),
    "ZeRO-1 fp32": Layout(1, False),
    "ZeRO-2 bf16": Layout(2, True),
    "ZeRO-3 bf16": Layout(3, True),
    "ZeRO-3 fp32": Layout(3, False),
    "FSDP2 fp32": Layout(None, False, FSDP2),
}
TIMED, WATCHED, EVERY = 3, 2, 2
TRAINING = {
    "max_steps": EVERY * (1 + TIMED + WATCHED),
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "max_completion_length": 64,
}
PARTS = {"publish": Member, "make_state": Rounds, "load": Member, "commit": LiveWeights}


def resident() -> int:
    """Anonymous memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Meter:
    """Times, or else peak memory, of parts of a job."""

    def __init__(self) -> None:
        self.watching = False
        self.times: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        if self.watching:
            with self.watch(part):
                yield
        else:
            yield
            self.times.setdefault(part, []).append(time.monotonic() - started)

    @contextmanager
    def watch(self, part: str) -> Iterator[None]:
        before, over = resident(), threading.Event()
        peak = before

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.001):
                peak = max(peak, resident())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.peaks[part] = max(self.peaks.get(part, 0), peak - before)

    def around(self, owner: type, method: str, part: str) -> None:
        real: Callable = getattr(owner, method)

        def measured(*arguments: Any, **named: Any) -> Any:
            with self.measure(part):
                return real(*arguments, **named)

        setattr(owner, method, measured)


class Steps(TrainerCallback):
    """Times training steps, merges excluded: it ends its step before `RAMCallback` does its work."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.monotonic() - self.started)


def measure_job(folder: Path, settings: dict[str, Any]) -> None:
    """What each rank runs."""
    from tests.distributed import sharded

    sharded.prepare()
    trainer = sharded.make_trainer(folder, settings)
    steps, meter, mets = Steps(), Meter(), []
    trainer.add_callback(steps)
    callback = ram_trl.attach(
        trainer, hub=folder / "hub", agent="tool", base=folder / "base", merge_every=EVERY, on_hub_error="raise"
    )

    def merged(met: Met, scores: object = None) -> None:
        mets.append(met)
        meter.watching = len(mets) > TIMED

    callback._log = merged
    for method, owner in ({"meet": Member} | PARTS).items():
        meter.around(owner, method, method)
    trainer.train()
    told = {
        "step": statistics.median(steps.times[1:]),
        "merge": statistics.median(met.merge_s for met in mets[1 : 1 + TIMED]),
        "times": {part: statistics.median(meter.times[part][1:]) for part in PARTS},
        "peaks": meter.peaks,
        "exchange_mb": mets[1].exchange_mb,
    }
    (folder / f"measured-rank{dist.get_rank()}.json").write_text(json.dumps(told))


def make_base(folder: Path) -> int:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=15, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "base")
    models.tokenizer().save_pretrained(folder / "base")
    return sum(parameter.numel() for parameter in model.parameters())


def run(name: str) -> dict[str, float]:
    """Measures a layout."""
    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        entries = make_base(folder)
        config = None if layout.stage is None else deepspeed_config(folder, layout.stage, 2, {}, {})
        settings = {"odd": False, "training": TRAINING | {"bf16": layout.bf16}}
        job = launch(folder, settings, config, 2, layout.environment, module="tests.benchmarks.live", first="--job")
        finish(job, folder, 1500)
        told = [json.loads((folder / f"measured-rank{rank}.json").read_text()) for rank in (0, 1)]
    step, merge = (max(rank[key] for rank in told) for key in ("step", "merge"))
    return {
        "M entries": entries / 1e6,
        "step s": step,
        "merge s": merge,
        "merge share at merge_every=50, %": 100 * merge / (50 * step + merge),
        **{f"{part} s": max(rank["times"][part] for rank in told) for part in PARTS},
        "published MB": told[0]["exchange_mb"],
        **{f"peak MB, {part}": max(rank["peaks"][part] for rank in told) / 1e6 for part in ("meet", *PARTS)},
    }


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        measure_job(Path(sys.argv[2]), json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"of {', '.join(LAYOUTS)}; by default all")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    measured: dict[str, dict[str, float]] = {}
    for name in arguments.layouts or LAYOUTS:
        measured[name] = run(name)
        if len(measured) == 1:
            print("| layout | " + " | ".join(measured[name]) + " |")
            print("|---" * (1 + len(measured[name])) + "|")
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in measured[name].values()) + " |", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
