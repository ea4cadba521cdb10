"""How long things may take. All of it follows from one number, so that the limits keep their order whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Timeouts:
    """Each limit is there for when the one before it has not helped.

    Args:
        silence_s: a worker that is not heard of for so long is dead.
    """

    silence_s: float = 5.0

    @property
    def beat_s(self) -> float:
        """Between two heartbeats: several within the limit, so that a late one is not a death; and often enough for the
        watchdog, which reads progress from them."""
        return min(1.0, self.silence_s / 5)

    @property
    def form(self) -> timedelta:
        """For a world to meet. All members are there when it begins; one that falls silent then is declared dead long
        before the others give up."""
        return timedelta(seconds=4 * self.silence_s)

    @property
    def connect(self) -> timedelta:
        """For those who have met to connect. Gloo takes five times as long to wait for a connection, and nothing frees
        it from that: so much at most is what a death at that moment costs the others."""
        return timedelta(seconds=1.5 * self.silence_s)

    @property
    def lease_s(self) -> float:
        """A worker that has not heard of the coordinator for so long is cut off, and does no step more: it has been
        taken for dead long since. A coordinator that waits for its storage is no reason to end all of them."""
        return 8 * self.silence_s

    @property
    def collective(self) -> timedelta:
        """For one collective. The last resort: a peer may be writing a checkpoint or validating meanwhile."""
        return timedelta(seconds=max(1800.0, 100 * self.silence_s))
