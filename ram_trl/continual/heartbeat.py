"""Who is alive: a heartbeat that an agent writes, and a watch over those of all. Hosts' clocks are never compared."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from ram_trl.continual.hub import Hub, HubError
from ram_trl.files import write_json

logger = logging.getLogger(__name__)


class Heartbeat:
    """
    Shows the other jobs that an agent trains, from a thread, until closed.

    Args:
        hub (`Hub`):
            The hub.
        agent (`str`):
            The agent.
        every (`float`):
            Seconds between beats.
        goes_on (`Callable[[], bool]`, *optional*):
            Asked before every beat; the first `False` ends them.
    """

    def __init__(self, hub: Hub, agent: str, every: float, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._path = hub.agent_folder(agent) / "heartbeat.json"
        self._hub = hub
        self._agent = agent
        self._every = every
        self._goes_on = goes_on
        self._session = uuid.uuid4().hex
        self._counter = 0
        self._state = {"round": 0, "step": 0}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.intruder: str | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"heartbeat-{agent}")

    def start(self) -> None:
        """
        Joins the hub under the agent's name.

        Raises:
            `HubError`: if another process of that name is alive.
        """
        before = self._hub.heartbeat(self._agent)
        if before is not None:
            time.sleep(2.5 * self._every)
            now = self._hub.heartbeat(self._agent)
            if now is not None and (now["session"], now["counter"]) != (before["session"], before["counter"]):
                raise HubError(
                    f"agent '{self._agent}' is already running in {self._hub.path} (its heartbeat moves); give this "
                    "one another name, or stop the other"
                )
        self.beat()
        self._thread.start()

    def tell(self, round_loaded: int, step: int) -> None:
        """Changes what the heartbeat says, at once."""
        self._state = {"round": round_loaded, "step": step}
        self.beat()

    def beat(self) -> None:
        """Writes one heartbeat. A hub that cannot be written to is left to the next beat."""
        with self._lock:
            try:
                held = self._hub.heartbeat(self._agent)
                if self._counter and held is not None and held["session"] != self._session:
                    self.intruder = held["session"]
                    return
                self._counter += 1
                write_json(
                    self._path, {"session": self._session, "counter": self._counter} | self._state, durable=False
                )
            except OSError as error:
                logger.warning("agent '%s': heartbeat not written (%s)", self._agent, error)

    def check(self) -> None:
        """
        Raises:
            `HubError`: if a second process took over the agent's name.
        """
        if self.intruder is not None:
            raise HubError(
                f"a second process of agent '{self._agent}' writes to {self._hub.path}; this one stops, so that its "
                "updates are not counted twice"
            )

    def close(self) -> None:
        """Stops beating."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            if not self._goes_on():
                logger.warning("agent '%s': its training ended without finishing, so its heartbeat stops", self._agent)
                break
            self.beat()
        self._goes_on = lambda: False  # the one given may hold on to a trainer


class Watch:
    """
    Tells which agents are alive, by this process's own clock.

    Args:
        hub (`Hub`):
            The hub.
        patience (`float`):
            Seconds without a new heartbeat after which an agent is taken for dead.
    """

    def __init__(self, hub: Hub, patience: float) -> None:
        self._hub = hub
        self._patience = patience
        self._seen: dict[str, tuple[tuple[str, int], float]] = {}

    def alive(self, agents: Sequence[str]) -> list[str]:
        """Those whose heartbeat moved within `patience` seconds, or that are seen for the first time."""
        now = time.monotonic()
        living = []
        for agent in agents:
            beat = self._hub.heartbeat(agent)
            mark = (beat["session"], beat["counter"]) if beat else ("", 0)
            known, since = self._seen.get(agent, (None, now))
            if mark != known:
                since = now
            self._seen[agent] = (mark, since)
            if now - since <= self._patience:
                living.append(agent)
        return living
