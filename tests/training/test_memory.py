"""What a merge takes in memory does not grow with what a rank holds."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from ram_trl.config import ContinualConfig
from ram_trl.continual.hub import Hub
from ram_trl.continual.member import Member
from ram_trl.team import Team
from ram_trl.weights.live import LiveWeights
from tests import models

ENTRIES = 24_000_000


def anonymous() -> int:
    """Anonymous memory of this process in bytes, without the pages of mapped files."""
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


class Watch:
    """The most memory held while the block runs, beyond what was held before."""

    def __enter__(self) -> Watch:
        self.before, self.over = anonymous(), threading.Event()
        self.peak = self.before
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.over.wait(0.002):
            self.peak = max(self.peak, anonymous())

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()
        self.extra = max(self.peak, anonymous()) - self.before


def test_publishing_merging_and_loading_hold_chunks_and_never_the_weights(tmp_path):
    """One tensor of 96 MB; a second copy of it, or of its active fifth, would show."""
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(ENTRIES // 4000, 4000))
    models.save_tensors(tmp_path, {"w": model.w.detach()})
    config = ContinualConfig(merge_every=1, heartbeat=0.2, on_hub_error="raise")
    member = Member(Hub(tmp_path / "hub"), "tool", tmp_path, LiveWeights(model, Team()), config)
    member.join(0, None, resume=False)
    try:
        for step in (1, 2):  # the first compiles
            with torch.no_grad():
                model.w.view(-1)[step::3] += 0.01
            with Watch() as watch:
                met = member.meet(step)
            assert met.round == step
    finally:
        member.leave()
    assert 0 < watch.extra < 32e6
    with Watch() as control:
        copy = model.w.detach().clone()
    assert control.extra > 64e6 > copy.nbytes / 2
