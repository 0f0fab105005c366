"""Fixtures of the tests of sampling."""

from __future__ import annotations

import pytest

from jaxalign.rollout import layouts


@pytest.fixture(autouse=True)
def _small_and_large_prefills(monkeypatch):
    """Sample as on accelerators, with small and large prefills."""
    monkeypatch.setattr(layouts, "SMALL_ONLY", ())
