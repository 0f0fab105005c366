"""Settings for the tests of stages."""

from __future__ import annotations

import pytest

from jaxalign.rollout import layouts


@pytest.fixture(scope="module", autouse=True)
def _rows_do_not_shrink():
    """Decode all rows until the end of a queue. Batches that shrink need twice as many decoding programs; the tests of
    `rollout/` and of other runs cover them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "SHARES", (1,))
        yield
