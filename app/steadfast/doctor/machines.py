"""Check the machines on which a configuration would train."""

import traceback
from collections.abc import Generator

from steadfast.config import Config
from steadfast.doctor.findings import Finding


def check_machines(config: Config, verbose: bool) -> Generator[Finding]:
    """Check the cluster that a run would join, and yield findings.

    If a run would embed Ray, only this machine is checked.
    """
    # Ray and torch take seconds to import, and the command prints a line before.
    import ray

    from steadfast.doctor.inspectors import check_nodes
    from steadfast.orchestration.cluster import EMBEDDED, RayNotStarted, connect, describe_cluster, gpus_per_worker

    try:
        address = connect(config.cluster, config.scaling, verbose)
    except RayNotStarted as error:
        if verbose:
            traceback.print_exception(error)
        yield Finding("error", "cluster", error.what, error.remedy)
        return
    try:
        yield Finding("ok", "cluster", describe_cluster(address))
        gpus = gpus_per_worker(config.scaling, address == EMBEDDED)
        yield from check_nodes(config.run.storage, on_gpus=gpus > 0)
    finally:
        # Without a shutdown the processes of an embedded Ray would run until the end of the command.
        ray.shutdown()
