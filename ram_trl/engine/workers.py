"""Threads that work through chunks, with the floating-point settings that keep results the same to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD_PER_THREAD = 4


class Workers:
    """
    A pool to map a function over chunks; use it as a context manager.

    Torch runs single-threaded inside it: chunks are small, and the parallelism is over chunks. Denormals are kept, in
    the pool and in the thread that enters it: `torch.set_flush_denormal(True)`, which RL scripts set for speed, would
    turn small task vectors into zeros. Both settings are put back on leaving.

    Args:
        threads (`int`, *optional*):
            Number of threads; by default the CPUs this process may use.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}; give at least 1")
        self.threads = threads or len(os.sched_getaffinity(0))

    def __enter__(self) -> Workers:
        self._outer_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._outer_flush = float(np.float32(1e-40)) == 0
        torch.set_flush_denormal(False)
        self._pool = ThreadPoolExecutor(self.threads, initializer=torch.set_flush_denormal, initargs=(False,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._outer_threads)
        torch.set_flush_denormal(self._outer_flush)

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """
        Results in the order of the items, with a bounded number of chunks in flight.

        Raises:
            Whatever `work` raises, for the first item in order.
        """
        items = iter(items)
        waiting = [self._pool.submit(work, item) for item in islice(items, AHEAD_PER_THREAD * self.threads)]
        while waiting:
            result = waiting.pop(0).result()
            waiting += [self._pool.submit(work, item) for item in islice(items, 1)]
            yield result
