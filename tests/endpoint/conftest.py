"""Skip these tests if the extra "endpoint" is not installed."""

from __future__ import annotations

import pytest

for _library in ("aiohttp", "aiolimiter", "openai", "stamina"):
    pytest.importorskip(_library)
