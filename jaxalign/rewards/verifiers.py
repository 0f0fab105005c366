"""Verifiers: score responses by rules, against the number, the text or the pattern in a row's column.

Each verifier has the signature of a reward callable (`jaxalign.rewards.callables`).
"""

from __future__ import annotations

import decimal
import math
import numbers
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import regex

from jaxalign.errors import UserError

# A number in a text: adjacent sign and currency symbol, digits with separators, and a power of ten.
_RUN = re.compile(
    r"(?P<sign>[-+]?)[$€£¥]?(?P<inner_sign>[-+]?)(?P<body>(?:(?<!\.)\.)?[0-9][0-9.,/]*)(?P<power>[eE][-+]?[0-9]+\b)?"
)
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_LATEX_FRACTION = re.compile(r"([0-9]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")  # Its time is linear in the text.
_LONGEST = 64  # The maximum length of a number: a longer run of digits is not an answer, and Python converts it slowly.
_LARGEST_POWER = 300
_MATCH_SECONDS = 1.0


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in `text`; None if there is no number or the last one cannot be read.

    Recognised are signs that touch the number (-3, $-3, -$3; U+2212 is a minus), commas between groups of three (1,234;
    LaTeX's 1{,}234), decimals (.5, 3.0), powers of ten (1e5) and simple fractions (3/4, \\frac{3}{4}). Units are ignored: $20,
    20% and 20 kg are 20. Commas, full stops and slashes after a number belong to the text.

    A hyphen after a letter, a digit or a closing bracket is not a sign (the 3 of 5-3), and digits that continue a word are not
    a number (the 2 of CO2). Nothing is calculated: the last number of "2 * 3" and of "2 / 3" is 3. Spaces do not group digits.

    If the last number is rejected, the result is None instead of the number before it. Rejected are groups that are not of
    three (12,5; 1,2,3), several points (3.1.4), dates (1/2/2020), incomplete or invalid fractions (x/2; 1/0), mixed numbers
    (1 1/2), exponents (the 2 of x^2), numbers of more than 64 characters, and powers beyond 10^300.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\,", "")
    # A digit right before the fraction makes a mixed number, which `_parse` recognises by the space.
    text = _LATEX_FRACTION.sub(lambda match: (match[1] and f"{match[1]} ") + f"{match[2].strip()}/{match[3].strip()}", text)
    last = None
    for match in _RUN.finditer(text):
        start = match.start("body")
        if not (text[start - 1 : start].isalpha() or text[start - 1 : start] == "_"):
            last = match
    return None if last is None else _parse(text, last)


def number_match(
    prompts: Sequence[Any], responses: Sequence[str], *, answer: Any = None, tolerance: float = 0.0, **columns: Any
) -> list[float]:
    """1 if the last number of the response equals that of the answer, else 0.

    Args:
      prompts: B prompts; not read.
      responses: B texts.
      answer: B answers: numbers, or texts whose last number counts (so that a worked solution may precede it).
      tolerance: the largest accepted difference, not negative; 0 compares exactly, as fractions (.1 and 1/10 are equal).
      columns: not read.

    Returns:
      B floats, 0 or 1; NaN if the answer has no number, since then nothing can be verified.

    Raises:
      UserError: there is no answer column, it has the wrong length, or the tolerance is negative.
    """
    if not 0 <= tolerance < math.inf:
        raise UserError(f"the tolerance of number_match is {tolerance}; a non-negative number is expected")
    allowed = _as_number(tolerance)
    scores = []
    for response, expected in zip(responses, _column("number_match", "answer", answer, responses), strict=True):
        truth, number = _as_number(expected), last_number(response)
        if truth is None:
            scores.append(math.nan)
        else:
            scores.append(float(number is not None and abs(number - truth) <= allowed))
    return scores


def exact_match(
    prompts: Sequence[Any], responses: Sequence[str], *, answer: Any = None, ignore_case: bool = False, **columns: Any
) -> list[float]:
    """1 if the response equals the answer, ignoring surrounding whitespace, else 0.

    Args:
      prompts: B prompts; not read.
      responses: B texts.
      answer: B texts.
      ignore_case: whether to ignore upper and lower case.
      columns: not read.

    Returns:
      B floats, 0 or 1.

    Raises:
      UserError: there is no answer column or it has the wrong length.
    """

    def plain(text: Any) -> str:
        stripped = str(text).strip()
        return stripped.casefold() if ignore_case else stripped

    answers = _column("exact_match", "answer", answer, responses)
    return [float(plain(response) == plain(expected)) for response, expected in zip(responses, answers, strict=True)]


def regex_match(prompts: Sequence[Any], responses: Sequence[str], *, pattern: Any = None, **columns: Any) -> list[float]:
    r"""1 if the pattern matches anywhere in the response, else 0; `\A...\Z` matches the whole response.

    The patterns are those of Python's `re`, matched by the library `regex`, which can interrupt a match.

    Args:
      prompts: B prompts; not read.
      responses: B texts.
      pattern: one pattern for all responses, or B patterns; flags are written inline, as in (?i).
      columns: not read.

    Returns:
      B floats, 0 or 1; NaN if a match takes longer than a second, as with catastrophic backtracking.

    Raises:
      UserError: there is no pattern, the column has the wrong length, or a pattern is not a valid regular expression.
    """
    if isinstance(pattern, str):
        pattern = [pattern] * len(responses)
    scores = []
    for response, expression in zip(responses, _column("regex_match", "pattern", pattern, responses), strict=True):
        try:
            scores.append(float(regex.search(expression, response, timeout=_MATCH_SECONDS) is not None))
        except TimeoutError:
            scores.append(math.nan)
        except (regex.error, RecursionError) as error:
            raise UserError(f"the pattern {expression!r} of regex_match is not a regular expression: {error}") from error
    return scores


VERIFIERS = {"number_match": number_match, "exact_match": exact_match, "regex_match": regex_match}
"""The verifiers that config.reward.verifier can name."""


def _parse(text: str, match: re.Match[str]) -> Fraction | None:
    before = text[: match.start()]
    body, power = match["body"].rstrip(".,/"), match["power"]
    if power and body != match["body"]:
        power = None  # Punctuation separates them, so the power is a separate word.
    parts = body.split("/")
    mixed = len(parts) == 2 and re.search(r"[0-9] +\Z", before)
    if len(body) > _LONGEST or len(parts) > 2 or mixed or re.search(r"(?:/|\^\{?)\Z", before):
        return None
    if not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    value, *divisor = (Fraction(part.replace(",", "")) for part in parts)
    if divisor and divisor[0] == 0:
        return None
    # Check the length first: converting a power of a million digits is very slow.
    if power and (len(power) > _LONGEST or abs(int(power[1:])) > _LARGEST_POWER):
        return None
    # A hyphen directly after a word or number joins or subtracts.
    touches = before[-1:].isalnum() or before[-1:] in tuple(")]}%")
    negative = match["inner_sign"] == "-" or (match["sign"] == "-" and not touches)
    value = value / divisor[0] if divisor else value
    return (-value if negative else value) * Fraction(10) ** (int(power[1:]) if power else 0)


def _as_number(answer: Any) -> Fraction | None:
    if isinstance(answer, str):
        return last_number(answer)
    if isinstance(answer, numbers.Rational):
        return None if isinstance(answer, bool) else Fraction(answer)
    if isinstance(answer, (numbers.Real, decimal.Decimal)) and math.isfinite(answer):
        # Convert the shortest decimal form: the float .1 means 1/10.
        return Fraction(str(answer))
    return None


def _column(verifier: str, name: str, column: Any, responses: Sequence[str]) -> Sequence[Any]:
    """The column that a verifier reads. Raises UserError unless it has one entry per response."""
    if column is None:
        raise UserError(f"{verifier} needs the column {name!r}, with one entry per row; add it to the data set")
    if isinstance(column, str) or len(column) != len(responses):
        size = "a string" if isinstance(column, str) else f"{len(column)} entries"
        raise UserError(f"the column {name!r} of {verifier} is {size}; a list of {len(responses)} entries is expected")
    return column
