"""What the demo changes for its whole process while it runs, and puts back afterwards."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
import numpy as np
import torch
import transformers


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: more gain nothing for models this small, and the numbers then depend on no core count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """
    Flush denormal numbers to zero, for training only: Adam's moments decay into denormals, which are very slow.

    Merging would lose small updates in here, unless it keeps denormals for itself as [`Workers`]
    does. Threads inherit the setting from the one that starts them, so none may be started in here that lives on; with
    [`one_thread`] none are, and agents that take turns end in here.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def own_random_state() -> Iterator[None]:
    """Keep the seeding of trainers and makers from the caller's random numbers."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the warnings, log lines and bars of TRL, transformers and datasets; put everything back afterwards."""
    disabled = logging.root.manager.disable
    bars_of_transformers = transformers.utils.logging.is_progress_bar_enabled()
    bars_of_datasets = datasets.are_progress_bars_disabled() is False
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars_of_transformers:
            transformers.utils.logging.enable_progress_bar()
        if bars_of_datasets:
            datasets.enable_progress_bars()
