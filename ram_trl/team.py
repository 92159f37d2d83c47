"""The ranks of one job: the few collectives that continual merging needs. Weights never go through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class JobError(RuntimeError):
    """Another rank of the job failed; the message names the rank and its error."""


class JobOSError(OSError):
    """Another rank of the job could not read or write; the message names the rank and its error."""


class Team:
    """All ranks of the job, or one process alone. Every method but `first` is collective: all ranks, same order."""

    def __init__(self) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world = dist.get_world_size() if distributed else 1
        self._working = False
        self._heard: Exception | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        held: list[Any] = [None] * self.world
        dist.all_gather_object(held, value)
        return held

    def ask(self, work: Callable[[], Result]) -> Result:
        """Rank 0's answer, on every rank: `work` runs there alone. If it raises, all ranks raise."""
        return self.share(self.together(lambda: work() if self.first else None))

    def reduce(self, tensor: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """
        Elementwise sum or maximum over the ranks. Within `together` it first hears whether a rank has failed.

        Raises:
            `JobError`, `JobOSError`: within `together`, naming a rank that failed before it came here.
        """
        if self.world == 1:
            return tensor
        if self._working:
            self._agree(None)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else tensor.device
        moved = tensor.to(device, copy=True)
        dist.all_reduce(moved, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation])
        return moved.to(tensor.device)

    def together(self, work: Callable[[], Result]) -> Result:
        """
        Runs `work` on every rank; if it raises on one, all ranks raise. It may enter `reduce` but no other collective.

        Raises:
            What `work` raised here, or `JobError` (`JobOSError` for an `OSError`) naming the first rank that failed.
        """
        self._working = True
        try:
            result = work()
        except Exception as error:
            if error is not self._heard:  # the others do not know of it yet
                self._agree(error)
            raise
        finally:
            self._working = False
        self._agree(None)
        return result

    def _agree(self, failure: Exception | None) -> None:
        """Tells the others of a failure, or hears of theirs and raises."""
        own = None if failure is None else (f"{type(failure).__name__}: {failure}", isinstance(failure, OSError))
        told = self.collect(own)
        for rank, entry in enumerate(told):
            if entry is not None and failure is None:
                message, is_os = entry
                self._heard = (JobOSError if is_os else JobError)(f"rank {rank} of this job failed: {message}")
                raise self._heard
