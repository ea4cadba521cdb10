import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support.stores")

# How long an example takes depends on how busy the machine is. `make test-slow` tries many more of them.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("quick")
