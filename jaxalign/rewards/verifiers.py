"""Verifiable answers: scores of responses by rules, from the number, the text or the pattern that a row asks for.

Each has the signature of a reward callable (`jaxalign.rewards.callables`).
"""

from __future__ import annotations

import decimal
import math
import numbers
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jaxalign.errors import UserError

# A number as it may stand in a text: a sign and a currency sign that touch it, digits and what may part them, a power of ten.
_RUN = re.compile(
    r"(?P<sign>[-+]?)[$€£¥]?(?P<inner_sign>[-+]?)(?P<body>(?:(?<!\.)\.)?[0-9][0-9.,/]*)(?P<power>[eE][-+]?[0-9]+\b)?"
)
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_LATEX_FRACTION = re.compile(r"([0-9]?)\\[dt]?frac\{\s*([^{}]*?)\s*\}\{\s*([^{}]*?)\s*\}")
_LONGEST = 64  # characters of a number; a run of digits beyond is no answer, and Python is slow to convert it
_LARGEST_POWER = 300


def last_number(text: str) -> Fraction | None:
    """The last number that `text` writes, exactly; None where there is none or it cannot be read.

    What is read: signs that touch the number (-3, $-3, -$3; U+2212 is a minus), commas between groups of three (1,234;
    LaTeX's 1{,}234), decimals (.5, 3.0), powers of ten (1e5) and simple fractions (3/4, \\frac{3}{4}). Units are not: $20,
    20% and 20 kg are 20. Commas, full stops and slashes behind a number belong to the text.

    A hyphen behind a letter, a digit or a closing bracket is no sign (the 3 of 5-3), and digits that continue a word are no
    number (the 2 of CO2). Nothing is calculated: of "2 * 3" and "2 / 3" the last number is 3. Spaces do not group digits.

    Where the last number is refused, the answer is None and not the number before: groups that are not of three (12,5; 1,2,3),
    several points (3.1.4), dates (1/2/2020), halves of other fractions (x/2; 1/0), mixed numbers (1 1/2), exponents (the 2 of
    x^2), and numbers of more than 64 characters or powers beyond 10^300.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\,", "")
    # A digit right before it makes it a mixed number, which the space lets `_parse` see.
    text = _LATEX_FRACTION.sub(lambda found: (found[1] and f"{found[1]} ") + f"{found[2]}/{found[3]}", text)
    last = None
    for match in _RUN.finditer(text):
        start = match.start("body")
        if not (text[start - 1 : start].isalpha() or text[start - 1 : start] == "_"):
            last = match
    return None if last is None else _parse(text, last)


def number_match(
    prompts: Sequence[Any], responses: Sequence[str], *, answer: Any = None, tolerance: float = 0.0, **columns: Any
) -> list[float]:
    """1 where the last number of the response is that of the answer, else 0.

    Args:
      prompts: B prompts; not read.
      responses: B texts.
      answer: B answers: numbers, or texts whose last number counts (so that a worked solution may stand before it).
      tolerance: the largest accepted difference, not negative; 0 compares exactly, as fractions (.1 and 1/10 are equal).
      columns: not read.

    Returns:
      B floats, 0 or 1; NaN where the answer has no number, for then nothing can be verified.

    Raises:
      UserError: there is no answer column or it has another length, or a negative tolerance.
    """
    if not 0 <= tolerance < math.inf:
        raise UserError(f"the tolerance of number_match is {tolerance}; a number that is not negative is expected")
    allowed = _as_number(tolerance)
    scores = []
    for response, expected in zip(responses, _column("number_match", "answer", answer, responses), strict=True):
        truth, found = _as_number(expected), last_number(response)
        if truth is None:
            scores.append(math.nan)
        else:
            scores.append(float(found is not None and abs(found - truth) <= allowed))
    return scores


def exact_match(
    prompts: Sequence[Any], responses: Sequence[str], *, answer: Any = None, ignore_case: bool = False, **columns: Any
) -> list[float]:
    """1 where the response is the answer, up to white space around it, else 0.

    Args:
      prompts: B prompts; not read.
      responses: B texts.
      answer: B texts.
      ignore_case: whether upper and lower case are alike.
      columns: not read.

    Returns:
      B floats, 0 or 1.

    Raises:
      UserError: there is no answer column or it has another length.
    """

    def plain(text: Any) -> str:
        stripped = str(text).strip()
        return stripped.casefold() if ignore_case else stripped

    answers = _column("exact_match", "answer", answer, responses)
    return [float(plain(response) == plain(expected)) for response, expected in zip(responses, answers, strict=True)]


def regex_match(prompts: Sequence[Any], responses: Sequence[str], *, pattern: Any = None, **columns: Any) -> list[float]:
    r"""1 where the pattern is found anywhere in the response, else 0; `\A...\Z` asks for the whole of it.

    Python cannot be interrupted while it matches: a pattern that backtracks without end stops the run, whatever timeout
    `call_reward` has.

    Args:
      prompts: B prompts; not read.
      responses: B texts.
      pattern: one pattern for all, or B of them; flags stand inside, as in (?i).
      columns: not read.

    Returns:
      B floats, 0 or 1.

    Raises:
      UserError: there is no pattern, a column of another length, or a pattern that is no regular expression.
    """
    if isinstance(pattern, str):
        pattern = [pattern] * len(responses)
    scores = []
    for response, expression in zip(responses, _column("regex_match", "pattern", pattern, responses), strict=True):
        try:
            scores.append(float(re.search(expression, response) is not None))
        except re.error as error:
            raise UserError(f"the pattern {expression!r} of regex_match is no regular expression: {error}") from error
    return scores


VERIFIERS = {"number_match": number_match, "exact_match": exact_match, "regex_match": regex_match}
"""What config.reward.verifier may name."""


def _parse(text: str, match: re.Match[str]) -> Fraction | None:
    before = text[: match.start()]
    body, power = match["body"].rstrip(".,/"), match["power"]
    if power and body != match["body"]:
        power = None  # something stands between them: the power is a word of its own
    parts = body.split("/")
    mixed = len(parts) == 2 and re.search(r"[0-9] +\Z", before)
    if len(body) > _LONGEST or len(parts) > 2 or mixed or re.search(r"(?:/|\^\{?)\Z", before):
        return None
    if not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    value, *divisor = (Fraction(part.replace(",", "")) for part in parts)
    if divisor and divisor[0] == 0:
        return None
    # Its length first: a power of a million digits would take for ever.
    if power and (len(power) > _LONGEST or abs(int(power[1:])) > _LARGEST_POWER):
        return None
    # A hyphen that touches what stands before it joins or subtracts.
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
        # By way of its shortest decimal: the float .1 is meant as 1/10.
        return Fraction(str(answer))
    return None


def _column(verifier: str, name: str, column: Any, responses: Sequence[str]) -> Sequence[Any]:
    if column is None:
        raise UserError(f"{verifier} needs the column {name!r}, one entry a row; give it in the data set")
    if isinstance(column, str) or len(column) != len(responses):
        size = "a text" if isinstance(column, str) else f"{len(column)} entries"
        raise UserError(f"the column {name!r} of {verifier} is {size}; a list of {len(responses)} entries is expected")
    return column
