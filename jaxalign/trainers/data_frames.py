"""Reads the rows of pandas data frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def without_frame(data: Any) -> Any:
    """The rows of a pandas data frame; other data unchanged. The function does not import pandas.

    Arrays of objects, such as the messages that pandas reads from a Parquet file, become lists. Missing cells of columns of
    objects and texts are left out.
    """
    if not (hasattr(data, "columns") and hasattr(data, "iloc") and hasattr(data, "to_dict")):
        return data
    may_miss = {name for name in data.columns if str(data[name].dtype) in ("object", "str", "string")}
    return [
        {name: _without_arrays(value) for name, value in row.items()
         if not (name in may_miss and isinstance(value, float) and math.isnan(value))}
        for row in data.to_dict("records")
    ]


def _without_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_arrays(inner) for name, inner in value.items()}
    if isinstance(value, list) or str(getattr(value, "dtype", "")) == "object":
        return [_without_arrays(inner) for inner in value]
    return value
