"""A heartbeat tells that an agent trains: as long as a step may take, and no longer than training goes on."""

from __future__ import annotations

import threading
import time

import pytest

import ram_trl
from ram_trl.continual.hub import Hub
from ram_trl.training.presence import training_goes_on
from tests.training.test_callback import QUICK, base, letters_of, trainer_of  # noqa: F401  (base is a fixture)

BEAT = 0.05


class Stopped(Exception):
    pass


def agent(base, out, reward):  # noqa: F811
    trainer = trainer_of("tool", base, out, max_steps=4)
    trainer.reward_funcs = [reward]
    arguments = QUICK | {"agents": (), "heartbeat": BEAT}
    ram_trl.attach(trainer, hub=out / "hub", agent="tool", base=base, merge_every=2, **arguments)
    return trainer


def beats(out) -> list[int]:
    """The heartbeat's counter at two times, many beats apart."""
    hub, found = Hub(out / "hub"), []
    for _ in range(2):
        time.sleep(10 * BEAT)
        found.append(hub.heartbeat("tool")["counter"])
    return found


def test_training_that_raised_beats_no_more_even_where_the_error_is_kept(base, tmp_path):  # noqa: F811
    calls = []

    def reward(completions, **columns):
        calls.append(1)
        if len(calls) == 3:
            raise Stopped
        return letters_of("tool")(completions)

    trainer = agent(base, tmp_path, reward)
    with pytest.raises(Stopped) as kept:  # as a notebook keeps it, with all its frames
        trainer.train()
    first, second = beats(tmp_path)
    assert first == second
    assert kept.tb is not None
    assert not any(thread.name == "heartbeat-tool" for thread in threading.enumerate())


def test_a_step_may_take_as_long_as_it_likes(base, tmp_path):  # noqa: F811
    seen = []

    def reward(completions, **columns):
        if not seen:
            seen.extend(beats(tmp_path))
        return letters_of("tool")(completions)

    agent(base, tmp_path, reward).train()
    assert seen[1] > seen[0]


def test_where_there_is_no_trainer_the_thread_has_to_live():
    found = []
    thread = threading.Thread(target=lambda: found.append(training_goes_on()))
    thread.start()
    thread.join()
    assert not found[0]()
    assert training_goes_on()()
