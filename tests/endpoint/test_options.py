"""The options of a verdict, against sums by hand and against a walk over complete distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.endpoint.options import VerdictPlace, count_votes, find_verdict, read_options, spell
from jaxalign.endpoint.records import Alternative, Token
from jaxalign.errors import UserError

LETTERS = ((b"A", b" A", b"a", b" a"), (b"B", b" B", b"b", b" b"))
RATINGS = tuple((str(rating).encode(),) for rating in range(1, 11))
TRIPLE = ((b"1", b" 1"), (b"2", b" 2"), (b"10", b" 10"))


def position(own: bytes, shown: dict[bytes, float]) -> Token:
    """The token `own` at a position that shows these probabilities."""
    top = tuple(Alternative(data, math.log(share)) for data, share in shown.items())
    return Token(Alternative(own, math.log(shown[own])), top)


def written(*texts: bytes) -> list[Token]:
    return [Token(Alternative(text, -0.1), ()) for text in texts]


def test_spellings_are_summed():
    reading = read_options([position(b"A", {b"A": 0.4, b" A": 0.2, b"B": 0.15, b" b": 0.05, b"The": 0.1})], LETTERS)
    np.testing.assert_allclose(np.exp(reading.logprobs), [0.6, 0.2], rtol=1e-12)
    assert reading.outside == pytest.approx(0.2) and reading.missing == () and reading.undecided == 0


def test_options_are_compared_byte_by_byte():
    reading = read_options([position(b"A", {b"A": 0.5, b"\tB": 0.2, b"B.": 0.1, b"B": 0.1, b"  A": 0.05})], LETTERS)
    np.testing.assert_allclose(np.exp(reading.logprobs), [0.5, 0.1], rtol=1e-12)


def test_a_missing_option_is_bounded_by_the_smallest_probability_shown():
    """B could have three spellings of at most 0.01 each; all tokens that are not shown together have 0.04."""
    reading = read_options([position(b"A", {b"A": 0.9, b"x": 0.05, b"y": 0.01})], ((b"A",), (b"B", b"b", b"\xce\x92")))
    assert reading.logprobs == (pytest.approx(math.log(0.9)), -math.inf) and reading.missing == (1,)
    # The four beginnings of B that are not shown: three spellings, and the first byte of the Greek letter.
    assert reading.bound == pytest.approx(1 - 0.9 / (0.9 + min(0.04, 4 * 0.01)))
    assert reading.outside == pytest.approx(0.1)


def test_the_bound_is_small_where_the_shown_tokens_leave_little():
    shown = {b"A": 0.7, b"B": 0.2999}
    assert read_options([position(b"A", shown)], LETTERS).bound < 2e-4


def test_no_option_among_the_tokens_gives_no_reading():
    assert read_options([position(b"The", {b"The": 0.9, b"I": 0.1})], LETTERS) is None
    assert read_options([], LETTERS) is None


def test_a_written_token_counts_though_it_is_not_among_the_most_likely():
    token = Token(Alternative(b"B", math.log(0.05)), (Alternative(b"A", math.log(0.6)), Alternative(b"x", math.log(0.3))))
    np.testing.assert_allclose(np.exp(read_options([token], LETTERS).logprobs), [0.6, 0.05], rtol=1e-12)


def test_an_unlikely_written_token_does_not_bound_the_tokens_that_are_not_shown():
    """vLLM lists the written token first and then fewer of the most likely ones; B is hidden and may be as likely as x."""
    reading = read_options([position(b"y", {b"y": 0.001, b"A": 0.6, b"x": 0.2})], ((b"A",), (b"B",)))
    assert reading.bound == pytest.approx(1 - 0.6 / (0.6 + min(0.2, 1 - 0.801)))


def test_a_space_that_the_server_wrote_is_followed():
    """P(A) = 0.3 + 0.6 * 0.75."""
    tokens = [position(b" ", {b" ": 0.6, b"A": 0.3, b"B": 0.1}), position(b"A", {b"A": 0.75, b"B": 0.25})]
    reading = read_options(tokens, LETTERS)
    np.testing.assert_allclose(np.exp(reading.logprobs), [0.3 + 0.6 * 0.75, 0.1 + 0.6 * 0.25], rtol=1e-12)
    assert reading.undecided == 0


def test_a_space_that_the_server_did_not_write_counts_for_no_option():
    reading = read_options([position(b"A", {b"A": 0.5, b" ": 0.3, b"B": 0.2})], LETTERS)
    np.testing.assert_allclose(np.exp(reading.logprobs), [0.5, 0.2], rtol=1e-12)
    assert reading.undecided == pytest.approx(0.3) and reading.outside == pytest.approx(0.3)
    assert reading.bound == pytest.approx(0.5 / 0.7 - 0.5 / 1.0)


def test_ten_is_read_from_the_position_after_a_written_one():
    """P(10) = 0.5 * 0.8 and P(1) = 0.5 * (1 - 0.8)."""
    tokens = [position(b"1", {b"1": 0.5, b"9": 0.4, b"8": 0.1}), position(b"0", {b"0": 0.8, b"\n": 0.2})]
    reading = read_options(tokens, RATINGS)
    expected = np.zeros(10)
    expected[[0, 7, 8, 9]] = 0.5 * 0.2, 0.1, 0.4, 0.5 * 0.8
    np.testing.assert_allclose(np.exp(reading.logprobs), expected, atol=1e-12)
    assert reading.undecided == 0 and reading.missing == (1, 2, 3, 4, 5, 6)


def test_one_counts_for_itself_where_its_continuation_is_unknown():
    reading = read_options([position(b"9", {b"9": 0.6, b"1": 0.4})], RATINGS)
    np.testing.assert_allclose(np.exp(reading.logprobs)[[0, 8, 9]], [0.4, 0.6, 0.0], atol=1e-12)
    assert reading.undecided == pytest.approx(0.4) and reading.bound == pytest.approx(0.4)


def test_an_option_of_several_tokens_counts_from_the_beginning_that_it_alone_has():
    tokens = [position(b"(", {b"(": 0.9, b"A": 0.1}), position(b"A", {b"A": 0.7, b"B": 0.3}), position(b")", {b")": 1.0})]
    reading = read_options(tokens, ((b"(A)",), (b"(B)",)))
    np.testing.assert_allclose(np.exp(reading.logprobs), [0.9 * 0.7, 0.9 * 0.3], rtol=1e-12)
    assert reading.undecided == pytest.approx(0.9 * 0.3)


def test_an_empty_end_token_is_no_option():
    tokens = [position(b"1", {b"1": 0.9, b"": 0.1}), position(b"", {b"": 0.7, b"0": 0.3})]
    np.testing.assert_allclose(np.exp(read_options(tokens, RATINGS).logprobs)[[0, 9]], [0.9 * 0.7, 0.9 * 0.3], rtol=1e-12)


class TestVerdict:
    def test_the_last_occurrence_counts(self):
        tokens = written(b"Better", b" answer", b":", b" B", b"? No. Better answer", b":", b" A", b".")
        assert find_verdict(tokens, "Better answer:") == VerdictPlace(6, b"")

    def test_a_token_may_contain_the_end_of_the_text_and_the_option(self):
        """Tokens at the position that do not end the text in the same way are no options, even if they equal one."""
        tokens = [*written(b"Better", b" answer"), position(b": A", {b": A": 0.5, b": B": 0.2, b"A": 0.2, b" B": 0.1})]
        place = find_verdict(tokens, "Better answer:")
        assert place == VerdictPlace(2, b":")
        reading = read_options(tokens[place.index :], LETTERS, place.head)
        np.testing.assert_allclose(np.exp(reading.logprobs), [0.5, 0.2], rtol=1e-12)

    def test_a_verdict_among_the_thoughts_does_not_count(self):
        tokens = written(b"Rating:", b" 3", b"</think>", b"\n\n", b"7")
        assert find_verdict(tokens, "Rating:", "</think>") is None
        assert find_verdict(tokens, "", "</think>") == VerdictPlace(4, b"")

    def test_characters_of_several_bytes_may_be_split(self):
        assert find_verdict(written(b"Ergebnis\xc3", b"\xa4:", b" A"), "Ergebnis\u00e4:") == VerdictPlace(2, b"")

    def test_without_text_the_verdict_begins_the_reply(self):
        assert find_verdict(written(b"", b"A")) == VerdictPlace(1, b"")

    def test_a_reply_may_end_before_the_option(self):
        tokens = written(b"Better answer", b":")
        place = find_verdict(tokens, "Better answer:")
        assert place == VerdictPlace(2, b"") and read_options(tokens[place.index :], LETTERS) is None

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    def test_the_place_does_not_depend_on_the_tokens(self, lengths):
        text, cuts = "Ä: B or A? Better: Ä: A, Better: B".encode(), np.cumsum([0, *lengths])
        tokens = written(*(text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True) if text[a:b]))
        place = find_verdict(tokens, "Better:")
        before = b"".join(token.own.data for token in tokens[: place.index]) + place.head
        assert before == "Ä: B or A? Better: Ä: A, Better:".encode()


def walk(distributions: dict[bytes, dict[bytes, float]], spellings) -> tuple[np.ndarray, float]:
    """(the probability of each option, the probability of none): every continuation is counted once, with nothing hidden.

    A text belongs to the longest spelling with which it begins.
    """
    whole = {text: option for option, own in enumerate(spellings) for text in own}
    begun = {text[:n] for text in whole for n in range(len(text))}
    mass = np.zeros(len(spellings) + 1)

    def visit(prefix: bytes, weight: float) -> None:
        for data, share in distributions[prefix].items():
            text = prefix + data
            if text in begun:
                visit(text, weight * share)
            else:
                mass[whole.get(text, whole.get(prefix, -1))] += weight * share

    visit(b"", 1.0)
    return mass[:-1], mass[-1]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.booleans())
def test_the_bound_holds_for_any_distribution_and_number_of_tokens_shown(seed, shown, sampled):
    rng, vocab = np.random.default_rng(seed), (b"1", b"2", b"0", b" ", b"10", b" 1", b"x")
    distributions = {
        prefix: dict(zip(vocab, rng.dirichlet(np.full(len(vocab), 0.3)) + 1e-300, strict=True))
        for prefix in (b"", b" ", b"1", b" 1")
    }
    tokens, prefix = [], b""
    while prefix in distributions:
        full = distributions[prefix]
        data = rng.choice(vocab, p=list(full.values())) if sampled else max(full, key=full.get)
        top = dict(sorted(full.items(), key=lambda item: -item[1])[:shown])
        tokens.append(position(data, top if data in top else {data: full[data]} | top))
        prefix += data
    reading, (mass, outside) = read_options(tokens, TRIPLE), walk(distributions, TRIPLE)
    if reading is None:
        return
    found = np.exp(reading.logprobs)
    assert abs(found[0] / found.sum() - mass[0] / mass.sum()) <= reading.bound + 1e-9
    assert outside <= reading.outside + reading.undecided + 1e-9
    if shown == len(vocab) and not reading.undecided:
        np.testing.assert_allclose(found, mass, atol=1e-9)
        assert reading.bound == pytest.approx(0, abs=1e-9)


class TestVotes:
    OPTIONS = (("A", " A", "a", " a"), ("B", " B", "b", " b"))

    def test_readable_texts_are_counted(self):
        votes = count_votes(["A", " B.", "a\nBecause", "A (clearer)", "**A**", "Neither"], self.OPTIONS)
        assert votes.counts == (3, 1) and votes.unreadable == 2
        assert votes.shares == (0.75, 0.25) and votes.outside == pytest.approx(1 / 3)

    def test_the_beginning_of_a_word_or_sentence_is_no_vote(self):
        assert count_votes(["Apple", "A better answer is B", "A-B"], self.OPTIONS).counts == (0, 0)

    def test_the_option_follows_the_last_verdict(self):
        texts = ["Better answer: B? No. Better answer: A", "A is clearer.", "Better answer:\nB"]
        votes = count_votes(texts, self.OPTIONS, "Better answer:")
        assert votes.counts == (1, 1) and votes.unreadable == 1

    def test_the_longest_rating_counts(self):
        ratings = [(str(rating),) for rating in range(1, 11)]
        votes = count_votes(["10", "1", "8/10", "3.5", "7 out of 10", "11"], ratings)
        assert votes.counts == (1, 0, 0, 0, 0, 0, 1, 1, 0, 1) and votes.unreadable == 2

    def test_without_readable_texts_there_are_no_shares(self):
        votes = count_votes(["?"], self.OPTIONS)
        assert votes.shares is None and votes.outside == 1


def test_options_with_a_common_spelling_are_rejected():
    assert spell(("A", "B"), lambda name: (name, name.lower())) == ((b"A", b"a"), (b"B", b"b"))
    with pytest.raises(UserError, match="'A' and 'a' have the spelling 'a' in common"):
        spell(("A", "a"), lambda name: (name, name.lower()))
