"""A session step by step: weights swapped between steps, bad input, compiled programs, cached prefills."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

from benchmarks.warm_up import _lengths, warm_up
from jaxalign.errors import UserError
from jaxalign.rollout import session as module
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.compilations import SEEN

KEY = jax.random.key(0)
ENDLESS = Sampling(40, ())


@pytest.fixture(scope="module")
def params():
    return tiny.place(tiny.model(), tiny.host_params(scale=1.5))


@pytest.fixture(scope="module")
def others():
    return tiny.place(tiny.model(), tiny.host_params(seed=1, scale=1.5))


def finish(session) -> dict:
    found = {}
    while session.unfinished:
        found |= dict(session.step())
    return found


def test_every_token_has_the_version_of_the_weights_that_wrote_it(params, others):
    """40 tokens are two chunks; the weights, and the tokens from there on, change between them."""
    engine = Engine(tiny.model(), 2, 64, 8)
    session = engine.start(params, [[1, 4]], KEY, ENDLESS, [0])
    assert session.step() == [] and len(session.written(0)) == module.STEPS
    session.swap(others)
    ((index, response),) = session.step()
    alone = tiny.respond(engine, params, [[1, 4]], KEY, ENDLESS, [0])[0]
    assert index == 0 and session.unfinished == 0
    assert response.versions == (0,) * module.STEPS + (1,) * (40 - module.STEPS) and alone.versions == (0,) * 40
    assert response.ids[: module.STEPS] == alone.ids[: module.STEPS] and response.ids != alone.ids


def test_log_probabilities_after_a_swap_use_the_new_weights_and_the_old_cache(params):
    """Swapping in equal weights changes nothing."""
    engine = Engine(tiny.model(), 2, 64, 8)
    session = engine.start(params, [[1, 4], [1]], KEY, ENDLESS, [0, 1])
    session.step()
    session.swap(params)
    found = finish(session)
    for i, expected in enumerate(tiny.respond(engine, params, [[1, 4], [1]], KEY, ENDLESS, [0, 1])):
        assert found[i].ids == expected.ids and found[i].logprobs == expected.logprobs


def test_prompts_submitted_later_get_the_same_answers(params):
    engine, sampling = Engine(tiny.model(), 3, 64, 8), Sampling(8, tiny.STOPS)
    session = engine.start(params, tiny.PROMPTS[:3], KEY, sampling, range(3))
    first = dict(session.step())
    session.submit(tiny.PROMPTS[3:], range(3, 8), KEY, sampling)
    found = first | finish(session)
    whole = tiny.respond(engine, params, tiny.PROMPTS, KEY, sampling, range(8))
    assert [found[i].ids for i in range(8)] == [response.ids for response in whole]


def test_a_bad_prompt_affects_no_other(params):
    engine, sampling = Engine(tiny.model(), 2, 16, 8), Sampling(8, tiny.STOPS)
    given = [[1, 7, 9], [], [1] * 9, [1, 4], [1, 32], [-1, 3], [2**40]]
    found = tiny.respond(engine, params, given, KEY, sampling, range(7))
    good = tiny.respond(engine, params, [given[0], given[3]], KEY, sampling, [0, 3])
    assert [found[0].ids, found[3].ids] == [response.ids for response in good]
    assert found[1].ids == found[2].ids == () and not found[1].ended
    assert found[1].error == "a prompt is empty; at least one token is expected"
    assert found[2].error.startswith("a prompt has 9 tokens, but model.max_length 16 minus 8 new tokens leaves only 8")
    for i, unknown in ((4, 32), (5, -1), (6, 2**40)):
        assert found[i].error == f"a prompt has the token id {unknown}, but the model's token ids are 0 to 31"
    with pytest.raises(UserError, match="a prompt is empty"):
        tiny.sample(engine, params, given, KEY, range(7), sampling)


@pytest.mark.parametrize("prompt", [[1, 1.7], [1, float("nan")], [1, None], [1, "4"]])
def test_an_invalid_token_id_affects_no_other_prompt(params, prompt):
    found = tiny.respond(Engine(tiny.model(), 2, 16, 8), params, [[1, 7], prompt], KEY, Sampling(8, ()), range(2))
    assert len(found[0].ids) == 8
    assert found[1].ids == () and found[1].error == f"a prompt has {prompt[1]!r} among its token ids; integers are expected"


def test_prompts_can_be_arrays(params):
    engine, sampling = Engine(tiny.model(), 2, 16, 8), Sampling(8, ())
    found = (tiny.sample(engine, params, prompts, KEY, [0], sampling) for prompts in ([[1, 7]], [np.array([1, 7], np.int64)]))
    np.testing.assert_array_equal(*(rollout.tokens for rollout in found))


def test_prompts_without_row_numbers_leave_the_session_unchanged(params):
    session = Engine(tiny.model(), 2, 16, 8).start(params, [[1]], KEY, Sampling(4, ()), [0])
    with pytest.raises(ValueError, match="there are 2 prompts and 1 row numbers; one for each is expected"):
        session.submit([[], [1, 2]], [3], KEY, Sampling(4, ()))
    assert session.unfinished == 1
    session.submit([[7, 7]], [9], KEY, Sampling(4, ()))
    found = {}
    while session.unfinished:
        found |= session.step()
    assert sorted(found) == [0, 1] and not any(response.error for response in found.values())


@pytest.mark.parametrize("number", [-1, 2**31, 0.5])
def test_an_invalid_row_number_is_refused(params, number):
    with pytest.raises(UserError, match=f"a row number is {number}; an integer from 0 to 2147483647 is expected"):
        tiny.respond(Engine(tiny.model(), 2, 16, 8), params, [[1, 7]], KEY, Sampling(8, ()), [number])


def test_non_finite_logits_end_only_their_own_row(params):
    """Token 9 has an embedding of NaN, in a model with an untied head."""
    model = tiny.model(tie_embeddings=False)
    weights = model.init(jax.random.key(0))
    broken = weights | {"embedding": weights["embedding"].at[9].set(np.nan)}
    engine, sampling = Engine(model, 2, 32, 8), Sampling(8, (9,))
    prompts, rows = [[1, 7], [1, 9, 3], [1, 4], [1, 8, 8]], range(4)
    found = tiny.respond(engine, broken, prompts, KEY, sampling, rows)
    good = tiny.respond(engine, weights, prompts, KEY, sampling, rows)
    assert found[1].error == "the model's logits are not finite numbers" and found[1].ids == ()
    for i in (0, 2, 3):  # The slot of row 1 is reused without traces.
        assert found[i].ids == good[i].ids and found[i].error is None
    with pytest.raises(UserError, match="sampling of row 1: the model's logits are not finite numbers"):
        tiny.sample(engine, broken, prompts, KEY, rows, sampling)


def test_the_padding_token_affects_no_prompt(params):
    """Token 0 has an embedding of NaN and occurs in no prompt."""
    model = tiny.model(tie_embeddings=False)
    weights = model.init(jax.random.key(0))
    broken = weights | {"embedding": weights["embedding"].at[0].set(np.nan)}
    given = [[1, 7], [1, 4, 3], [1, 8, 8, 2]], KEY, Sampling(1, (9,)), range(3)
    found, good = (tiny.respond(Engine(model, 4, 32, 8), own, *given) for own in (broken, weights))
    assert [(response.ids, response.error) for response in found] == [(response.ids, None) for response in good]


def test_a_number_of_slots_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(UserError, match="sampled together is 6; the mesh splits them into 8 parts"):
        Engine(tiny.model((8, 1, 1)), 6, 32)


def test_a_bucket_of_size_0_is_refused():
    with pytest.raises(UserError, match="prompts cannot be padded to 0 tokens; at least 1 is expected"):
        Engine(tiny.model(), 2, 32, 0)


def test_stop_ids_can_be_a_list(params):
    engine, given = Engine(tiny.model(), 2, 32, 8), ([[1, 7]], KEY)
    found, expected = (tiny.respond(engine, params, *given, Sampling(8, stops), [0]) for stops in ([2, 9], (2, 9)))
    assert found == expected


@pytest.mark.medium
def test_warm_up_frees_its_copy_of_the_weights():
    """Sampling reads a copy in another dtype, which no reference cycle may keep alive."""
    model = tiny.model(compute_dtype="bfloat16")
    params = tiny.place(model, tiny.host_params())

    def there():
        return sum(x.size for x in jax.live_arrays() if x.dtype == "bfloat16")

    gc.collect()
    before = there()
    gc.disable()
    try:
        warm_up(Engine(model, 2, 32, 8), params, Sampling(8, ()), 8)
        assert there() == before
    finally:
        gc.enable()


def test_warm_up_covers_only_prompts_that_fit(params):
    """Longer ones are refused, so there is nothing to compile for them."""
    engine, sampling = Engine(tiny.model(), 2, 32, 8), Sampling(8, (2,))
    assert list(_lengths(engine.start(params, [], KEY, sampling, []), 1000)) == [8, 16, 24]


@pytest.mark.slow
def test_another_queue_and_longer_prompts_submitted_later_compile_nothing(params):
    """Queues and prompts of other lengths compile nothing after `warm_up`."""
    engine, rng, sampling = Engine(tiny.model(), 2, 96, 16), np.random.default_rng(0), Sampling(60, (2,))

    def queue(count: int, longest: int):
        prompts = [rng.integers(0, 32, rng.integers(1, longest + 1)).tolist() for _ in range(count)]
        for key in (KEY, jax.device_put(KEY, jax.devices()[0])):  # One uncommitted and one committed array.
            assert len(tiny.respond(engine, params, prompts, key, sampling, range(count))) == count

    jax.clear_caches()
    warm_up(engine, params, sampling, 32)
    SEEN.clear()
    for count, longest in ((12, 16), (5, 3), (1, 9), (2, 16), (7, 8)):
        queue(count, longest)
    session = engine.start(params, [[1, 7]] * 4, KEY, sampling, range(4))
    session.step()
    session.submit([[1, *range(3, 32)]], [4], KEY, sampling)
    assert finish(session) and SEEN == []


@pytest.mark.slow
def test_another_queue_on_a_mesh_compiles_nothing():
    """This covers programs of the session and the small programs that move arrays."""
    model, rng, sampling = tiny.model((2, 2, 2)), np.random.default_rng(0), Sampling(56, (2, 9))
    params, engine = tiny.place(model, tiny.host_params(scale=1.5)), Engine(model, 8, 96, 8)
    queues = [
        [rng.integers(0, 32, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]
        for count, shortest, longest in ((1, 1, 3), (24, 1, 16), (9, 9, 16), (5, 1, 16), (16, 3, 3))
    ]
    keys = [jax.random.key(i) for i in range(len(queues))]
    jax.clear_caches()
    warm_up(engine, params, sampling, 16)
    SEEN.clear()
    for key, prompts in zip(keys, queues, strict=True):
        assert len(tiny.respond(engine, params, prompts, key, sampling, range(len(prompts)))) == len(prompts)
    assert SEEN == []


def test_a_long_queue_holds_no_more_rows_than_slots(params):
    session = Engine(tiny.model(), 4, 32, 8).start(params, [[1, 4]] * 200, KEY, Sampling(8, tiny.STOPS), range(200))
    seen = 0
    while session.unfinished:
        seen += len(session.step())
        assert len(session.live) <= 4 and (session.tiers is None or session.layout.size <= 4)
    assert seen == 200 and session.tiers is None and not session.prefills.kept
