"""
What a merge costs a job in training: python -m tests.benchmarks.live [layout …]

Real GRPO jobs of two ranks on the CPU with a model of 51 M parameters, alone in their hub. Prints, per layout, the
time of a training step and of a merge (publishing, making the state, loading it; the longer of both ranks), the share
of training time at `merge_every=50`, and the most memory that a merge took on a rank beyond what was in use before it:
anonymous memory, without the pages of mapped hub files, and of that the part that the engine's own commit takes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from tests import models
from tests.distributed.launching import FSDP2, deepspeed_config, finish, launch

LAYOUTS: dict[str, tuple[int | None, bool]] = {
    "ZeRO-3 bf16": (3, True),
    "ZeRO-3 fp32": (3, False),
    "ZeRO-2 bf16": (2, True),
    "ZeRO-1 fp32": (1, False),
    "FSDP2 fp32": (None, False),
}
STEPS, EVERY = 8, 2


def resident() -> int:
    """Anonymous memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Meter:
    """Time and peak memory of parts of a job."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        before, over = resident(), threading.Event()
        peak = before

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.001):
                peak = max(peak, resident())

        thread = threading.Thread(target=watch)
        thread.start()
        started = time.monotonic()
        try:
            yield
        finally:
            self.times.setdefault(part, []).append(time.monotonic() - started)
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
    import ram_trl
    from ram_trl.member import Member
    from ram_trl.weights.live import LiveWeights
    from tests.distributed import sharded

    sharded.prepare()
    trainer = sharded.make_trainer(folder, settings)
    steps, meter, mets = Steps(), Meter(), []
    trainer.add_callback(steps)
    callback = ram_trl.attach(
        trainer, hub=folder / "hub", agent="tool", base=folder / "base", merge_every=EVERY, on_hub_error="raise"
    )
    callback._log = lambda met, scores=None: mets.append(met)
    for owner, method in ((Member, "meet"), (Member, "publish"), (Member, "load"), (LiveWeights, "commit")):
        meter.around(owner, method, method)
    trainer.train()
    told = {
        "step": statistics.median(steps.times[1:]),
        "merge": statistics.median(met.merge_s for met in mets[1:-1]),
        "times": {part: statistics.median(times[1:]) for part, times in meter.times.items()},
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


def run(layout: str) -> None:
    stage, bf16 = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries = make_base(folder)
        config = None if stage is None else deepspeed_config(folder, stage, 2, {}, {})
        settings = {"odd": False, "training": {"bf16": bf16, "max_steps": STEPS, "max_completion_length": 32}}
        job = launch(
            folder, settings, config, 2, FSDP2 if stage is None else {}, module="tests.benchmarks.live", first="--job"
        )
        finish(job, folder, 1500)
        told = [json.loads((folder / f"measured-rank{rank}.json").read_text()) for rank in (0, 1)]
    step, merge = (max(rank[key] for rank in told) for key in ("step", "merge"))
    parts = {part: max(rank["times"][part] for rank in told) for part in ("publish", "load", "commit")}
    peaks = {part: max(rank["peaks"][part] for rank in told) / 1e6 for part in ("meet", "commit")}
    seconds = " | ".join(f"{value:.2f}" for value in (step, merge, *parts.values()))
    share = 100 * merge / (50 * step + merge)
    megabytes = f"{told[0]['exchange_mb']:.1f} | {peaks['meet']:.0f} | {peaks['commit']:.0f}"
    print(f"| {layout} | {entries / 1e6:.1f} | {seconds} | {share:.2f} | {megabytes} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        measure_job(Path(sys.argv[2]), json.loads(sys.argv[3]))
        return
    print(
        "| layout | M entries | step s | merge s | publish s | load s | commit s | share at merge_every=50, % | "
        "published MB | peak MB | of which in commit MB |"
    )
    print("|---" * 11 + "|")
    for layout in sys.argv[1:] or LAYOUTS:
        run(layout)


if __name__ == "__main__":
    main()
