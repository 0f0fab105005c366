"""Arrays on a mesh, filled and read block by block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.models import blocks
from jaxalign.models.checkpoints.layout import CheckpointLayout
from jaxalign.parallel.mesh import make_mesh

_VALUE = np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4)
_SPECS = (PartitionSpec(), PartitionSpec("tensor", "fsdp"), PartitionSpec(("data", "fsdp"), None, "tensor"))


class _Rows:
    """Yields the rows of `_VALUE` except the last two, and counts them."""

    def __init__(self):
        self.given = 0

    def __call__(self, bounds):
        (first, last), *rest = bounds
        for row in range(first, min(last, 6)):
            self.given += 1
            yield (row - first, 0, 0), _VALUE[row : row + 1, *(slice(*both) for both in rest)]


@pytest.mark.parametrize("limit", [1, 1 << 20])
@pytest.mark.parametrize("spec", _SPECS)
def test_every_device_gets_its_slice_and_missing_blocks_are_zero(monkeypatch, spec, limit):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", limit)
    sharding = NamedSharding(make_mesh(2, 2, 2), spec)
    placed = blocks.place_blocks(_VALUE.shape, np.dtype(np.float32), sharding, _Rows())
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed[:6], _VALUE[:6])
    np.testing.assert_array_equal(placed[6:], 0)
    moved = jax.jit(lambda x: x + 1, donate_argnums=0)(placed)  # The buffers are its own, so they can be donated.
    np.testing.assert_array_equal(moved[:6], _VALUE[:6] + 1)


def test_slices_that_several_devices_share_are_read_once():
    rows = _Rows()
    blocks.place_blocks(_VALUE.shape, np.dtype(np.float32), NamedSharding(make_mesh(2, 2, 2), PartitionSpec()), rows)
    assert rows.given == 6
    rows = _Rows()
    blocks.place_blocks(_VALUE.shape, np.dtype(np.float32), NamedSharding(make_mesh(2, 2, 2), PartitionSpec("fsdp")), rows)
    assert rows.given == 6


@pytest.mark.parametrize("spec", _SPECS)
def test_any_part_is_fetched_from_any_mesh(spec):
    placed = jax.device_put(_VALUE, NamedSharding(make_mesh(2, 2, 2), spec))
    for bounds in (((0, 8), (0, 6), (0, 4)), ((3, 4), (0, 6), (1, 3)), ((2, 7), (2, 5), (3, 4))):
        np.testing.assert_array_equal(blocks.fetch(placed, bounds), _VALUE[tuple(slice(*both) for both in bounds)])
    np.testing.assert_array_equal(blocks.fetch(jnp.asarray(_VALUE), ((1, 2), (0, 6), (0, 4))), _VALUE[1:2])


def test_blocks_of_rows_cover_everything_once(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4 * 5 * 2)  # Two stored rows of five numbers.
    layout = CheckpointLayout("F D -> D F", {"D": 5, "F": 7})
    found = list(blocks.row_blocks(layout, ((0, 5), (1, 7)), 4))
    assert found == [((0, 5), (1, 3)), ((0, 5), (3, 5)), ((0, 5), (5, 7))]
