"""Parses JSON from outside the program."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
      json.JSONDecodeError: the text is not JSON, or is nested too deeply for Python's parser, which raises a RecursionError.
      ValueError: a whole number has more digits than Python converts.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
