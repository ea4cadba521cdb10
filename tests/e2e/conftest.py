from collections.abc import Iterator

import pytest

from tests.e2e.lab.hosts import Lab, missing


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Hosts `laptop` and `stranger`, neither of which has the cluster's storage."""
    if why := missing():
        pytest.skip(why)
    with Lab() as lab:
        lab.add("laptop", 2, storage=False)
        lab.add("stranger", 4, storage=False)
        yield lab
