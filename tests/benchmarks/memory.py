"""Compare the memory that `plan` estimates with what workers hold, by the CPU's allocator.

python -m tests.benchmarks.memory
"""

from typing import NamedTuple

from steadfast.commands.plan import plan
from steadfast.config import Config, parse_config
from steadfast.plan import even_shares
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, form_world
from tests.benchmarks.statistics import table
from tests.support.allocator import peak_bytes
from tests.support.gang import Gang, Member
from tests.support.reference import CPU
from tests.support.stepping import train_by_hand

_RUN = """
run: {steps: 2}
batch: {global_size: 12, microbatch_size: 2}
model: {kind: gpt, num_heads: 4, context_length: 128}
data: {source: python-docs, context_length: 128}
"""
# From mostly activations to mostly weights.
SIZES = {
    "0.9 M": ["model.num_layers=4", "model.embed_dim=128", "batch.microbatch_size=6", "batch.global_size=18"],
    "2.4 M": ["model.num_layers=3", "model.embed_dim=256"],
    "10.8 M": ["model.num_layers=6", "model.embed_dim=384"],
    "19.0 M": ["model.num_layers=6", "model.embed_dim=512", "batch.microbatch_size=1", "batch.global_size=3"],
}


class Compared(NamedTuple):
    """Bytes of the first worker, which has the largest share: as `plan` estimates them, and as they were."""

    estimated: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured


def config_of(size: str, strategy: str, num_workers: int) -> Config:
    overrides = [*SIZES[size], f"parallel.kind={strategy}", f"scaling.num_workers={num_workers}"]
    return parse_config(_RUN, "memory.yaml", overrides)


def compare(config: Config) -> Compared:
    """Train two steps with real workers, and compare what the first one held with its estimate."""
    estimated = plan(config, None)["worlds"][0]["memory_bytes"]
    with Gang(config.scaling.min_workers) as gang:
        measured = gang.run(_measure, config)
    return Compared(estimated, measured[0])


def _measure(member: Member, config: Config) -> int:
    num_workers = config.scaling.min_workers
    world = form_world(member.store, WorldRank(member.number, num_workers, 1), WorkerProcess(CPU))
    try:
        shares = even_shares(config.batch.num_microbatches, num_workers)
        return peak_bytes(lambda: train_by_hand(world, config, shares))
    finally:
        world.groups.destroy()


def main() -> None:
    rows = [["parameters", "strategy", "workers", "estimated MiB", "measured MiB", "ratio"]]
    for size in SIZES:
        for strategy in ("ddp", "fsdp"):
            for num_workers in (2, 3):
                found = compare(config_of(size, strategy, num_workers))
                megabytes = [f"{each / 2**20:.2f}" for each in found]
                rows.append([size, strategy, str(num_workers), *megabytes, f"{found.ratio:.4f}"])
    print(table(rows))


if __name__ == "__main__":
    main()
