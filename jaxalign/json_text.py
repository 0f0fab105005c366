"""Parses JSON from outside the program."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str | bytes | bytearray) -> Any:
    """Returns the value of a JSON text.

    Raises:
      json.JSONDecodeError: the text is not JSON, or is nested too deeply for Python's parser, which raises a RecursionError, or
        a whole number is beyond the largest float, about 1.8e308.
      UnicodeDecodeError: the bytes are not UTF-8, UTF-16 or UTF-32.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text))
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def _whole(digits: str) -> int:
    """An integer that every reader can convert to a float."""
    if len(digits) > _SAFE_DIGITS and abs(float(digits)) == math.inf:
        raise json.JSONDecodeError(f"a whole number of {len(digits)} digits", "", 0)
    return int(digits)


_SAFE_DIGITS = 308
_DECODER = json.JSONDecoder(parse_int=_whole)
