"""Which texts are computed together with a shared prefix, and the arrays of their batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxalign.rollout.prefixes import LEAST, best_groups, padded_length, plan_batches

RNG = np.random.default_rng(0)


def words(count: int) -> list[int]:
    return RNG.integers(5, 1000, count).tolist()


def ordered(texts):
    """The texts in lexicographic order, as `best_groups` takes them."""
    texts = sorted(texts)
    common = [next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
              for both in itertools.pairwise(texts)]
    return texts, range(len(texts)), common


def test_texts_of_a_pair_are_a_group():
    pairs = [words(60), words(50)]
    texts, order, common = ordered([[*pair, 1000 + question, *words(10)] for pair in pairs for question in range(3)])
    found = best_groups(texts, order, common, 4)
    assert sorted((len(group.rows), group.shared) for group in found) == [(3, 50), (3, 60)]


@pytest.mark.parametrize("beginning", [0, 40])
def test_the_groups_save_the_most_tokens(beginning):
    """Against every way to cut the sorted texts. With a beginning of 40 tokens, all texts share something."""
    start, parts = words(beginning), [words(40), words(45), words(50)]
    texts, order, common = ordered([[*start, *parts[i], *words(8)] for i in (0, 0, 0, 1, 2, 2, 2)])
    most = 0
    for cuts in itertools.product([False, True], repeat=len(texts) - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(texts)]
        groups, saved = [texts[a:b] for a, b in itertools.pairwise(ends)], 0
        for group in groups:
            columns = zip(*group, strict=False)
            shared = next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(group[0]) - 1)
            allowed = len(group) == 1 or (shared >= LEAST and 2 * shared >= max(map(len, group)) and len(group) <= 4)
            saved = saved + (len(group) - 1) * shared if allowed else -np.inf
        most = max(most, saved)
    found = best_groups(texts, order, common, 4)
    assert sum((len(group.rows) - 1) * group.shared for group in found) == most > 0


def test_a_text_that_begins_another_and_an_equal_text_keep_a_token():
    text = words(50)
    texts, order, common = ordered([text, text, [*text, 7, 8]])
    assert [(len(group.rows), group.shared) for group in best_groups(texts, order, common, 4)] == [(3, 49)]


@pytest.mark.parametrize("parts", [1, 4])
def test_the_arrays_contain_every_text_once(parts):
    pairs = [words(40 + 3 * i) for i in range(5)]
    texts = [[*pair, 1000 + question, *words(question)] for pair in pairs for question in range(4)] + [words(50)]
    RNG.shuffle(texts)
    batches = plan_batches(texts, 16, parts, 8, sum(map(len, texts)) + 500)
    found = {}
    for batch in batches:
        G, B = len(batch.counts), len(batch.rows)
        assert (G % parts, B % G) == (0, 0) and B <= 16
        for i, row in enumerate(batch.rows):
            prefix = batch.prefixes[i * G // B, : batch.counts[i * G // B]].tolist()
            if row >= 0:
                assert row not in found
                found[row] = prefix + batch.tokens[i, : batch.lengths[i]].tolist()
    assert [found[i] for i in range(len(texts))] == texts


def test_short_or_different_texts_are_not_shared():
    short = [[*([9] * (LEAST - 1)), i] for i in range(8)]
    assert plan_batches(short, 8, 1, 8, 8 * LEAST) is None
    assert plan_batches([words(60) for _ in range(8)], 8, 1, 8, 8 * 64) is None
    assert plan_batches([[*([9] * 60), i] for i in range(8)], 8, 8, 8, 8 * 64) is None, "each part has one row"
    assert plan_batches([], 8, 1, 8, 0) is None


def test_padded_lengths_are_few_and_waste_less_than_a_quarter():
    lengths = range(1, 2049)
    padded = [padded_length(length, 16) for length in lengths]
    assert all(length <= size and size - length < max(16, length / 4) for length, size in zip(lengths, padded, strict=True))
    assert len(set(padded)) <= 8 + 4 * 4
