"""JSON from outside that is nested too deeply is reported like other damage, by everything that reads JSON."""

from __future__ import annotations

import json

import pytest

from jaxalign.data.sources.jsonl import read_jsonl
from jaxalign.errors import UserError
from jaxalign.feedback.constitution import load_constitution
from jaxalign.json_text import parse_json
from jaxalign.models.checkpoints.huggingface import read_config
from jaxalign.models.checkpoints.safetensors import open_weights
from jaxalign.planner.prices import read_prices
from jaxalign.tracking.jsonl import read_rows

DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, DEEP.encode(), '{"a":' * 100_000])
def test_deep_nesting_is_a_decode_error(text):
    with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
        parse_json(text)


def _open(folder):
    with open_weights(folder):
        pass


@pytest.mark.parametrize(("name", "read"), [
    ("config.json", lambda path: read_config(path.parent)),
    ("model.safetensors.index.json", lambda path: _open(path.parent)),
    ("constitution.json", load_constitution),
    ("rows.jsonl", read_jsonl),
    ("metrics.jsonl", read_rows),
    ("prices.json", lambda path: read_prices(str(path))),
])
def test_a_file_with_deep_json_is_a_user_error_of_one_short_sentence(tmp_path, name, read):
    path = tmp_path / name
    path.write_text(DEEP + "\n")
    with pytest.raises(UserError) as raised:
        read(path)
    assert "nested too deeply" in str(raised.value) and len(str(raised.value)) < 400 and "\n" not in str(raised.value)


@pytest.mark.parametrize("digits", ["9" * 100_000, "1" + "0" * 400, "-" + "9" * 5000])
def test_a_whole_number_beyond_floats_is_a_decode_error(digits):
    with pytest.raises(json.JSONDecodeError, match="a whole number of"):
        parse_json(f'{{"a": [{digits}]}}')
    assert parse_json("[1, -2, 18446744073709551616]") == [1, -2, 2**64]
    assert parse_json("1" + "0" * 308) == 10**308


def test_bytes_with_half_of_a_surrogate_pair_are_not_text():
    with pytest.raises(ValueError):
        parse_json(b'"\xed\xa0\x80"')
