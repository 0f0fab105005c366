"""Settings for the tests of models."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _two_layers(two_layers):
    """Run with two layers, so that a mix-up of layers is seen. Other tests compile faster with one."""
