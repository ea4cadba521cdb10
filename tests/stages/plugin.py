"""Plugin of pytest for a stage: progress of the whole target, CPU seconds of each test, and the budget of the stage.

It measures in each process of pytest-xdist, and adds up in the one that prints.
"""

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.stages import record
from tests.stages.meter import Meter, loop_s
from tests.stages.record import Stage, clock

_PROGRESS_S = 10.0
_COST = "cost"  # name of the user property that brings figures of a test to the process that prints
_DEAREST = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stage", help="TARGET:INDEX of the stage that this run of pytest is")
    parser.addoption("--part", action="store_true", help="this run has only a part of its stage")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        own = Meter(worker["group"])
        config.pluginmanager.register(_Measure(own), "stage-measure")
        config.add_cleanup(own.close)
        return
    meter = Meter()
    target, _, index = config.getoption("--stage").partition(":")
    printing = _Print(config, meter, record.group(target), int(index), target)
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(_Group(meter), "stage-group")
    else:
        config.pluginmanager.register(_Measure(meter), "stage-measure")
    config.pluginmanager.register(printing, "stage-print")
    config.add_cleanup(meter.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _TwoHeads(config, log) if config.getoption("dist") == "loadscope" else None


class _TwoHeads(LoadScopeScheduling):  # type: ignore[misc]
    """Gives tests with Ray to two processes, which keep a head each, and every other test to any process."""

    def _split_scope(self, nodeid: str) -> str:
        if not nodeid.startswith("tests/cluster/"):
            return nodeid
        return "first head" if nodeid < "tests/cluster/test_nodes" else "second head"  # halves that take about as long


class _Group:
    """Gives workers of pytest-xdist the control group of this process."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["group"] = self._meter.group


class _Measure:
    """Measures each test of this process."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._began = (0.0, 0.0)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._began = (time.monotonic(), self._meter.seconds())
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        outcome: Any = yield
        if call.when == "teardown":
            wall_s, cpu_s = time.monotonic() - self._began[0], self._meter.seconds() - self._began[1]
            outcome.get_result().user_properties.append((_COST, (round(wall_s, 3), round(cpu_s, 3))))


class _Print:
    """Prints progress in place of pytest's dots, and checks the budget at the end."""

    def __init__(self, config: pytest.Config, meter: Meter, stages: list[Stage], index: int, target: str) -> None:
        self._config, self._meter, self._target = config, meter, target
        self._stage = stages[index]
        self._before_s = sum(stage.expected_s() for stage in stages[:index])
        self._after_s = sum(stage.expected_s() for stage in stages[index + 1 :])
        self._walls_s = self._stage.test_walls_s()
        self._began_s = time.monotonic()
        self._told_s = self._began_s
        self._tests: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._loops_s = [loop_s()]
        self._num_failed = 0
        self._verdict: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._tests = set(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tests = {item.nodeid for item in session.items}

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print nothing for a test that passes, and a line for one that fails."""
        if hasattr(report, "wasxfail"):
            return None
        if report.passed and report.when == "call":
            return "passed", "", ""
        if report.failed:
            return ("failed" if report.when == "call" else "error"), "", "FAILED"
        return ("skipped", "", "SKIPPED") if report.skipped else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._num_failed += 1
            self._terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
        if report.when != "teardown":
            return
        cost: Any = dict(report.user_properties).get(_COST, (0.0, 0.0))
        wall_s, cpu_s = cost
        self._rows.append({"test": report.nodeid, "wall_s": wall_s, "cpu_s": cpu_s})
        if time.monotonic() - self._told_s >= _PROGRESS_S:
            self._told_s = time.monotonic()
            self._loops_s.append(loop_s())
            self._tell()

    def _tell(self) -> None:
        done = {row["test"] for row in self._rows}
        weights_s = {test: self._walls_s.get(test, 0.1) for test in self._tests | done}
        share = sum(weights_s[test] for test in done) / sum(weights_s.values())
        expected_s = self._stage.expected_s()
        here_s = max(expected_s, time.monotonic() - self._began_s)
        whole_s = self._before_s + here_s + self._after_s
        percent = 100 * (self._before_s + share * here_s) / whole_s
        left_s = (1 - share) * here_s + self._after_s
        line = (
            f"{percent:3.0f}% of make {self._target}, about {clock(left_s)} left: {self._stage.name}, "
            f"{len(done)} of {len(weights_s)} tests, {self._num_failed} failed"
        )
        _write_progress(line)
        self._terminal.write_line(line)

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record a whole run, and fail it if it is over its budget where CI runs."""
        wall_s, cpu_s = time.monotonic() - self._began_s, self._meter.seconds()
        whole = len(self._rows) >= len(self._tests) > 0 and not self._config.getoption("--part")
        self._verdict = [f"{self._stage.name}: {clock(wall_s)}, {cpu_s:.0f} s of CPU"]
        if whole:
            self._stage.keep(wall_s, self._rows)
        if whole and self._meter.exact:
            self._check_budget(session, cpu_s)
        _write_progress("; ".join(self._verdict))

    def _check_budget(self, session: pytest.Session, cpu_s: float) -> None:
        terms = record.budget()
        # A busy neighbour stretches CPU seconds too. The fixed loop shows by how much.
        slowness = max(1.0, statistics.median(self._loops_s) / terms["loop_s"])
        limit_s = self._stage.cpu_s * terms["margin"] * slowness
        self._verdict[0] += f" of {limit_s:.0f}, this machine is {slowness:.2f} times slower than the budget's"
        if cpu_s <= limit_s:
            return
        dearest = sorted(self._rows, key=lambda row: -row["cpu_s"])[:_DEAREST]
        self._verdict += [
            f"{self._stage.name} is over its budget of {limit_s:.0f} s of CPU: make it cheaper, or raise cpu_s in "
            "tests/stages/stages.toml in this change, with a reason. Its dearest tests:",
            *(f"  {row['cpu_s']:6.1f} s  {row['test']}" for row in dearest),
        ]
        if session.exitstatus == pytest.ExitCode.OK and "CI" in os.environ:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self) -> None:
        for line in self._verdict:
            self._terminal.write_line(line)


def _write_progress(line: str) -> None:
    record.FOLDER.mkdir(exist_ok=True)
    temporary = Path(f"{record.PROGRESS}.new")
    temporary.write_text(time.strftime("%H:%M:%S ") + line + "\n")
    temporary.replace(record.PROGRESS)
