"""
What the last jobs of a run may leave undone when they are killed, done in their place.

    python -m ram_trl.continual.completing HUB BASE

Whatever a decision asks for is a pure function of it, so a process without a trainer can make it, with the same bytes.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from ram_trl.config import ContinualConfig
from ram_trl.continual.closing import Closer
from ram_trl.continual.export import export_round
from ram_trl.continual.hub import Hub
from ram_trl.continual.rounds import Rounds
from ram_trl.engine.workers import Workers
from ram_trl.team import Team
from ram_trl.weights import whole

logger = logging.getLogger(__name__)


def complete(hub: Hub, base: Path) -> int:
    """
    Closes the final round if all agents are done and something is left, makes missing states, exports the newest.

    Args:
        hub (`Hub`):
            The hub, in which nobody trains any more.
        base (`Path`):
            Folder of the base.

    Returns:
        `int`: the newest round.
    """
    identity = hub.described()["identity"]
    rounds = Rounds(hub, Team(), identity)
    config = ContinualConfig(merge_every=1, resync=identity["resync"])
    if hub.agents() and hub.state_folder(0).exists():
        Closer(hub, rounds, "launcher", config).close_the_last()
    decisions = hub.decisions()
    made = max((d.round for d in decisions if hub.state_folder(d.round).exists()), default=0)
    for decision in decisions[made:]:
        logger.info("making the state of round %d", decision.round)
        with Workers() as workers:
            rounds.make_state(decision, list(whole(rounds.state(decision.round - 1))), workers)
    if decisions:
        export_round(hub, len(decisions), base)  # does nothing if it is there
    return len(decisions)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    complete(Hub(Path(sys.argv[1])), Path(sys.argv[2]))
