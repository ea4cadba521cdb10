"""Run the stages of a target of `make`: `python -m tests.stages test`, or a part of one, with options of pytest.

With --plan it only prints what the target has and how long each stage takes.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.stages.record import PROGRESS, ROOT, Stage, clock, group


def main(words: list[str]) -> int:
    """Return the exit code of the first stage that fails, or 0."""
    only_plan = words[0] == "--plan"
    if only_plan:
        words = words[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that pytest ends too
    target, options = words[0], words[1:]
    stages = group(target)
    if only_plan:
        print(plan(target, stages), flush=True)
        return 0
    for index, stage in enumerate(stages):
        print(f"== {stage.name}: {stage.what}; about {clock(stage.expected_s())}", flush=True)
        if code := run(target, index, stage, options):
            return code
    return 0


def plan(target: str, stages: list[Stage]) -> str:
    """Return lines that say what comes."""
    known = all(stage.last_wall_s() for stage in stages)
    source = "as last time here" if known else "on two quiet cores; more where others use the machine"
    total_s = sum(stage.expected_s() for stage in stages)
    lines = [f"make {target}: about {clock(total_s)} minutes, {source}"]
    lines += [f"  {stage.name:<12} {clock(stage.expected_s()):>6}  {stage.what}" for stage in stages]
    return "\n".join([*lines, f"  progress is in {PROGRESS.relative_to(ROOT)} too"])


def run(target: str, index: int, stage: Stage, options: list[str]) -> int:
    """Run pytest, and return its exit code."""
    jobs = int(os.environ.get("JOBS") or stage.jobs)
    # Few tests at a time to each process: long tests that wait would hold back the short ones behind them.
    parallel = ["-n", str(jobs), "--maxschedchunk", "4"] if stage.jobs > 1 else []
    ours = ["-p", "tests.stages.plugin", "--stage", f"{target}:{index}", *(["--part"] if options else [])]
    ours += ["--override-ini", "console_output_style=classic", "--durations=0", "--durations-min=60"]
    stated = shlex.split(stage.words)
    if any(Path(word.partition("::")[0]).exists() for word in options):
        stated = [word for word in stated if not word.startswith("tests/")]
    words = [sys.executable, "-m", "pytest", *ours, *parallel, *stated, *options]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
