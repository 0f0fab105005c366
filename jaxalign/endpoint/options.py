"""The options of a verdict in a server's replies: from the log-probabilities of its tokens, or by votes of sampled texts.

Options are compared byte by byte: " B" and "\\tB" are different tokens, whose probabilities can differ by a factor of ten.
All spellings of an option are summed, as `feedback/options.py` does with all logits of a model. A server shows the most likely
tokens only, and only along the text that it wrote, so a reading states how far its result may be off.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxalign.endpoint.records import Token
from jaxalign.errors import UserError

Spellings = tuple[tuple[bytes, ...], ...]
# Not the end of an option: the rest of a word or number ("Apple", "3.5"), or, after letters, a next word ("A better answer").
_GOES_ON, _NEXT_WORD = re.compile(r"[\w'\u2019-]|[.,]\d"), re.compile(r"[ \t]+\w")


@dataclasses.dataclass(frozen=True)
class Reading:
    """The probabilities of O options, read from log-probabilities.

    Attributes:
      logprobs: the log-probability of each option in nats, summed over the spellings that are shown; -inf for an option of
        which none is shown.
      outside: float in [0, 1], one minus the sum of the options: an upper bound of the probability of no option, unless
        beginnings of an option (`undecided`) continue otherwise.
      bound: float in [0, 1], the largest error of the first option's share of all options that tokens which are not shown can
        cause.
      missing: the indices of the options of which no spelling is shown.
      undecided: float in [0, 1], the probability of shown tokens that begin an option and whose continuation is not shown.
    """

    logprobs: tuple[float, ...]
    outside: float
    bound: float
    missing: tuple[int, ...] = ()
    undecided: float = 0.0


class VerdictPlace(NamedTuple):
    """The place of a verdict in a reply: the index of its first token, and the bytes of this token that precede the verdict."""

    index: int
    head: bytes


@dataclasses.dataclass(frozen=True)
class Votes:
    """Sampled verdicts. counts: the number of texts of each of O options. unreadable: the number of texts of none."""

    counts: tuple[int, ...]
    unreadable: int

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The share of each option among the readable texts, without smoothing: 0 and 1 occur. None if no text is readable."""
        total = sum(self.counts)
        return tuple(count / total for count in self.counts) if total else None

    @property
    def outside(self) -> float:
        """The share of unreadable texts, in [0, 1]; 1 without texts."""
        total = sum(self.counts) + self.unreadable
        return self.unreadable / total if total else 1.0


def spell(names: Sequence[str], spellings: Callable[[str], Sequence[str]]) -> Spellings:
    """The bytes of all spellings of each option, in UTF-8.

    Args:
      names: the O options as text.
      spellings: the strings that count as an option, such as `Contract.spellings`.

    Raises:
      UserError: two options have a spelling in common, or a spelling is empty.
    """
    owner: dict[bytes, str] = {}
    for name in names:
        for text in spellings(name):
            if not text:
                raise UserError(f"the option {name!r} has an empty spelling; write the options of form.json with text")
            if owner.setdefault(text.encode(), name) != name:
                raise UserError(f"the options {owner[text.encode()]!r} and {name!r} have the spelling {text!r} in common, so a "
                                "verdict cannot be read; write the options of form.json differently")
    return tuple(tuple(dict.fromkeys(text.encode() for text in spellings(name))) for name in names)


def find_verdict(tokens: Sequence[Token], verdict: str = "", thoughts_end: str = "") -> VerdictPlace | None:
    """The place right after the last `verdict` in the bytes of the tokens.

    Args:
      tokens: the tokens of a reply.
      verdict: the text that precedes a verdict. Without it, the verdict begins the reply, or follows the thoughts and the
        white space after them.
      thoughts_end: the delimiter after a reasoning model's thoughts. A verdict among the thoughts does not count.

    Returns:
      The place; its index is len(tokens) if the reply ends there. None if the verdict's text is absent.
    """
    text = b"".join(token.own.data for token in tokens)
    mark, end = verdict.encode(), thoughts_end.encode()
    thoughts = text.rfind(end) if end else -1
    at = thoughts + len(end) if thoughts >= 0 else 0
    if mark:
        mark_start = text.rfind(mark, at)
        if mark_start < 0:
            return None
        at = mark_start + len(mark)
    elif thoughts >= 0:
        at = len(text) - len(text[at:].lstrip())
    begin = 0
    for index, token in enumerate(tokens):
        if at < begin + len(token.own.data):
            return VerdictPlace(index, token.own.data[: at - begin])
        begin += len(token.own.data)
    return VerdictPlace(len(tokens), b"")


def read_options(tokens: Sequence[Token], spellings: Spellings, head: bytes = b"") -> Reading | None:
    """The probabilities of the options, from the tokens at the place of a verdict.

    A token counts for an option if it equals one of its spellings. A token that only begins a spelling is followed if the
    server wrote it, because the next position then shows the tokens that continue it: after "1", the probability of "0" counts
    for "10" and not for "1". The continuation of a beginning that the server did not write, or after which the reply ends, is
    not shown. Such a beginning counts for the option that it equals, such as "1" and not "10"; otherwise for the only option
    that it begins, such as "(A" for "(A)"; a beginning of several options, such as "(", counts for none. This is an
    approximation, and `undecided` is the probability that it concerns. `bound` includes all ways in which a beginning of
    several options could continue, and assumes that a beginning of one option continues with it.

    A token that is not shown has at most the smallest probability shown at its position, and all of them together have at most
    the probability that the shown ones leave. The written token does not count for the smallest one, because a server may list
    it although it is unlikely. `bound` assumes that equal bytes are one token.

    Args:
      tokens: the token at the place of the verdict, with log-probabilities at temperature 1, and those after it.
      spellings: the bytes of each of O options, from `spell`.
      head: the bytes of the first token that precede the verdict, from `find_verdict`. Other tokens at its position that do not
        begin with them belong to no option.

    Returns:
      The reading; None if no option is among the tokens shown.
    """
    walk = _Walk(tuple(tuple(head + text for text in own) for own in spellings))
    walk.follow(tokens)
    if not any(walk.mass):
        return None
    logprobs = tuple(math.log(mass) if mass > 0 else -math.inf for mass in walk.mass)
    missing = tuple(index for index, mass in enumerate(walk.mass) if not mass > 0)
    return Reading(logprobs, max(0.0, 1.0 - sum(walk.mass)), walk.bound(), missing, min(1.0, walk.undecided))


class _Walk:
    """Sums probabilities along the tokens of a reply. mass: of each option; low, high: how far the true one may be below and
    above it."""

    def __init__(self, spellings: Spellings):
        self.owner = {text: option for option, own in enumerate(spellings) for text in own}
        self.begun: dict[bytes, set[int]] = {}
        for text, option in self.owner.items():
            for length in range(len(text)):
                self.begun.setdefault(text[:length], set()).add(option)
        self.mass, self.low, self.high = ([0.0] * len(spellings) for _ in range(3))
        self.undecided = 0.0

    def follow(self, tokens: Sequence[Token]) -> None:
        prefix, weight = b"", 1.0
        for token in tokens:
            # The probability of each text shown, with the written token, which need not be among the most likely.
            shown: dict[bytes, float] = {}
            for other in token.top:
                shown[other.data] = shown.get(other.data, 0.0) + math.exp(other.logprob)
            shown.setdefault(token.own.data, math.exp(token.own.logprob))
            followed = prefix + token.own.data
            leads_on = followed in self.begun and followed != prefix
            continued = 0.0
            for data, share in shown.items():
                text = prefix + data
                continued += share if data and (text in self.owner or text in self.begun) else 0.0
                if data and not (leads_on and text == followed):
                    self._count(text, weight * share)
            if prefix in self.owner:  # It counts unless a longer spelling follows.
                self.mass[self.owner[prefix]] += weight * max(0.0, 1.0 - continued)
            self._bound_unshown(prefix, weight, token, shown)
            if not leads_on:
                return
            prefix, weight = followed, weight * shown[token.own.data]
        if prefix:
            self._count(prefix, weight)

    def _count(self, text: bytes, mass: float) -> None:
        """Counts a text whose continuation is not shown."""
        longer = self.begun.get(text, set())
        option = self.owner.get(text, next(iter(longer)) if len(longer) == 1 else None)
        rivals = longer - {option}
        self.undecided += mass if longer else 0.0
        for rival in rivals:
            self.high[rival] += mass
        if option is not None:
            self.mass[option] += mass
            self.low[option] += mass if rivals else 0.0

    def _bound_unshown(self, prefix: bytes, weight: float, token: Token, shown: dict[bytes, float]) -> None:
        """Adds the probability that tokens which are not shown at a position can have."""
        rest = max(0.0, 1.0 - sum(shown.values()))
        listed = [math.exp(other.logprob) for other in token.top if other.data != token.own.data]
        smallest = min(listed, default=1.0)
        unshown: list[set[bytes]] = [set() for _ in self.mass]
        for text, option in self.owner.items():
            if text.startswith(prefix):
                starts = {text[len(prefix) : length] for length in range(len(prefix) + 1, len(text) + 1)}
                unshown[option] |= starts - shown.keys()
        for option, starts in enumerate(unshown):
            self.high[option] += weight * min(rest, len(starts) * smallest)
        if prefix in self.owner:
            self.low[self.owner[prefix]] += weight * min(rest, len(set().union(*unshown)) * smallest)

    def bound(self) -> float:
        """The largest error of the first option's share."""
        first, others = self.mass[0], sum(self.mass[1:])
        least, most = max(0.0, first - self.low[0]), first + self.high[0]
        fewest, largest = max(0.0, others - sum(self.low[1:])), others + sum(self.high[1:])
        share = first / (first + others)
        up = most / (most + fewest) if most else share
        down = least / (least + largest) if least + largest else 0.0
        return min(1.0, max(up - share, share - down, 0.0))


def count_votes(texts: Sequence[str], options: Sequence[Sequence[str]], verdict: str = "") -> Votes:
    """Counts the options in sampled texts.

    A text is readable if it begins with a spelling of an option, or if a spelling follows its last `verdict`; white space
    before the spelling is ignored. The spelling must not be part of a longer word or number. A spelling of letters must not be
    followed by a word on its line. "A.", "A (because ...)" and "8/10" count; "Apple", "3.5" and "A better answer" do not.

    Args:
      texts: the texts as `Contract.clean` leaves them.
      options: the spellings of each of O options as text.
      verdict: the text that precedes a verdict; "": the text begins with it.
    """
    owner = {text.strip(): index for index, own in enumerate(options) for text in own}
    longest_first = sorted(owner, key=len, reverse=True)
    counts = [0] * len(options)
    for text in texts:
        if verdict and verdict not in text:
            continue
        answer = (text.rpartition(verdict)[2] if verdict else text).lstrip()
        spelling = next((spelling for spelling in longest_first if answer.startswith(spelling)), None)
        if spelling is None or _GOES_ON.match(answer, len(spelling)):
            continue
        if not (spelling.isalpha() and _NEXT_WORD.match(answer, len(spelling))):
            counts[owner[spelling]] += 1
    return Votes(tuple(counts), len(texts) - sum(counts))
