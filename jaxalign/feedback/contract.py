"""The form of a judge's answers, which a template set states in form.json, and the removal of everything else.

Fields of form.json besides layout and exemplars; all but the first are optional:

- options: the two strings of a verdict, for the first and the second answer shown;
- tie: the string of the verdict that neither answer is better; without it, a judge must choose one;
- ratings: the ten strings of a rating, from worst to best;
- leading_space, lower_case: whether an option also counts with a leading space, or in lower case;
- ended: whether the end token follows an option;
- verdict, rating_verdict: the text after which a judge that reasons writes its option;
- thinking: the delimiters of a reasoning model's thoughts;
- stops: strings that end an answer;
- preambles: regular expressions of introductions, such as "Here is the revised answer:", which are removed;
- refusals: regular expressions, by "critique", "revision" and "verdict", of the beginning of a text that declines the request.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxalign.data.chat.styles import split_thoughts
from jaxalign.errors import UserError

OPTIONS, RATINGS = ("A", "B"), tuple(str(rating) for rating in range(1, 11))
_CURLY = "\u2019"  # An apostrophe; patterns have straight ones.
_REFUSALS = ("critique", "revision", "verdict")


class Cleaned(NamedTuple):
    """A judge's text in the form of its contract.

    text: what remains. complete: whether it ended. reasoning: the thoughts of a reasoning model, if any. notes: names in
    `reasons.NOTES`.
    """

    text: str
    complete: bool
    reasoning: str | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Contract:
    """The form of answers; see the module. Patterns are compiled and match at the beginning of a text, in any case."""

    options: tuple[str, str] = OPTIONS
    tie: str = ""
    ratings: tuple[str, ...] = RATINGS
    leading_space: bool = False
    lower_case: bool = False
    ended: bool = False
    verdict: str = ""
    rating_verdict: str = ""
    thinking: tuple[str, str] | None = None
    stops: tuple[str, ...] = ()
    preambles: tuple[re.Pattern[str], ...] = ()
    refusals: Mapping[str, tuple[re.Pattern[str], ...]] = dataclasses.field(default_factory=dict)

    def clean(self, text: str, ended: bool) -> Cleaned:
        """Removes thoughts, the next turn and introductions. ended: whether the text ended before the length limit.

        A text without thoughts, stops and preambles stays as it is.
        """
        reasoning, rest, ended = split_thoughts(text, self.thinking, ended) if self.thinking else (None, text, ended)
        notes: list[str] = []
        at = self._next_turn(rest)
        if at is not None:
            rest, ended = rest[:at], True
            notes.append("next_turn")
        while True:
            start = rest.lstrip()
            ends = [match.end() for pattern in self.preambles if (match := pattern.match(start.replace(_CURLY, "'")))]
            shorter = start[max(ends, default=0) :]
            if not shorter.strip() or len(shorter) == len(start):
                break  # The text has no introduction, or consists of nothing else.
            rest, notes = shorter, [*dict.fromkeys((*notes, "preamble"))]
        return Cleaned(rest.strip() if notes or reasoning is not None else rest, ended, reasoning, tuple(notes))

    def _next_turn(self, text: str) -> int | None:
        """The position of the next turn in a text; None if there is none."""
        positions = [at for stop in self.stops if (at := f"\n\n{text}".find(stop)) >= 0]
        return max(0, min(positions) - 2) if positions else None

    def declines(self, text: str, kind: str) -> bool:
        """Whether a text declines a request. kind: "critique", "revision" or "verdict"."""
        return any(pattern.match(text.lstrip().replace(_CURLY, "'")) for pattern in self.refusals.get(kind, ()))

    def before_verdict(self, text: str, kind: str) -> tuple[str, bool]:
        """(the reasoning before the verdict, whether it ended there or at the next turn). A verdict among the thoughts of a
        reasoning model does not count. kind: "comparison" or "rating"."""
        start = text.rfind(self.thinking[1]) + len(self.thinking[1]) if self.thinking and self.thinking[1] in text else 0
        turn = self._next_turn(text[start:])
        text = text if turn is None else text[: start + turn]
        marker = self.marker(kind)
        at = text.rfind(marker, start) if marker else -1
        return (text[:at].rstrip(), True) if at >= 0 else (text, turn is not None)

    def marker(self, kind: str) -> str:
        """The text after which a judge that reasons writes its option. kind: "comparison" or "rating"."""
        return self.verdict if kind == "comparison" else self.rating_verdict

    def spellings(self, option: str) -> tuple[str, ...]:
        """The strings that count as an option."""
        cases = (option, option.lower()) if self.lower_case else (option,)
        return tuple(dict.fromkeys(lead + case for case in cases for lead in (("", " ") if self.leading_space else ("",))))


def read_contract(form: Mapping[str, Any], where: str) -> Contract:
    """The contract in a set's form.json. where: the set, for error messages.

    Raises:
        UserError: a field is unknown or malformed.
    """
    known = {entry.name for entry in dataclasses.fields(Contract)}
    unknown = next((name for name in form if name not in known), None)
    if unknown is not None:
        raise UserError(f'form.json of {where} has the field "{unknown}"; it must be one of layout, exemplars, '
                        f"{', '.join(sorted(known))}")
    values: dict[str, Any] = dict(form)
    for name, count in (("options", 2), ("ratings", 10), ("thinking", 2), ("stops", None)):
        if name in form:
            values[name] = _strings(form[name], name, count, where)
    for name in ("verdict", "rating_verdict", "tie"):
        if not isinstance(form.get(name, ""), str):
            raise UserError(f'"{name}" in form.json of {where} is {form[name]!r}; a string is expected')
    for name in ("leading_space", "lower_case", "ended"):
        if not isinstance(form.get(name, False), bool):
            raise UserError(f'"{name}" in form.json of {where} is {form[name]!r}; true or false is expected')
    values["preambles"] = _patterns(form.get("preambles", []), "preambles", where)
    refusals = form.get("refusals", {})
    if not isinstance(refusals, Mapping) or not set(refusals) <= set(_REFUSALS):
        raise UserError(f'"refusals" in form.json of {where} is {str(refusals)[:60]}; an object with some of '
                        f"{', '.join(_REFUSALS)} is expected")
    values["refusals"] = {kind: _patterns(texts, f"refusals.{kind}", where) for kind, texts in refusals.items()}
    for name in ("options", "ratings"):
        texts = values.get(name, ())
        if len(set(texts)) < len(texts):
            raise UserError(f'"{name}" in form.json of {where} is {list(texts)}; distinct strings are expected')
    if values.get("tie") and values["tie"] in values.get("options", OPTIONS):
        raise UserError(f'"tie" in form.json of {where} is {values["tie"]!r}, which is also one of its options; another string '
                        "is expected")
    return Contract(**values)


def _strings(value: Any, name: str, count: int | None, where: str) -> tuple[str, ...]:
    """The texts of a list in form.json. Raises UserError if one is empty or their number is not `count`."""
    fits = isinstance(value, list) and all(isinstance(item, str) and item for item in value) and count in (None, len(value))
    if not fits:
        number = "" if count is None else f"{count} "
        raise UserError(f'"{name}" in form.json of {where} is {str(value)[:60]}; a list of {number}strings with text is '
                        "expected")
    return tuple(value)


def _patterns(value: Any, name: str, where: str) -> tuple[re.Pattern[str], ...]:
    texts = _strings(value, name, None, where)
    try:
        return tuple(re.compile(text, re.IGNORECASE) for text in texts)
    except re.error as error:
        raise UserError(f'"{name}" in form.json of {where} has a malformed regular expression ({error}); correct it') from None
