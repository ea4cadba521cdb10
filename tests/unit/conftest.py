from pathlib import Path

import pytest
from hypothesis import settings

from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore

pytest.register_assert_rewrite("tests.support.stores")

# How long an example takes depends on how busy the machine is. `make test-slow` tries many more of them.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("quick")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """The directory of a run in which nothing lies yet."""
    return RunDirectory(LocalStore(tmp_path))
