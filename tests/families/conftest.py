"""Shows in full what an assertion of `live_bytes` compares."""

import pytest

pytest.register_assert_rewrite("live_bytes")
