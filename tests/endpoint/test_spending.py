"""Prices and amounts."""

from __future__ import annotations

import json

import pytest

from jaxalign.endpoint.records import Reply, Usage
from jaxalign.errors import UserError
from tests.endpoint.clients import spending


def prices_file(tmp_path, content) -> str:
    path = tmp_path / "prices.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_prices_are_per_million_tokens(tmp_path):
    price = spending(tmp_path, input_price=0.15, output_price=0.6).prices.of("any")
    assert price.of(Usage(2_000_000, 500_000)) == pytest.approx(0.6)


def test_a_file_gives_prices_by_model_and_their_date(tmp_path):
    path = prices_file(tmp_path, {"date": "2026-03-01", "models": {"a": {"input": 1, "output": 2}}})
    counts = spending(tmp_path, prices=path)
    assert counts.prices.of("a").of(Usage(1_000_000, 1_000_000)) == 3.0
    assert counts.as_dict()["prices_date"] == "2026-03-01"
    with pytest.raises(UserError, match='no price of model "b"'):
        counts.prices.of("b")


@pytest.mark.parametrize("content", [
    "[", "[]", {"models": {}}, {"date": "spring", "models": {}}, {"date": "2026-03-01", "models": {"a": {"input": 1}}},
    {"date": "2026-03-01", "models": {"a": {"input": -1, "output": 1}}},
], ids=str)
def test_a_malformed_file_of_prices_is_an_error(tmp_path, content):
    with pytest.raises(UserError, match="config.endpoint.prices="):
        spending(tmp_path, prices=prices_file(tmp_path, content))


def test_a_budget_needs_prices(tmp_path):
    with pytest.raises(UserError, match="no prices are set"):
        spending(tmp_path, budget=1.0)


def test_the_counts_add_up(tmp_path):
    counts = spending(tmp_path, input_price=1.0)
    for finish in ("stop", "content_filter"):
        counts.count("sent")
        counts.count_reply(Reply("x", finish, usage=Usage(7, 3)), 0.5)
    counts.count("failures.timeout")
    assert counts.as_dict() == {
        "sent": 2, "stored_hits": 0, "prompt_tokens": 14, "completion_tokens": 6, "retries": 0, "content_filter": 1,
        "failures": {"timeout": 1}, "money": 1.0, "money_of_store": 0.0, "prices_date": "",
    }
