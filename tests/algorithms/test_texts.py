"""Repetition and diversity of texts counted by hand."""

from __future__ import annotations

import pytest

from jaxalign.algorithms.texts import distinct_share, repeated_share


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([5, 5, 5], 0.0),
        ([1, 2, 3, 4, 5, 6], 0.0),
        ([7, 7, 7, 7, 7, 7], 2 / 3),  # 3 equal 4-grams
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),  # 1234 2341 3412 4123 1234
    ],
)
def test_repetition_is_the_share_of_4_grams_that_occurred_before(ids, share):
    assert repeated_share(ids) == pytest.approx(share)


def test_distinct_n_grams_are_divided_by_the_number_of_words():
    """6 words. Distinct are a, b, c; the bigrams ab, ba, bc; the trigrams aba, bab."""
    texts = [text.split() for text in ("a b a b", "b c", "")]
    assert [distinct_share(texts, n) for n in (1, 2, 3)] == pytest.approx([3 / 6, 3 / 6, 2 / 6])
    assert distinct_share([[]], 1) is None
