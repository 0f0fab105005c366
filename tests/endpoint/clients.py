"""Requests and clients of the tests, with waiting times of milliseconds."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxalign.config.sections.endpoint import EndpointConfig
from jaxalign.endpoint.client import Client
from jaxalign.endpoint.pool import Pacing
from jaxalign.endpoint.records import CHAT, EndpointRequest, Usage
from jaxalign.endpoint.spending import Spending
from jaxalign.endpoint.store import AnswerStore

FAST = Pacing(retry=0.004, longest_retry=0.02, aside=0.05, longest_aside=0.2, probe=0.05, longest_probe=0.2)
KEY = "sk-test-0123456789abcdef/+x"
VARIABLE = "JAXALIGN_TEST_KEY"


def requests(count: int, model: str = "judge") -> list[EndpointRequest]:
    bodies = ({"model": model, "messages": [{"role": "user", "content": f"row {i}"}]} for i in range(count))
    return [EndpointRequest(CHAT, body) for body in bodies]


def settings(*urls: str, **fields: Any) -> EndpointConfig:
    given = {"url": urls, "model": "judge", "key_variable": VARIABLE, "timeout": 5.0, "max_down": 20.0}
    return EndpointConfig(**given | fields)


class Running(Client):
    """A client that closes its store and collects the lines that it prints."""

    def __init__(self, folder: pathlib.Path, *urls: str, pacing: Pacing = FAST, **fields: Any):
        self.lines: list[str] = []
        self.store = AnswerStore(folder / "endpoint.sqlite")
        super().__init__(settings(*urls, **fields), self.store, pacing=pacing, say=self.lines.append)

    def close(self) -> None:
        super().close()
        self.store.close()


def spending(tmp_path, **fields) -> Spending:
    return Spending(settings("http://localhost/v1", **fields), AnswerStore(tmp_path / "a.sqlite"))


def put(store: AnswerStore, row: int, reply: str = "{}", cost: float = 0.0) -> str:
    """Store a reply to the request of that row."""
    request = requests(row + 1)[row]
    return store.put(request.key, request, reply, "judge", Usage(1, 2), cost)
