"""
Merging LoRA adapters in a model: python -m tests.benchmarks.lora [--json PATH] [--shrink N]

Three adapters of rank 16 on all linear layers of a Qwen3 of 0.41 billion parameters are merged into one of rank 16:
by `ram_trl.merge_adapters` and by peft's `add_weighted_adapter(combination_type="svd")`, both with equal weights (the
same task: the best fit of the mean of ΔW), and by RAM+ too, which peft does not have. Each runs in a process of its
own. Memory is the most anonymous memory during the merge: with the model and the adapters, and what the merge adds to
them. The error is that of the merged ΔW against the exact mean, over all layers, relative in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from ram_trl import MergeConfig, merge_adapters
from tests.benchmarks.large import layout
from tests.benchmarks.measured import ROOT, anonymous_kb

AGENTS = ("tool", "code", "memory")
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INTERVAL = 0.01


def peft_svd(full_matrices: bool) -> Callable[[Any], None]:
    """peft's merge, with its default of full matrices or without."""

    def run(model: Any) -> None:
        weights = [1 / len(AGENTS)] * len(AGENTS)
        how = {"combination_type": "svd", "svd_rank": RANK, "svd_full_matrices": full_matrices}
        model.add_weighted_adapter(list(AGENTS), weights, "merged", **how)

    return run


def ours(config: MergeConfig) -> Callable[[Any], None]:
    return lambda model: merge_adapters(model, AGENTS, "merged", config, rank=RANK)


PROGRAMS = {
    "peft svd": peft_svd(True),
    "peft svd, reduced": peft_svd(False),
    "ram_trl average": ours(MergeConfig(method="average")),
    "ram_trl RAM+": ours(MergeConfig(top=0.2, r=0.2)),
}


def make_model(shrink: int) -> Any:
    """A model in bfloat16 with three adapters that differ from zero."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(layout(1, shrink)).to(torch.bfloat16)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
    model = get_peft_model(model, config, adapter_name=AGENTS[0])
    for agent in AGENTS[1:]:
        model.add_adapter(agent, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return model


def error_of_mean(model: Any) -> float:
    """How far the merged adapter is from the mean of the three, over all layers."""
    missed = total = 0.0
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_A") and "merged" in module.lora_A:
                updates = [module.get_delta_weight(agent).double() for agent in AGENTS]
                mean = sum(updates[1:], updates[0]) / len(updates)
                missed += float((module.get_delta_weight("merged").double() - mean).square().sum())
                total += float(mean.square().sum())
    return (missed / total) ** 0.5


class Watch(threading.Thread):
    """Samples the anonymous memory of this process until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(INTERVAL):
            self.peak = max(self.peak, anonymous_kb(os.getpid()))


def work(program: str, shrink: int, result: Path) -> None:
    """One merge, measured, in this process; a toy merge before it brings in what is imported late."""
    PROGRAMS[program](make_model(8))
    model = make_model(shrink)
    before = anonymous_kb(os.getpid())
    watch = Watch()
    watch.start()
    times, start = os.times(), time.perf_counter()
    PROGRAMS[program](model)
    wall, after = time.perf_counter() - start, os.times()
    watch.stopped.set()
    watch.join()
    row = {
        "wall_s": wall,
        "cpu_s": sum(after[:2]) - sum(times[:2]),
        "peak_mb": watch.peak * 1024 / 1e6,
        "added_mb": (watch.peak - before) * 1024 / 1e6,
        "error": error_of_mean(model) if "RAM" not in program else None,
    }
    result.write_text(json.dumps(row), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--shrink", type=int, default=1, help="divide the width of all layers by this")
    parser.add_argument("--work", nargs=2, metavar=("PROGRAM", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work[0], arguments.shrink, Path(arguments.work[1]))
        return
    rows: dict[str, dict[str, float]] = {}
    print("| merge | wall s | CPU s | peak MB | added MB | error |\n|---|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for program in PROGRAMS:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "tests.benchmarks.lora", "--shrink", str(arguments.shrink)]
            subprocess.run([*command, "--work", program, str(result)], cwd=ROOT, check=True)
            row = rows[program] = json.loads(result.read_text(encoding="utf-8"))
            error = "" if row["error"] is None else f"{row['error']:.6f}"
            numbers = f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['peak_mb']:.0f} | {row['added_mb']:.0f}"
            print(f"| {program} | {numbers} | {error} |", flush=True)
    theirs, ours_ = rows["peft svd"], rows["ram_trl average"]
    ratios = {key: theirs[key] / ours_[key] for key in ("wall_s", "cpu_s", "peak_mb", "added_mb", "error")}
    told = ", ".join(f"{key} {value:.3g}" for key, value in ratios.items())
    print(f"\npeft svd / ram_trl average: {told}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
