"""Number formats: no digits of rounding errors."""

from __future__ import annotations

import pytest

from jaxalign.tracking import formatting


@pytest.mark.parametrize(("value", "shown"), [
    (2.623e-06, "<0.001"), (-2.6e-08, ">-0.001"), (0.0, "0"), (0.04121, "0.04121"), (1234, "1,234"), (None, "-")])
def test_small_numbers_are_shown_without_digits(value, shown):
    assert formatting.number(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(2.623e-06, "0.00"), (-1e-8, "0.00"), (2.946, "2.95"), (None, "-")])
def test_decimals_are_fixed_and_a_zero_has_no_sign(value, shown):
    assert formatting.decimal(value, 2) == shown


@pytest.mark.parametrize(("rate", "shown"), [
    (0.0, "0.0%"), (0.0003, "<0.1%"), (0.785, "78.5%"), (0.9997, ">99.9%"), (1.0, "100.0%")])
def test_only_exact_shares_are_0_or_100_percent(rate, shown):
    assert formatting.percent(rate) == shown


@pytest.mark.parametrize(("values", "shown"), [
    ([2.623e-06, 0.2931], ["0.000", "0.293"]), ([0.0, 2.95], ["0.00", "2.95"]), ([4.0, 4.0], ["4", "4"]),
    ([21.02, 112.7], ["21", "113"]), ([3e-6, 6.44e-6], ["3e-06", "6.44e-06"]), ([-0.5, 0.25], ["-0.500", "0.250"])])
def test_the_numbers_of_a_curve_have_the_same_decimals(values, shown):
    assert formatting.span(values) == shown
