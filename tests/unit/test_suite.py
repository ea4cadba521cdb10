"""Stages of the tests: CPU seconds are counted, a stage over its budget fails in CI, and progress is told."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stages.meter import Meter
from tests.stages.record import ROOT

TABLE = """
[budget]
margin = 1.0
loop_s = 1.0e9  # so that no machine counts as slower

[groups]
both = ["first", "second"]

[stages.first]
what = "burns a second"
words = "."
jobs = 1
wall_s = 10
cpu_s = {cpu_s}

[stages.second]
what = "more"
words = "."
jobs = 1
wall_s = 30
cpu_s = 1
"""
CONFTEST = """
from pathlib import Path
from tests.stages import plugin, record
plugin._PROGRESS_S = 0.0
record.TABLE, record.FOLDER = Path("stages.toml"), Path("figures")
record.PROGRESS = record.FOLDER / "progress.txt"
"""
# The child is not waited for, as a daemon of Ray's.
BURNS = """
import subprocess, sys, time
SECOND = "import time\\nwhile time.process_time() < 1.0: pass"
def test_dear(): subprocess.Popen([sys.executable, "-c", SECOND], start_new_session=True); time.sleep(2.5)
def test_cheap(): pass
"""
# Says whether a process of this user may make a control group.
EXACT = "from tests.stages.meter import Meter; meter = Meter(); print(meter.exact); meter.close()"


@pytest.fixture(scope="module")
def exact() -> None:
    answer = subprocess.run([sys.executable, "-c", EXACT], cwd=ROOT, capture_output=True, text=True, check=True)
    if answer.stdout.strip() != "True":
        pytest.skip("needs control groups of Linux, and root")


def stage(folder: Path, cpu_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a stage of two tests, one of which uses a second of CPU."""
    (folder / "stages.toml").write_text(TABLE.format(cpu_s=cpu_s))
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_burns.py").write_text(BURNS)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'app'}", **variables}
    words = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", "-p", "tests.stages.plugin"]
    words += ["--stage", "both:0", "test_burns.py"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("cpu_s", "variables"), [(0.5, {"CI": "true"}), (0.5, {}), (60.0, {"CI": "true"})])
def test_stage_over_its_budget_fails_in_ci_and_names_its_dearest_test(
    tmp_path: Path, cpu_s: float, variables: dict[str, str]
) -> None:
    done = stage(tmp_path, cpu_s, **variables)
    assert done.returncode == int(cpu_s < 1 and "CI" in variables), done.stdout
    over = done.stdout.partition("first is over its budget")[2]
    assert bool(over) is (cpu_s < 1)
    if over:
        assert over.index("test_burns.py::test_dear") < over.index("test_burns.py::test_cheap")
    assert "of make both, about" in done.stdout
    percent = int(re.findall(r"(\d+)% of make both", done.stdout)[-1])
    assert 25 <= percent < 100, "ten of forty seconds; more on a busy machine, where the first stage takes longer"
    assert "first: 0:0" in (tmp_path / "figures" / "progress.txt").read_text()


def test_meter_without_a_control_group_counts_this_process() -> None:
    meter = Meter(parent="/nowhere")
    assert not meter.exact
    assert meter.seconds() > 0
