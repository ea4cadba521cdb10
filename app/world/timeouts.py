"""How long things may take. All of it follows from one number, so that the limits keep their order whatever it is."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Timeouts:
    """The time limits of a world. Each is there for when the one before it has not helped."""

    silence_s: float = 5.0  # a worker without a heartbeat for so long counts as dead

    @property
    def heartbeat_s(self) -> float:
        """Return the interval between two heartbeats."""
        # Several within the limit, so that a late one is not a death; and often enough for the watchdog, which reads
        # progress from them.
        return min(0.5, self.silence_s / 5)

    @property
    def connect(self) -> timedelta:
        """Return the limit for members that have met to connect."""
        # Gloo waits five times as long for a connection, and nothing frees it from that. So a death at this moment
        # costs the others 7.5 times silence_s at most.
        return timedelta(seconds=1.5 * self.silence_s)

    @property
    def form(self) -> timedelta:
        """Return the limit for the members of a world to meet."""
        # All of them are there when it begins. One that falls silent is declared dead long before the others give up.
        return timedelta(seconds=4 * self.silence_s)

    def first_collectives(self, size: int) -> timedelta:
        """Return the limit for the first collectives of `size` ranks, during which NCCL connects the ranks."""
        # A death that the coordinator knows of ends them sooner.
        return timedelta(seconds=(4 + size / 50) * self.silence_s)

    @property
    def lease_s(self) -> float:
        """Return for how long a worker goes on without hearing from the coordinator."""
        # After that it has been taken for dead long since. Not less: a coordinator that waits for its storage is no
        # reason to end all workers.
        return 8 * self.silence_s

    @property
    def collective(self) -> timedelta:
        """Return the limit for one collective, as a last resort: a peer may be writing a checkpoint or validating."""
        return timedelta(seconds=max(1800.0, 100 * self.silence_s))
