"""
Where the time of a run goes, by schedule: python -m tests.benchmarks.schedules [--small] [schedule …]

`ram-trl launch` with three GRPO agents and a model of 51 M parameters in fp32 on the CPU, merging every 2 of 4 steps.
Prints, per schedule, the time of the whole run and each agent's shares of training, publishing, waiting and merging,
as the run's own report has them. With `--small` the model is tiny: to see that it works.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from tests import models, small_run

SCHEDULES = ("concurrent", "interleaved", "mixed")


def base(seed: int, progress: Any):
    import torch

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=640, intermediate_size=1920, num_hidden_layers=10, num_attention_heads=10,
        num_key_value_heads=5, head_dim=64, tie_word_embeddings=True, max_position_embeddings=128,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), models.tokenizer()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    for schedule in chosen.schedules:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            recipe = small_run.recipe(folder, steps=4)
            made = "tests.small_run:base" if chosen.small else "tests.benchmarks.schedules:base"
            changes = [f"base.make={made}", "scoring.rounds=false", "continual.keep_rounds=3"]
            options = [part for change in changes for part in ("--set", change)]
            command = [sys.executable, "-m", "ram_trl.cli", "launch", str(recipe), "--schedule", schedule, *options]
            started = time.monotonic()
            with (folder / "out.txt").open("w") as out:
                code = subprocess.run(command, check=False, stdout=out, stderr=subprocess.STDOUT).returncode
            took = time.monotonic() - started
            if code:
                sys.exit((folder / "out.txt").read_text())
            told = (folder / "run" / "report" / "report.md").read_text()
            table = told.split("## Where the time went")[1].split("## Rounds")[0].strip()
            print(f"{schedule}, {took:.0f} s in all\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
