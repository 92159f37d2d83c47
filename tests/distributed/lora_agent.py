"""
A LoRA agent as a job of several ranks: `… -m tests.distributed.lora_agent FOLDER SETTINGS`, settings as JSON.

Every rank writes all parameters as it sees them around every merge, whole, gathered by the engine's own means.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from transformers import TrainerCallback

import ram_trl
from tests.distributed.sharded import Die, make_trainer, prepare, whole_copies, whole_masters


class Record(TrainerCallback):
    def __init__(self, folder: Path, when: str) -> None:
        self.folder, self.when = folder, when

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        copies, masters = whole_copies(model, frozen=True), whole_masters(model, optimizer)
        tensors = {f"copy {n}": t.contiguous() for n, t in copies.items()}
        tensors |= {f"master {n}": t.contiguous() for n, t in masters.items()}
        rank = dist.get_rank() if dist.is_initialized() else 0
        save_file(tensors, self.folder / f"{self.when}-{state.global_step}-rank{rank}.safetensors")


def main(folder: Path, settings: dict) -> None:
    prepare()
    trainer = make_trainer(folder, settings)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if settings.get("die", {}).get("rank") == rank:
        trainer.add_callback(Die(settings["die"]["step"]))
    trainer.add_callback(Record(folder, "before"))
    callback = ram_trl.attach(
        trainer, hub=folder / "hub", agent="tool", base=folder / "base", merge_every=2, keep_rounds=99,
        heartbeat=0.2, patience=60, timeout=100, on_hub_error="raise", **settings["ram"],
    )  # fmt: skip
    trainer.add_callback(Record(folder, "after"))
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    seen = {
        "world": dist.get_world_size() if dist.is_initialized() else 1,
        "distributed": str(AcceleratorState().distributed_type).rsplit(".", 1)[-1],
        "layout": callback._live.title,
        "fit_error": callback._live.fit_error,
    }
    (folder / f"seen-rank{rank}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
