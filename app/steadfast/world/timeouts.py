"""Time limits of a world, all derived from `silence_s`.

So the limits keep their order for any value of `silence_s`.
"""

from dataclasses import dataclass
from datetime import timedelta

# So many heartbeats cost the coordinator about a twentieth of a core. More arrive once the limit is the interval.
_HEARTBEATS_PER_S = 2000


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a world, from the first to the last resort."""

    silence_s: float = 5.0  # a worker without a heartbeat for this long counts as dead

    @property
    def heartbeat_s(self) -> float:
        """Return the interval between two heartbeats of a worker in a small world."""
        # Several fit into the limit, so that a late one is not taken for a death. The watchdog needs them often too,
        # because they carry the progress.
        return min(0.5, self.silence_s / 5)

    def heartbeat_of(self, world_size: int) -> float:
        """Return the interval between two heartbeats of a worker in a world of this size."""
        return max(self.heartbeat_s, min(world_size / _HEARTBEATS_PER_S, self.silence_s / 3))

    @property
    def acknowledge_s(self) -> float:
        """Return the shortest time between two acknowledgments of a worker's heartbeats."""
        return self.silence_s / 2

    @property
    def connect(self) -> timedelta:
        """Return the limit for members that have met to connect."""
        # Gloo waits five times as long for a connection, and cannot be interrupted meanwhile. So a death at this moment
        # delays the other members by up to 7.5 times silence_s.
        return timedelta(seconds=1.5 * self.silence_s)

    @property
    def form(self) -> timedelta:
        """Return the limit for the members of a world to meet."""
        # All members are alive at the beginning. A silent one is declared dead long before the limit.
        return timedelta(seconds=4 * self.silence_s)

    def first_collectives(self, size: int) -> timedelta:
        """Return the limit for the first collectives of `size` ranks, during which NCCL connects the ranks."""
        # A death that the coordinator knows of ends them sooner.
        return timedelta(seconds=(4 + size / 50) * self.silence_s)

    @property
    def lease_s(self) -> float:
        """Return how long a worker continues without contact to the coordinator."""
        # By then the coordinator has long declared the worker dead. A shorter limit would end all workers when the
        # coordinator merely waits for storage.
        return 8 * self.silence_s

    @property
    def collective(self) -> timedelta:
        """Return the limit for one collective, as a last resort."""
        # A peer may be writing a checkpoint or validating meanwhile.
        return timedelta(seconds=max(1800.0, 100 * self.silence_s))
