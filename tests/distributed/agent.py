"""One agent of a run, as a job of its own: python -m tests.distributed.agent NAME FOLDER [ram arguments as JSON]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from transformers import TrainerCallback

import ram_trl
from tests.training.test_callback import QUICK, trainer_of


class Compare(TrainerCallback):
    """Writes the digest of this rank's weights after every merge."""

    def __init__(self, folder: Path, agent: str, every: int) -> None:
        self.folder, self.agent, self.every = folder, agent, every

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            rank = dist.get_rank() if dist.is_initialized() else 0
            world = dist.get_world_size() if dist.is_initialized() else 1
            from ram_trl.team import Team
            from ram_trl.weights.live import LiveWeights

            live = LiveWeights(model, Team())
            weights = {
                n: live.read(n, 0, live.held()[i].stop).double().sum().item() for i, n in enumerate(live.names())
            }
            path = self.folder / f"seen-{self.agent}-{state.global_step}-rank{rank}.json"
            path.write_text(json.dumps({"world": world, "weights": weights}))


def main(agent: str, folder: Path, ram: dict) -> None:
    trainer = trainer_of(agent, folder / "base", folder)
    arguments = QUICK | {"agents": ("code", "mem", "tool")} | ram
    ram_trl.attach(
        trainer, hub=folder / "hub", agent=agent, base=folder / "base", merge_every=2, keep_rounds=99, **arguments
    )
    trainer.add_callback(Compare(folder, agent, 2))
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
