"""Packing: every token of every document occurs once, with its segment and weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.data.packing import completion, fit, pack
from jaxalign.errors import UserError


def test_documents_are_packed_in_order_into_the_fullest_row_that_fits():
    documents = [([5, 6], [1.0] * 2), ([8, 9, 10, 11], [1.0] * 4), ([14], [1.0]), ([12, 13], [1.0, 0.5])]
    batch, cut = pack(documents, 5)
    assert cut == 0
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 12, 13, 0], [8, 9, 10, 11, 14]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 2, 2, 0], [1, 1, 1, 1, 2]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 0, 1, 0], [0, 1, 2, 3, 0]])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 1, 0, 0.5, 0], [0, 1, 1, 1, 0]])


def test_rows_are_almost_full():
    """Lengths uniform in 1..512: 1% above the ideal in the given order, 0.3% with the longest first."""
    lengths = np.random.default_rng(0).integers(1, 513, 20_000)
    ideal, zeros = lengths.sum() / 512, [0] * 512
    packed, _ = pack([(zeros[:length], zeros[:length]) for length in lengths], 512)
    (sorted_rows,) = fit(lengths, 512, len(lengths))
    assert len(packed.tokens) <= 1.015 * ideal and len(sorted_rows) <= 1.003 * ideal


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(9, 14))
@pytest.mark.parametrize("longest_first", [True, False])
def test_the_rows_equal_those_of_best_fit(longest_first, lengths, row_length):
    """By its definition: look at every row, and put each sequence into the fullest one that has space."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True) if longest_first else lengths:
        row = min((r for r in range(len(left)) if left[r] >= length), key=lambda r: left[r], default=None)
        if row is None:
            left.append(row_length - length)
        else:
            left[row] -= length
    if longest_first:
        (rows,) = fit(np.array(lengths), row_length, len(lengths))
        found = [row_length - sum(lengths[i] for i in row) for row in rows]
    else:
        packed, _ = pack([([1] * length, [1.0] * length) for length in lengths], row_length)
        found = (packed.segment_ids == 0).sum(axis=1).tolist()
    assert sorted(found) == sorted(left)


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=20), st.integers(9, 14), st.integers(3, 5))
def test_sequences_of_a_group_are_in_the_same_part(groups, row_length, rows):
    lengths = np.array(groups).reshape(-1)
    parts = fit(lengths, row_length, rows, together=3)
    assert sorted(i for part in parts for row in part for i in row) == list(range(len(lengths)))
    for part in parts:
        assert 0 < len(part) <= rows
        assert all(row and lengths[row].sum() <= row_length for row in part)
        inside = {i // 3 for row in part for i in row}
        assert sum(len(row) for row in part) == 3 * len(inside)


@pytest.mark.parametrize(("lengths", "together"), [([5, 5], 2), ([6, 2], 1)])
def test_sequences_that_fit_no_part_are_an_error(lengths, together):
    with pytest.raises(ValueError, match="do not fit into 1 rows of 5"):
        fit(np.array(lengths), 5, 1, together)


def test_a_document_without_tokens_is_skipped():
    batch, cut = pack([([], []), ([1, 2], [1.0] * 2), ([], [])], 2)
    assert cut == 0
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1]])
    with pytest.raises(UserError, match="there is no text to train on"):
        pack([([], [])], 2)


def test_a_document_longer_than_a_row_is_cut_at_its_end_and_counted():
    batch, cut = pack([([1, 2, 3, 4, 5, 6], [1.0] * 6), ([7, 8], [1.0] * 2)], 4)
    assert cut == 1
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4], [7, 8, 0, 0]])


def test_pitfall_04_an_end_token_that_is_also_the_pad_token_is_trained_and_padding_is_not():
    """In other systems the mask is "not the pad id", and where pad = eos the model never learns to stop."""
    eos = pad = 0
    batch, _ = pack([([4, 5, eos], [1.0] * 3), ([6, eos], [1.0] * 2)], 7)
    np.testing.assert_array_equal(batch.tokens, [[4, 5, eos, 6, eos, pad, pad]])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 1, 1, 0, 1, 0, 0]])


def test_only_the_response_of_a_completion_has_weight():
    assert completion([1, 2], [3, 4, 5]) == ([1, 2, 3, 4, 5], [0.0, 0.0, 1.0, 1.0, 1.0])


def test_nothing_to_pack_is_reported_in_one_sentence():
    with pytest.raises(UserError, match="there is no text to train on"):
        pack([], 8)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(4, 12))
def test_every_token_and_weight_is_packed_once(lengths, row_length):
    """The segments of the rows are the documents, each complete (except truncated ones) and separate from the others."""
    number, documents = 1, []
    for length in lengths:
        ids = list(range(number, number + length))
        documents.append((ids, [float(i) for i in ids]))
        number += length
    batch, cut = pack(documents, row_length)
    assert cut == sum(length > row_length for length in lengths)
    found = {}
    for row in range(len(batch.tokens)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            inside = batch.segment_ids[row] == segment
            ids = batch.tokens[row][inside].tolist()
            assert batch.positions[row][inside].tolist() == list(range(len(ids)))
            assert batch.loss_mask[row][inside].tolist() == [0.0, *ids[1:]]
            found[ids[0]] = ids
        outside = batch.segment_ids[row] == 0
        assert not batch.loss_mask[row][outside].any()
    assert found == {ids[0]: ids[:row_length] for ids, _ in documents}
