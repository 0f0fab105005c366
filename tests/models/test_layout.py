"""The layout language: every stored form against indices written out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxalign.models.checkpoints.layout import CheckpointLayout

_SIZES = {"D": 6, "H": 4, "K": 2, "h": 3, "F": 5, "V": 7, "n": 3, "1": 1}


def _by_hand(text, stored, pick):
    """The decoder's leaf, computed number by number."""
    S = _SIZES
    if text == "V D -> D V":
        return np.array([[stored[v, d] for v in range(S["V"])] for d in range(S["D"])])
    if text == "(H h) D -> D H h":
        rows = range(S["H"]), range(S["h"])
        return np.array([[[stored[H * S["h"] + h, d] for h in rows[1]] for H in rows[0]] for d in range(S["D"])])
    if text == "D (H h) -> H h D":
        return np.array([[[stored[d, H * S["h"] + h] for d in range(6)] for h in range(3)] for H in range(4)])
    if text == "(H n h) D -> D H h":
        return np.array([[[stored[(H * 3 + pick) * 3 + h, d] for h in range(3)] for H in range(4)] for d in range(6)])
    if text == "(H n h) -> H h":
        return np.array([[stored[(H * 3 + pick) * 3 + h] for h in range(3)] for H in range(4)])
    if text == "1 D -> D":
        return stored[0]
    raise AssertionError(text)


_CASES = [
    ("V D -> D V", (7, 6), 0), ("(H h) D -> D H h", (12, 6), 0), ("D (H h) -> H h D", (6, 12), 0),
    ("(H n h) D -> D H h", (36, 6), 1), ("(H n h) -> H h", (36,), 2), ("1 D -> D", (1, 6), 0),
]


@pytest.mark.parametrize(("text", "shape", "pick"), _CASES)
def test_any_part_of_a_leaf_needs_only_its_window(text, shape, pick):
    layout = CheckpointLayout(text, _SIZES, pick)
    stored = np.arange(np.prod(shape)).reshape(shape)
    expected = _by_hand(text, stored, pick)
    assert layout.stored_shape == shape
    assert layout.decoder_shape == expected.shape
    cuts = [[(0, size), (1, size - 1), (size - 1, size)] for size in expected.shape]
    for bounds in itertools.product(*cuts):
        part = layout.to_decoder(stored[layout.window(bounds)], bounds)
        np.testing.assert_array_equal(part, expected[tuple(slice(*both) for both in bounds)])


@pytest.mark.parametrize(("text", "shape", "pick"), _CASES)
def test_a_leaf_that_was_read_can_be_written_back(text, shape, pick):
    stored = np.arange(np.prod(shape)).reshape(shape)
    layout = CheckpointLayout(text, _SIZES)
    leaves = [_by_hand(text, stored, part) for part in range(layout.parts)]
    for cut in ((0, 1), (1, 4), (0, layout.decoder_shape[layout.rows])):
        bounds = tuple(cut if at == layout.rows else (0, size) for at, size in enumerate(layout.decoder_shape))
        parts = [leaf[tuple(slice(*both) for both in bounds)] for leaf in leaves]
        np.testing.assert_array_equal(layout.to_stored(parts, bounds), stored[layout.window(bounds)])


def test_only_the_rows_of_the_requested_heads_are_read():
    bounds = ((2, 4), (1, 3), (0, 3))  # D, H, h
    assert CheckpointLayout("(H h) D -> D H h", _SIZES).window(bounds) == (slice(3, 9), slice(2, 4))
    assert CheckpointLayout("(H n h) D -> D H h", _SIZES).window(bounds) == (slice(9, 27), slice(2, 4))


@pytest.mark.parametrize("text", ["V D -> D V h", "Q D -> D Q", "(n 1) D -> D", "(n F) D -> D F"])
def test_an_invalid_layout_is_refused(text):
    with pytest.raises(ValueError, match="is not a layout of letters"):
        CheckpointLayout(text, _SIZES)
