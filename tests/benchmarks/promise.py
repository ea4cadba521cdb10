"""What the kill of one of two fsdp workers costs on a busy machine, beside the bound that the run states.

chrt -i 0 python -m tests.benchmarks.promise --kills 10 --load 8 --bound '10 seconds'

One run under torchrun, which restarts both ranks after each kill. The busy processes have the priority of the workers.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.statistics import table
from tests.support.command import STANDALONE, Command, Running
from tests.support.curves import kill_rank

_WORDS = [
    *("run.steps=10000000", "logging.every_steps=1000", "trackers=[]", "parallel.kind=fsdp"),
    *("validation.every=null", "checkpoint.every=600 minutes", "recovery.max_failures=1000"),
]
_LIMIT_S = 600.0
_LATEST_S = 25.0  # of a kill, after the first step of its attempt


def kill_at(running: Running, attempt: int, delay_s: float, rank: int) -> dict[str, Any]:
    """Kill a rank, and return what is done again, in steps and in seconds of the killed attempt."""

    def steps() -> dict[int, float]:
        return {line["step"]: line["time_s"] for line in running.history.lines if line["attempt"] == attempt}

    running.wait_until(lambda: bool(steps()), f"attempt {attempt}", _LIMIT_S)
    began_s = min(steps().values())
    time.sleep(max(0.0, began_s + delay_s - time.time()))
    kill_rank(running, rank)
    restored = running.wait_for_event("restore", _LIMIT_S, attempt=attempt + 1)
    killed = steps()
    last = max(killed)
    # The copy may be of a step whose line the killed leader has not written: then nothing is done again.
    since = min(restored["step"], last)
    return {
        "killed after s": delay_s,
        "rank": rank,
        "steps done": len(killed),
        "step ms": 1e3 * (killed[last] - began_s) / max(1, len(killed) - 1),
        "steps again": last - since,
        "seconds again": killed[last] - killed.get(since, began_s),
        "source": restored["source"],
    }


def main() -> None:
    """Print a line for each kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--load", type=int, default=8, help="busy processes beside the two workers")
    parser.add_argument("--bound", default="10 seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
    rows: list[list[str]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = Command(Path(folder), launcher=[*STANDALONE, "--max-restarts", str(args.kills + 1)])
            running = command.start(*_WORDS, f"checkpoint.lose_at_most={args.bound}")
            try:
                for attempt in range(1, args.kills + 1):
                    found = kill_at(running, attempt, draw.uniform(0.0, _LATEST_S), draw.randrange(2))
                    print(attempt, found, flush=True)
                    rows.append(
                        [f"{value:.1f}" if isinstance(value, float) else str(value) for value in found.values()]
                    )
                said = [event["text"] for event in running.events if "lose_at_most" in event.get("text", "")]
            finally:
                running.interrupt(signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
                running.process.wait(_LIMIT_S)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(table([list(found), *rows]), *said, sep="\n")


if __name__ == "__main__":
    main()
