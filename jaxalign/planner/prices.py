"""Reads the prices of device hours from the user's file, which states their date. The package contains no prices."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.planner.hardware import chips


@dataclasses.dataclass(frozen=True)
class DevicePrices:
    """Prices on `date` (ISO): `hourly` maps a chip to the price of one device hour in `currency`; `source` says where the
    prices are from."""

    date: str
    currency: str
    hourly: dict[str, float]
    source: str


def read_prices(path: str) -> DevicePrices:
    """Reads a JSON object with "date" (as 2026-01-31), "currency", "per_device_hour" (chip to price), optionally "source".

    Raises:
        UserError: the file cannot be read, a field is missing or has the wrong type, or a chip is unknown.
    """
    try:
        fields = parse_json(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--prices={path} cannot be read ({error.strerror or error}); give a JSON file such as "
                        "configs/prices_example.json") from None
    except ValueError as error:
        raise UserError(f"--prices={path} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"--prices={path} contains a {type(fields).__name__}; expected an object with date, currency and "
                        "per_device_hour")
    for name, kind in (("date", str), ("currency", str), ("per_device_hour", dict)):
        if not isinstance(fields.get(name), kind):
            raise UserError(f"--prices={path}: {name} is {fields.get(name)!r}; expected {_EXPECTED[name]}")
    try:
        datetime.date.fromisoformat(fields["date"])
    except ValueError:
        raise UserError(f"--prices={path}: date is {fields['date']!r}; expected {_EXPECTED['date']}") from None
    for chip, price in fields["per_device_hour"].items():
        if chip not in chips():
            raise UserError(f"--prices={path} has a price for {chip!r}; known chips: {', '.join(chips())}")
        if type(price) not in (int, float) or not 0 <= price < float("inf"):
            raise UserError(f"--prices={path}: the price of {chip} is {price!r}; expected a number of at least 0")
    return DevicePrices(fields["date"], fields["currency"], fields["per_device_hour"], str(fields.get("source", "")))


_EXPECTED = {
    "date": "the date of the prices, such as 2026-01-31", "currency": "the currency's name, such as USD",
    "per_device_hour": 'an object such as {"v5e": 1.0}',
}
