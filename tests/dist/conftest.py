import pytest
import torch

pytest.register_assert_rewrite("tests.support.claims", "tests.support.stores")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The processes of a drill share the machine with each other and with this one."""
    torch.set_num_threads(1)
