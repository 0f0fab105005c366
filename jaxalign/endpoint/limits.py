"""Limits on the rates of requests and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxalign.config.sections.endpoint import Endpoint

_CHARACTERS_PER_TOKEN = 4


class RateLimits:
    """Delays requests so that config.endpoint.requests_per_minute and tokens_per_minute hold. Used on one event loop."""

    def __init__(self, settings: Endpoint):
        self._requests = _Limit(settings.requests_per_minute)
        self._tokens = _Limit(settings.tokens_per_minute)

    async def acquire(self, body: Mapping[str, Any]) -> None:
        """Waits until a request with this body may be sent."""
        await self._requests.acquire(1)
        if self._tokens.is_set:
            await self._tokens.acquire(estimate_tokens(body))


class _Limit:
    """At most `per_minute` units per minute; 0: no limit. At most one second's worth of units passes at once: a burst of a
    minute's worth would double the rate of the first minute."""

    def __init__(self, per_minute: int):
        import aiolimiter

        self.is_set = per_minute > 0
        if self.is_set:
            self._capacity = max(1.0, per_minute / 60)
            self._limiter = aiolimiter.AsyncLimiter(self._capacity, 60 * self._capacity / per_minute)

    async def acquire(self, units: float) -> None:
        if not self.is_set:
            return
        # A request may need more units than the limiter holds.
        while units > 0:
            part = min(units, self._capacity)
            await self._limiter.acquire(part)
            units -= part


def estimate_tokens(body: Mapping[str, Any]) -> int:
    """The tokens of a request: its prompt at four characters per token, and the maximum number of generated tokens."""
    prompt = body.get("messages") or body.get("prompt") or ""
    requested = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return len(json.dumps(prompt, ensure_ascii=False)) // _CHARACTERS_PER_TOKEN + int(requested)
