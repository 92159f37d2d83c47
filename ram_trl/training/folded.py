"""
What is told of an adapter whose rounds went into the base's weights (`lora="fold"`): it belongs to a round and no
longer to the checkpoint, which nothing in its own files says.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ram_trl.continual.hub import Hub

logger = logging.getLogger(__name__)


def warn(agent: str, base: Path, hub: Hub, number: int) -> None:
    """Warns whoever watches the training of an agent that has loaded a round."""
    logger.warning(
        "agent '%s': rounds go into the base's weights (lora=\"fold\"), so from now on an adapter that the trainer "
        "saves belongs to the newest round and not to %s; use the hub's generalists, the newest of which is %s",
        agent, base, hub.generalist_folder(number),
    )  # fmt: skip


def note_in_card(card: Path, agent: str, base: Path, hub: Hub, number: int) -> None:
    """Adds to the model card of a checkpoint, for whoever finds it later."""
    told = (
        f"\n\n## Merged while it trained\n\nThis adapter belongs to what agent '{agent}' had loaded of round {number} "
        f'of the hub {hub.path} (`lora="fold"`), and **not to {base}**: on that it computes something else. It is '
        "here for training to be resumed, which puts back what it belongs to. The model to use is the hub's "
        f"generalist, `{hub.generalist_folder(number)}`.\n"
    )
    with card.open("a", encoding="utf-8") as file:
        file.write(told)
