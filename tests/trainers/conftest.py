"""Settings for the tests of trainers."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _few_sampling_programs(few_sampling_programs):
    """All tests of this folder decode with few programs."""
