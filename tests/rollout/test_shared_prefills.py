"""Prompts that share a beginning are prefilled together, and their samples do not change."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.parallel.sharding import make_sharding
from jaxalign.rollout import forecast
from jaxalign.rollout.ring import prefill, prefill_after
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session
from tests import tiny
from tests.rollout import simple

KEY = jax.random.key(0)
SAMPLING = Sampling(6, tiny.STOPS)
WINDOWED = {"layers": 2, "window": 5, "local_layers": (True, False)}


def questions(pairs: int = 6, each: int = 4) -> list[list[int]]:
    """`each` questions about one text, in any order, one of them twice, and two prompts by themselves."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, 32, 33 + i).tolist() for i in range(pairs)]
    prompts = [[*text, k, *rng.integers(3, 32, 2 + k).tolist()] for text in texts for k in range(each)]
    rng.shuffle(prompts)
    return [*prompts, prompts[3], rng.integers(3, 32, 20).tolist(), [1]]


@pytest.fixture
def prefilled(monkeypatch) -> list[int]:
    """The number of tokens of each prefill, including padding."""
    found, call = [], Session.call

    def record(self, step, *arguments):
        if step in (prefill, prefill_after):
            found.append(sum(x.size for x in arguments[2:] if x.ndim == 2))
        return call(self, step, *arguments)

    monkeypatch.setattr(Session, "call", record)
    return found


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize(("changes", "mesh", "batch"), [
    ({}, None, 4), ({}, (8, 1, 1), 64), (WINDOWED, (2, 2, 2), 32),
])
def test_samples_are_those_by_definition(prefilled, changes, mesh, batch):
    """Also with fewer rows than prompts, so that prompts of a group enter one after another."""
    model, prompts, weights = tiny.model(mesh, **changes), questions(), tiny.host_params(scale=1.5, **changes)
    engine = Engine(model, batch, 64, 8, share_prefix=True)
    found = tiny.respond(engine, tiny.place(model, weights), prompts, KEY, SAMPLING, range(len(prompts)))
    expected = simple.respond(tiny.model(**changes), weights, prompts, KEY, SAMPLING, range(len(prompts)))
    for response, (ids, logprobs) in zip(found, expected, strict=True):
        assert list(response.ids) == list(ids)
        np.testing.assert_allclose(response.logprobs, logprobs, atol=1e-4)
    shared = sum(prefilled)
    prefilled.clear()
    alone = dataclasses.replace(engine, share_prefix=False)
    tiny.respond(alone, tiny.place(model, weights), prompts, KEY, SAMPLING, range(len(prompts)))
    assert shared < 0.7 * sum(prefilled)


def test_an_int8_cache_has_the_keys_and_values_of_each_prompt_alone():
    """The quantised keys and values differ from those of a prefill alone by at most one step, from rounding."""
    model, weights = tiny.model(cache_dtype="int8"), tiny.host_params()
    prefix, rest = np.arange(40, dtype=np.int32)[None] % 32, np.array([[5, 6, 7, 8], [9, 3, 2, 4]], np.int32)
    found = prefill_after(model, weights, np.pad(prefix, ((0, 0), (0, 8))), np.array([40], np.int32), rest)
    expected = prefill(model, weights, np.concatenate([np.repeat(prefix, 2, axis=0), rest], axis=1))
    for own, other in zip(found, expected, strict=True):
        for x, y, slots in zip(own, other, (4, 3, 3, 3), strict=True):
            x = jax.lax.slice_in_dim(x, 0, 44, axis=slots)
            assert x.dtype == y.dtype
            if x.dtype == np.int8:
                assert np.max(np.abs(np.asarray(x, int) - np.asarray(y, int))) <= 1
            else:
                np.testing.assert_allclose(x, y, rtol=1e-5)


def test_the_reused_tokens_of_the_prompts_are_reported():
    """Two questions about a text of 40 tokens, one of them twice."""
    text = np.random.default_rng(3).integers(3, 32, 40).tolist()
    prompts = [[*text, 1, 6, 7], [*text, 2, 6, 7], [*text, 2, 6, 7], [1, 5]]
    for batch in (4, 1):
        engine = Engine(tiny.model(), batch, 64, 8, share_prefix=True)
        found = tiny.respond(engine, tiny.host_params(), prompts, KEY, SAMPLING, range(4))
        assert [response.reused for response in found] == [0, 40, 42, 0]


def test_groups_that_do_not_fit_into_a_part_of_the_mesh_are_sampled():
    """Each part has one row, so that the prompts of a group are spread over the parts."""
    model, prompts, weights = tiny.model((8, 1, 1)), questions(), tiny.host_params(scale=1.5)
    engine = Engine(model, 8, 64, 8, share_prefix=True)
    found = tiny.respond(engine, tiny.place(model, weights), prompts, KEY, SAMPLING, range(len(prompts)))
    expected = simple.respond(tiny.model(), weights, prompts, KEY, SAMPLING, range(len(prompts)))
    assert [response.ids for response in found] == [ids for ids, _ in expected]


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
def test_the_forecast_is_exact_without_stop_ids(monkeypatch, mesh):
    called, call, sampling = [], Session.call, Sampling(6, ())

    def record(self, step, *arguments):
        key = forecast._key(step, forecast._described(arguments))
        if key not in called:
            called.append(key)
        return call(self, step, *arguments)

    model, prompts = tiny.model(mesh), questions()
    monkeypatch.setattr(Session, "call", record)
    engine = Engine(model, 8, 64, 8, share_prefix=True)
    session = engine.start(tiny.place(model, tiny.host_params()), prompts, KEY, sampling, range(len(prompts)))
    expected = [forecast._key(*program) for program in forecast.forecast(session)]
    while session.unfinished:
        session.step()
    assert called == expected


@pytest.mark.slow
def test_a_mesh_that_splits_the_length_prefills_each_prompt(prefilled):
    model, prompts = dataclasses.replace(tiny.model(), sharding=make_sharding(Mesh(data=4, context=2))), questions(2)
    params, used = tiny.place(model, tiny.host_params()), []
    for share in (True, False):
        tiny.respond(Engine(model, 8, 64, 8, share), params, prompts, KEY, SAMPLING, range(len(prompts)))
        used.append(list(prefilled))
        prefilled.clear()
    assert used[0] == used[1] != []
