"""Check the machines on which a configuration would train."""

import traceback
from collections.abc import Generator

from app.checkup.findings import Finding
from app.config import Config


def check_machines(config: Config, verbose: bool) -> Generator[Finding]:
    """Check the cluster that a run would join, and yield findings.

    If a run would embed Ray, only this machine is checked.
    """
    import ray

    from app.orchestration.checkup import check_nodes
    from app.orchestration.cluster import EMBEDDED, RayNotStarted, connect, describe_cluster, gpus_per_worker

    try:
        address = connect(config, verbose)
    except RayNotStarted as error:
        if verbose:
            traceback.print_exception(error)
        yield Finding("error", "cluster", error.what, error.remedy)
        return
    try:
        yield Finding("ok", "cluster", describe_cluster(address))
        gpus = gpus_per_worker(config, address == EMBEDDED)
        yield from check_nodes(config.run.storage, on_gpus=gpus > 0)
    finally:
        ray.shutdown()
