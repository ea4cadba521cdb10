from __future__ import annotations

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.stores")

# How long an example takes depends on how busy the machine is.
settings.register_profile("steadfast", deadline=None)
settings.load_profile("steadfast")
