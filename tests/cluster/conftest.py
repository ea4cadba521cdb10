import pytest

from tests.command import Command


@pytest.fixture
def command(tmp_path):
    """Commands that share a storage; give each run a name of its own."""
    return lambda name="run", **options: Command(tmp_path, name, **options)
