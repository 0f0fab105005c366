"""Limits on the rates of requests and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxalign.config.sections.endpoint import EndpointConfig

_CHARACTERS_PER_TOKEN = 4


class RateLimits:
    """Delays requests so that config.endpoint.requests_per_minute and tokens_per_minute hold; 0: no limit. Used on one event
    loop.

    At most one second's worth of units passes at once: a burst of a minute's worth would double the rate of the first minute.
    """

    def __init__(self, settings: EndpointConfig):
        import aiolimiter

        self._limiters: dict[str, aiolimiter.AsyncLimiter] = {}
        for unit, per_minute in (("requests", settings.requests_per_minute), ("tokens", settings.tokens_per_minute)):
            if per_minute > 0:
                capacity = max(1.0, per_minute / 60)
                self._limiters[unit] = aiolimiter.AsyncLimiter(capacity, 60 * capacity / per_minute)

    async def acquire(self, body: Mapping[str, Any]) -> None:
        """Waits until a request with this body may be sent.

        The tokens of a request are estimated: its prompt at four characters per token, and the maximum number of generated
        tokens.
        """
        for unit, limiter in self._limiters.items():
            units = 1.0
            if unit == "tokens":
                prompt = body.get("messages") or body.get("prompt") or ""
                requested = body.get("max_completion_tokens") or body.get("max_tokens") or 0
                units = len(json.dumps(prompt, ensure_ascii=False)) // _CHARACTERS_PER_TOKEN + int(requested)
            while units > 0:  # A request may need more units than the limiter holds.
                part = min(units, limiter.max_rate)
                await limiter.acquire(part)
                units -= part
