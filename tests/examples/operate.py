"""Operate a run by its JSON: start, wait, read, resize, stop, resume, audit and export (docs/json.md).

python operate.py FILE NAME WEIGHTS [key=value ...]
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STEADFAST = [sys.executable, "-m", "steadfast"]
STOPPED = 3  # exit code of a run that was stopped on request


def read(*words: str) -> Any:
    """Return the document that a verb prints, None if the verb fails."""
    done = subprocess.run([*STEADFAST, *words, "--json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.stdout else None


def wait_for(
    command: subprocess.Popen[bytes], run: list[str], condition: Callable[[dict[str, Any]], bool], seconds: float = 600
) -> dict[str, Any]:
    """Return the first status that meets a condition.

    Raises:
        RuntimeError: the command has ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    status = None
    while command.poll() is None and time.monotonic() < deadline:
        status = read("status", *run)  # None until the command has made the run directory
        if status is not None and condition(status):
            return dict(status)
        time.sleep(1)
    raise RuntimeError(f"exit code {command.poll()}; the last status is {status}")


def main() -> None:
    file, name, weights, *overrides = sys.argv[1:]
    train = [*STEADFAST, "--config", file, f"run.name={name}", *overrides]
    # Readers find the run by its name and the storage of the command.
    run = [name, *(word for word in overrides if word.startswith("run.storage="))]

    command = subprocess.Popen(train)
    status = wait_for(command, run, lambda status: status["step"] >= 5)
    workers = status["log"]["world_size"] if status["log"] else 0
    print("operate: at step", status["step"], "with", workers, "workers", flush=True)

    subprocess.run([*STEADFAST, "scale", *run, "--workers", "1"], check=True)
    status = wait_for(command, run, lambda status: any(each["workers"] for each in status["interruptions"]))
    for each in status["interruptions"]:
        print("operate:", each["kind"], *each["causes"], each["workers"], each["lost_steps"], flush=True)

    command.send_signal(signal.SIGINT)  # the run finishes its step and writes a checkpoint
    if command.wait() != STOPPED:
        raise RuntimeError(f"the command ended with {command.returncode}")
    checkpoint = read("status", *run)["checkpoint"]
    print("operate: stopped with a checkpoint of step", checkpoint["step"], flush=True)

    last = checkpoint["step"] + 5
    subprocess.run([*train, f"run.steps={last}"], check=True)  # the same command resumes; this one also ends it
    status = read("status", *run)
    print("operate:", status["state"], "at step", status["step"], status["metrics"], flush=True)

    audit = read("audit", *run)
    if not audit["proved"]:
        raise RuntimeError(audit["counter_example"])
    subprocess.run([*STEADFAST, "export", *run, "--out", weights], check=True)
    print("operate: proved", audit["steps"], "steps", flush=True)


if __name__ == "__main__":
    main()
