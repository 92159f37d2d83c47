"""Whether a trainer still trains, as another thread can tell: one that failed must not look alive for ever."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

HANDLER = "transformers.trainer_callback"
LIBRARIES = ("transformers", "trl", "accelerate")


def training_goes_on() -> Callable[[], bool]:
    """
    For a callback of a trainer to call in `on_train_begin`: tells, from any thread, whether that training still runs.

    It does as long as the trainer's `train` is on the stack of its thread, however long a step takes. If `train` was
    left by an exception it is not, even where a notebook keeps the exception, and with it trainer and model. Where no
    trainer is on the stack, the thread itself has to live.
    """
    thread = threading.current_thread()
    frame = _training(sys._getframe())
    return lambda: thread.is_alive() and (frame is None or _is_on_stack(frame, thread.ident))


def _training(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of the trainer that called its callbacks; `None` if they were called by something else."""
    while frame is not None and _module(frame) != HANDLER:
        frame = frame.f_back
    outermost = None
    while frame is not None and _module(frame).split(".")[0] in LIBRARIES:
        outermost = frame if _module(frame) != HANDLER else outermost
        frame = frame.f_back
    return outermost


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_on_stack(frame: FrameType, thread: int | None) -> bool:
    at = sys._current_frames().get(thread) if thread is not None else None
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None
