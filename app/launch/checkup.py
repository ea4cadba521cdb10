"""Check the machines on which the same configuration would train, before it does."""

from collections.abc import Generator

from app.checkup.findings import Finding
from app.config import Config


def check_machines(config: Config, verbose: bool) -> Generator[Finding]:
    """Check the cluster that a run would join, else this machine with a Ray of its own. Yield findings as they come."""
    import ray

    from app.orchestration.checkup import check_nodes
    from app.orchestration.cluster import connect, describe_cluster

    address = connect(config, verbose)
    try:
        yield Finding("ok", "cluster", describe_cluster(address))
        yield from check_nodes(config.run.storage)
    finally:
        ray.shutdown()
