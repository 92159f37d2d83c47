"""The ranks of a job agree: what one of them cannot do, none of them does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from ram_trl.team import JobError, JobOSError, Team


def work_of(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    team = Team()
    assert (team.rank, team.world, team.first) == (rank, ranks, rank == 0)
    assert team.share(rank) == 0
    assert team.collect(rank) == list(range(ranks))
    assert team.ask(lambda: team.rank) == 0
    assert team.reduce(torch.tensor([rank, -rank]), "sum").tolist() == [3, -3]
    assert team.reduce(torch.tensor([rank, -rank]), "max").tolist() == [2, 0]

    # Wherever among the reductions a rank fails, all raise, and all can go on together afterwards.
    for failing_call in range(4):
        calls = []

        def count(failing_call: int = failing_call, calls: list[int] = calls) -> int:
            for call in range(3):
                if rank == 1 and call == failing_call:
                    raise OSError("a lost disk")
                calls.append(int(team.reduce(torch.tensor([1]), "sum")))
            if rank == 1 and failing_call == 3:
                raise ValueError("a wrong number")
            return sum(calls)

        own = {True: (ValueError, "a wrong number"), False: (OSError, "a lost disk")}[failing_call == 3]
        heard = (
            JobError if failing_call == 3 else JobOSError,
            rf"rank 1 of this job failed: {own[0].__name__}: {own[1]}",
        )
        kind, message = own if rank == 1 else heard
        with pytest.raises(kind, match=re.escape(message)):
            team.together(count)
        assert calls == [3] * failing_call
        assert team.together(lambda: int(team.reduce(torch.tensor([1]), "sum"))) == 3

    # Two ranks fail, each in its own way: both tell their own error, the third hears of the first.
    def fail() -> None:
        if rank > 0:
            raise ValueError(f"error of rank {rank}")
        team.reduce(torch.tensor([1]), "sum")

    with pytest.raises(ValueError if rank else JobError, match=f"error of rank {max(1, rank)}"):
        team.together(fail)
    # Only rank 0 is asked; if it fails, all know why.
    with pytest.raises(OSError, match="no hub"):
        team.ask(lambda: (_ for _ in ()).throw(OSError("no hub")))
    dist.destroy_process_group()


def test_ranks_share_reduce_and_fail_together(tmp_path: Path):
    torch.multiprocessing.spawn(work_of, (3, str(tmp_path)), nprocs=3)


def test_one_process_is_a_team():
    team = Team()
    assert team.together(lambda: team.reduce(torch.tensor([2]), "sum")) == 2
    with pytest.raises(ValueError, match="wrong"):
        team.together(lambda: (_ for _ in ()).throw(ValueError("wrong")))
