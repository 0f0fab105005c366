"""The rows that a step trains on, with several files mixed."""

from __future__ import annotations

import collections

import numpy as np

from jaxalign.data.loader import EpochLoader, MixtureLoader

SIZES, SHARES = (30, 50, 20), (1.0, 1.0, 2.0)


def loader(batch=10, seed=0):
    return MixtureLoader(100, batch, seed, 7, SIZES, SHARES)


def source(row):
    return 0 if row < 30 else 1 if row < 80 else 2


def test_every_epoch_has_the_share_of_each_file():
    for epoch in range(3):
        rows = np.concatenate([loader().indices(step) for step in range(10 * epoch, 10 * epoch + 10)])
        assert collections.Counter(map(source, rows.tolist())) == {0: 25, 1: 25, 2: 50}
    assert len({tuple(loader().indices(step)) for step in range(30)}) == 30


def test_all_rows_of_a_file_are_used_before_any_is_repeated():
    """Four epochs take 100 rows from the second file, which has 50, so each comes twice, and 200 from the third, which has 20,
    so each comes ten times."""
    rows = np.concatenate([loader().indices(step) for step in range(40)])
    counts = collections.Counter(rows.tolist())
    assert {counts[row] for row in range(30, 80)} == {2}
    assert {counts[row] for row in range(80, 100)} == {10}
    assert {counts[row] for row in range(30)} <= {3, 4} and sum(counts[row] for row in range(30)) == 100


def test_files_are_mixed_within_a_batch_by_the_seed():
    assert len({source(row) for row in loader(batch=50).indices(0).tolist()}) == 3
    np.testing.assert_array_equal(loader().indices(3), loader().indices(3))
    assert (loader().indices(3) != loader(seed=1).indices(3)).any()
    assert loader(batch=7).steps(2) == EpochLoader(100, 7, 0).steps(2)


def test_the_order_of_rows_does_not_depend_on_the_batch_size():
    """Rows come in the same order, however they are cut into batches."""
    seven = np.concatenate([loader(batch=7).indices(step) for step in range(29)])[:200]
    ten = np.concatenate([loader().indices(step) for step in range(20)])
    np.testing.assert_array_equal(seven, ten)
