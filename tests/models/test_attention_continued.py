"""Texts that continue a shared prefix have the hidden states that they have as whole rows."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.models.architecture import Experts
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding, one_device
from tests import tiny

GEMMA = {"window": 5, "local_layers": (True, False), "local_rope_base": 100.0, "attention_softcap": 3.0,
         "attention_scale": 0.7, "sandwich_norms": True}
COUNTS = np.array([11, 3, 0, 1, 16, 9, 7, 2], np.int32)


def texts(T: int, each: int):
    rng = np.random.default_rng(0)
    return rng.integers(0, 32, (8, 16), np.int32), rng.integers(0, 32, (8 * each, T), np.int32)


def check(model: Model, T: int = 6, each: int = 3):
    """Against whole rows of a model on one device."""
    plain = dataclasses.replace(model, sharding=one_device())
    params = plain.init(jax.random.key(1))
    prefixes, tokens = texts(T, each)
    found = jax.jit(model.hidden_after)(tiny.place(model, params), *tiny.rows(model, (prefixes, COUNTS, tokens)))
    rows = np.zeros((8 * each, 16 + T), np.int32)
    for i, own in enumerate(tokens):
        whole = [*prefixes[i // each, : COUNTS[i // each]], *own]
        rows[i, : len(whole)] = whole
    expected = np.asarray(jax.jit(plain.hidden)(params, rows))
    for i, own in enumerate(np.asarray(found)):
        begin = COUNTS[i // each]
        np.testing.assert_allclose(own, expected[i, begin : begin + T], atol=1e-5)


@pytest.mark.variants(3)
@pytest.mark.parametrize("changes", [
    {}, {"window": 4}, GEMMA, {"cache_dtype": "int8"}, {"experts": Experts(4, 2)}, {"remat": True},
], ids=["plain", "window", "gemma", "int8 cache", "experts", "remat"])
def test_hidden_states_equal_those_of_whole_rows(changes):
    check(tiny.model(**changes))


def test_long_texts_are_computed_in_blocks():
    check(tiny.model(**GEMMA), T=150, each=2)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "tensor": 2,
                                                                                 "sequence_parallel": True}])
def test_hidden_states_do_not_depend_on_the_mesh(mesh):
    check(dataclasses.replace(tiny.model(**GEMMA), sharding=make_sharding(Mesh(**mesh))), T=7)


@pytest.mark.parametrize("mesh", [{"context": 2, "data": 4}, {"pipeline": 2, "data": 4}])
def test_a_mesh_that_splits_the_length_or_the_layers_does_not_continue_texts(mesh):
    assert tiny.model().continues and tiny.model((8, 1, 1)).continues
    assert not dataclasses.replace(tiny.model(), sharding=make_sharding(Mesh(**mesh))).continues
    assert not tiny.model(attention="fused").continues
