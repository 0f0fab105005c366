"""Settings for the tests of stages."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _rows_do_not_shrink(rows_do_not_shrink):
    """All tests of this folder decode with few programs."""
