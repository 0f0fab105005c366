"""Packing: every token of every document once, told apart by segment, with its weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.data.packing import completion, pack
from jaxalign.errors import UserError


def test_documents_are_packed_first_fit_in_order():
    documents = [([5, 6, 7], [1.0] * 3), ([8, 9, 10, 11], [1.0] * 4), ([12, 13], [1.0, 0.5])]
    batch, cut = pack(documents, 5)
    assert cut == 0
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 12, 13], [8, 9, 10, 11, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 1, 1, 0, 0.5], [0, 1, 1, 1, 0]])


def test_a_document_longer_than_a_row_is_cut_at_its_end_and_counted():
    batch, cut = pack([([1, 2, 3, 4, 5, 6], [1.0] * 6), ([7, 8], [1.0] * 2)], 4)
    assert cut == 1
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4], [7, 8, 0, 0]])


def test_pitfall_04_an_end_that_is_also_the_padding_is_learnt_and_padding_is_not():
    """Elsewhere the mask is "not the pad id", and where pad = eos the model never learns to end."""
    eos = pad = 0
    batch, _ = pack([([4, 5, eos], [1.0] * 3), ([6, eos], [1.0] * 2)], 7)
    np.testing.assert_array_equal(batch.tokens, [[4, 5, eos, 6, eos, pad, pad]])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 1, 1, 0, 1, 0, 0]])


def test_a_completion_is_weighed_on_its_response_alone():
    assert completion([1, 2], [3, 4, 5]) == ([1, 2, 3, 4, 5], [0.0, 0.0, 1.0, 1.0, 1.0])


def test_nothing_to_pack_is_a_sentence():
    with pytest.raises(UserError, match="there is no text to train on"):
        pack([], 8)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(4, 12))
def test_every_token_and_weight_is_packed_once(lengths, row_length):
    """Read back segment by segment, the rows hold the documents, each whole (but for the cut) and next to no other."""
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
