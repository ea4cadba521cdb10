"""Let many workers ask a coordinator, a real actor of Ray, for their places, from one driver.

python -m tests.cluster.many_asks 1001
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from steadfast.config import RecoveryConfig, ScalingConfig
from steadfast.orchestration.membership import Membership
from steadfast.orchestration.messages import Member
from steadfast.orchestration.trainer import start_coordinator
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore

LIMIT_S = 90.0


def ask(folder: Path, num_workers: int) -> dict[str, float]:
    """Return how many calls are answered, and the seconds for all and for one of the driver's in between."""
    directory = RunDirectory(LocalStore(folder))
    directory.check_writable()
    membership = Membership.of(ScalingConfig(num_workers=(1, 2 * num_workers)), expected=num_workers + 1)
    membership.settle_s = 600.0  # nobody gets a place: all wait for one more
    ownership = Ownership.claim(directory.store)
    coordinator = start_coordinator(RecoveryConfig(silence_s=600.0), membership, directory, ownership)
    members = [Member(f"{number:08x}", None, f"node-{number // 8}", ("127.0.0.1", 1)) for number in range(num_workers)]
    began_s = time.monotonic()
    calls: list[Any] = [coordinator.admit.remote(member.name) for member in members]
    calls += [coordinator.ask.remote(member, 0) for member in members]
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=LIMIT_S)
    all_s = time.monotonic() - began_s
    began_s = time.monotonic()
    ray.wait([coordinator.events.remote(0, False)], timeout=LIMIT_S)
    return {"answered": len(answered) - num_workers, "all_s": all_s, "events_s": time.monotonic() - began_s}


def main() -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(ask(Path(folder), int(sys.argv[1]))), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
