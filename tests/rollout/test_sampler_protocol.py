"""The `Sampler` protocol: the local sampler is the engine, versions reach the rollout, and results are checked."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rollout.responses import Response
from jaxalign.rollout.sampler import Engine, LocalSampler, make_sampler, respond, sample_rollout
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.rollout import simple

KEY = jax.random.key(0)
SAMPLING = Sampling(8, tiny.STOPS)
ROWS = range(10, 10 + len(tiny.PROMPTS))


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny.model(), 4, 32, 8)


@pytest.fixture(scope="module")
def params():
    return tiny.place(tiny.model(), tiny.host_params(scale=1.5))


def test_the_local_sampler_returns_the_responses_by_definition(engine, params):
    finished = []
    found = respond(LocalSampler(engine, params, 3), tiny.PROMPTS, KEY, ROWS, SAMPLING, finished.extend)
    expected = simple.respond(tiny.model(), params, tiny.PROMPTS, KEY, SAMPLING, ROWS)
    assert [r.ids for r in found] == [ids for ids, _ in expected]
    assert [r.ended for r in found] == [ids[-1] in tiny.STOPS for ids, _ in expected]
    assert {version for response in found for version in response.versions} == {3}
    assert sorted(i for i, _ in finished) == list(range(len(tiny.PROMPTS)))


def test_a_rollout_carries_the_version_of_each_token(engine, params):
    rollout = sample_rollout(LocalSampler(engine, params, 5), engine.padding, tiny.PROMPTS, KEY, ROWS, SAMPLING)
    chex.assert_shape(rollout.versions, rollout.logprobs.shape)
    written = np.arange(8)[None, :] < rollout.response_length[:, None]
    np.testing.assert_array_equal(rollout.versions, np.where(written, 5, 0))
    expected = tiny.sample(engine, params, tiny.PROMPTS, KEY, ROWS, SAMPLING)
    assert expected.versions is None
    chex.assert_trees_all_equal(rollout.tokens, expected.tokens)


def test_tokens_after_an_update_have_its_version(params):
    sampler, endless = LocalSampler(Engine(tiny.model(), 2, 128, 8), params), Sampling(64, ())
    sampler.submit([[1, 4], [1, 5]], [0, 1], KEY, endless)
    assert not sampler.collect() and sampler.unfinished == 2
    sampler.update(params, 7)
    responses = dict(sampler.collect())
    assert sampler.unfinished == 0
    for response in responses.values():
        assert set(response.versions) == {0, 7} and list(response.versions) == sorted(response.versions)


@pytest.mark.slow
def test_prompts_that_are_submitted_later_join_the_batch(params):
    """Rows with other keys, temperatures, filters, lengths and stop tokens decode together, and have the tokens that they have
    in a batch of their own."""
    engine = Engine(tiny.model(), 8, 96, 8)
    batches = [
        ([[1, 4], [1, 7, 9]], [3, 4], KEY, Sampling(80, ())),
        ([[1, 4], [1, 5]], [5, 6], jax.random.key(7), Sampling(40, tiny.STOPS, 0.7, 5)),
        ([[1, 8]], [7], KEY, Sampling(45, (*range(20, 26), 2), 1.5, 0, 0.8)),
        ([[1, 8, 3, 9]], [8], KEY, Sampling(50, (), 0.0)),
    ]
    sampler = LocalSampler(engine, params)
    sampler.submit(*batches[0])
    found = dict(sampler.collect())
    session = sampler._session
    for batch in batches[1:]:
        sampler.submit(*batch)
    assert sampler.unfinished == 6
    found |= sampler.collect()
    assert sampler._session is session and {row.number for row in session.live.values()} >= {3, 4, 8}
    while sampler.unfinished:
        found |= sampler.collect()
    for prompts, rows, key, sampling in batches:
        expected = respond(LocalSampler(engine, params), prompts, key, rows, sampling)
        assert [found[row].ids for row in rows] == [response.ids for response in expected]
        for row, response in zip(rows, expected, strict=True):
            np.testing.assert_allclose(found[row].logprobs, response.logprobs, atol=1e-5)
    assert len({len(found[row].ids) for row in found}) > 3 and sampler.collect() == []


def test_keys_of_two_implementations_cannot_share_a_batch(engine, params):
    sampler = LocalSampler(engine, params)
    sampler.submit([[1, 4]], [0], KEY, SAMPLING)
    with pytest.raises(UserError, match="the key has the implementation rbg, but rows of the same batch have threefry2x32"):
        sampler.submit([[1, 4]], [1], jax.random.key(0, impl="rbg"), SAMPLING)
    assert sampler.unfinished == 1 and len(sampler.collect()) == 1


def test_an_idle_sampler_holds_no_weights_for_generation(params):
    """The weights for generation are a copy in another dtype, or with another placement."""
    engine = Engine(tiny.model(compute_dtype="bfloat16"), 4, 32, 8)
    sampler = LocalSampler(engine, params)
    before = sum(x.size for x in jax.live_arrays() if x.dtype == "bfloat16")
    respond(sampler, tiny.PROMPTS, KEY, ROWS, SAMPLING)
    assert sum(x.size for x in jax.live_arrays() if x.dtype == "bfloat16") == before


def test_the_tokens_so_far_are_the_beginning_of_the_response(params):
    sampler, endless = LocalSampler(Engine(tiny.model(), 2, 128, 8), params), Sampling(64, ())
    sampler.submit([[1, 4], [1, 5]], [6, 9], KEY, endless)
    assert sampler.written(9) == ()
    sampler.collect()
    begun = sampler.written(9)
    assert 0 < len(begun) < 64
    assert dict(sampler.collect())[9].ids[: len(begun)] == begun and sampler.written(9) == ()


def test_a_sampler_without_weights_raises(engine):
    with pytest.raises(UserError, match="has no weights yet"):
        LocalSampler(engine).submit([[1]], [0], KEY, SAMPLING)


class _Scripted:
    """Returns a fixed answer to every call of `collect`."""

    def __init__(self, answers):
        self.answers, self.unfinished = answers, 0

    def submit(self, prompts, rows, key, sampling):
        self.unfinished = len(prompts)

    def collect(self):
        self.unfinished = 0
        return self.answers

    def update(self, params, version):
        pass


def _response(count=2, **changes):
    fields = {"logprobs": (0.0,) * count, "versions": (0,) * count} | changes
    return Response((3,) * count, False, 0.0, **fields)


@pytest.mark.parametrize(("answers", "message"), [
    ([], "finished without a response for row 10"),
    ([(11, _response())], "returned row 11, which was not submitted"),
    ([(10, _response()), (10, _response())], "returned row 10 twice"),
    ([(10, "text")], "returned an object of type str for row 10; a Response is expected"),
    ([(10, _response(9))], "returned 9 tokens for row 10; 1 to 8 are expected"),
    ([(10, _response(logprobs=(0.0,)))], "2 tokens and 1 logprobs for row 10; one for each token"),
    ([(10, _response(versions=()))], "2 tokens and 0 versions for row 10; one for each token"),
])
def test_the_responses_of_a_sampler_are_checked(answers, message):
    with pytest.raises(UserError, match=message):
        respond(_Scripted(answers), [[1, 4]], KEY, [10], SAMPLING)


def test_a_sampler_with_unanswered_rows_is_refused():
    sampler = _Scripted([])
    sampler.unfinished = 3
    with pytest.raises(UserError, match="has 3 unfinished rows"):
        respond(sampler, [[1, 4]], KEY, [10], SAMPLING)


@pytest.mark.parametrize(("sampler", "message"), [
    ("remote", "ppo.sampler is 'remote'; one of local, or 'package.module:name'"),
    ("no.such.module:Thing", "no.such.module cannot be imported"),
    ("json:JSONDecoder", "names 'json:JSONDecoder', which is not a sampler"),
    (lambda engine: 3, "which creates an object of type int; one with the methods submit, collect and update"),
    (7, "is 7 of type int; a registered name"),
])
def test_an_invalid_sampler_is_refused(engine, sampler, message):
    with pytest.raises(UserError, match=message):
        make_sampler(sampler, engine, "ppo.sampler")


def test_a_sampler_is_chosen_by_name_object_or_function(engine):
    own = _Scripted([])
    assert make_sampler("local", engine).engine is engine
    assert make_sampler(own, engine) is own
    assert make_sampler(lambda given: own, engine) is own
    assert make_sampler(LocalSampler, engine).engine is engine
