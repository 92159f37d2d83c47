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

    def reduce(self, tensor: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """Elementwise sum or maximum over the ranks."""
        if self.world == 1:
            return tensor
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else tensor.device
        moved = tensor.to(device, copy=True)
        dist.all_reduce(moved, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation])
        return moved.to(tensor.device)

    def together(self, work: Callable[[], Result]) -> Result:
        """
        Runs `work` (which enters no collective) on every rank; if it raises on one, all ranks raise.

        Raises:
            What `work` raised here, or `JobError` (`JobOSError` for an `OSError`) naming the first rank that failed.
        """
        result: Result | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except Exception as error:  # told to all ranks below, and raised
            failure = error
        told = self.collect(None if failure is None else (f"{type(failure).__name__}: {failure}", _is_os(failure)))
        if failure is not None:
            raise failure
        for rank, entry in enumerate(told):
            if entry is not None:
                message, is_os = entry
                raise (JobOSError if is_os else JobError)(f"rank {rank} of this job failed: {message}")
        return result  # type: ignore[return-value]  # it is what work returned


def _is_os(error: BaseException) -> bool:
    return isinstance(error, OSError)
