"""Batches, and a decoder, that the meshes do not divide evenly or that all of them divide."""

from __future__ import annotations

import jax
import numpy as np

from jaxalign.data.packing import pack
from jaxalign.models.architecture import DecoderConfig
from jaxalign.records import PairBatch

RNG = np.random.default_rng(0)
# Uneven on purpose: rows with few weighted tokens, padding rows, pairs without weight.
ROWS = pack([(RNG.integers(0, 32, n).tolist(), [1.0] * n) for n in (12, 9, 3, 11, 7, 10, 12)], 12)[0]
ROWS = jax.tree.map(lambda x: np.pad(x, ((0, 8 - len(ROWS.tokens)), (0, 0))), ROWS)
PAIRS = PairBatch(RNG.integers(0, 32, (8, 2, 6)).astype(np.int32), RNG.integers(1, 7, (8, 2)).astype(np.int32),
                  RNG.random(8).astype(np.float32), np.array([1, 1, 1, 0, 1, 0, 1, 1], np.float32))

DECODER = DecoderConfig(vocab=64, layers=4, embed=16, heads=8, kv_heads=8, head_dim=4, mlp=32, tie_embeddings=False, remat=True)
