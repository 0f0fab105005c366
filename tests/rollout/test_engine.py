"""Generation: what is sampled hangs on the prompt, the row number and the position, and on nothing else."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rollout.engine import Engine, generate
from jaxalign.rollout.sampling import Sampling
from jaxalign.training.experience import response_stats
from tests import tiny

N = 8
ROWS = [40, 3, 17, 8, 900, 21, 5, 66]
SAMPLING = Sampling(N, tiny.STOPS)


@pytest.fixture(scope="module")
def params():
    return tiny.place(tiny.model(), tiny.host_params(scale=1.5))


def respond(params, prompts, rows, batch=8, bucket=8, sampling=SAMPLING, mesh=None, key=0):
    engine = Engine(tiny.model(mesh), batch, 32, bucket)
    if mesh is not None:
        params = tiny.place(engine.model, tiny.host_params(scale=1.5))
    return engine.respond(params, prompts, jax.random.key(key), sampling, rows)


@pytest.fixture(scope="module")
def expected(params):
    return respond(params, tiny.PROMPTS, ROWS)


def ids(responses):
    return [response.ids for response in responses]


def test_the_setting_is_telling(expected):
    """Some responses stop, some are cut, and most differ; so the comparisons below compare something."""
    ended = [response.ended for response in expected]
    assert any(ended) and not all(ended)
    assert len(set(ids(expected))) >= 7


@pytest.mark.parametrize(("batch", "bucket"), [(1, 8), (3, 8), (8, 2), (8, 24)])
def test_samples_do_not_depend_on_batch_size_or_padding(params, expected, batch, bucket):
    """Batches of 1 are prompts taken one by one; buckets of 2 and 24 pad them little and much."""
    found = respond(params, tiny.PROMPTS, ROWS, batch, bucket)
    assert ids(found) == ids(expected)
    np.testing.assert_allclose([r.logprob for r in found], [r.logprob for r in expected], atol=1e-4)


def test_samples_do_not_depend_on_order_or_company(params, expected):
    order = [5, 2, 7, 0]
    found = respond(params, [tiny.PROMPTS[i] for i in order], [ROWS[i] for i in order])
    assert found == [expected[i] for i in order]


@pytest.mark.parametrize("mesh", [(2, 2, 2), (8, 1, 1)])
def test_samples_do_not_depend_on_the_mesh(params, expected, mesh):
    assert ids(respond(params, tiny.PROMPTS, ROWS, mesh=mesh)) == ids(expected)


def test_samples_depend_on_the_row_and_on_the_key(params):
    same = [[1, 4]] * 8
    found = ids(respond(params, same, ROWS))
    assert len(set(found)) == 8
    assert ids(respond(params, same, [40] * 8)) == [found[0]] * 8
    assert not set(ids(respond(params, same, ROWS, key=1))) & set(found)


def full_logits(model, params, tokens):
    """Logits after the last of `tokens`, by a forward of the whole row without a cache; padded to one shape."""
    row = np.zeros((1, 24), np.int32)
    row[0, : len(tokens)] = tokens
    hidden = _forward(model, params, row)[0, len(tokens) - 1]
    return np.asarray(hidden) @ np.asarray(params["embedding"]).T


_forward = jax.jit(lambda model, params, row: model.hidden(params, row), static_argnums=0)


def test_greedy_equals_argmax_over_full_forwards(params):
    model = tiny.model()
    found = respond(params, tiny.PROMPTS, ROWS, sampling=dataclasses.replace(SAMPLING, temperature=0.0))
    for prompt, response in zip(tiny.PROMPTS, found, strict=True):
        tokens, logprob = list(prompt), 0.0
        for _ in range(N):
            logits = full_logits(model, params, tokens).astype(np.float64)
            tokens.append(int(logits.argmax()))
            logprob += logits.max() - np.log(np.exp(logits).sum())
            if tokens[-1] in tiny.STOPS:
                break
        assert response.ids == tuple(tokens[len(prompt) :])
        assert response.ended == (tokens[-1] in tiny.STOPS)
        assert response.logprob == pytest.approx(logprob, abs=1e-4)


def rollout(params, sampling, prompts=tiny.PROMPTS, rows=ROWS):
    engine = Engine(tiny.model(), 8, 32, 8)
    return tiny.to_host(engine.rollout(params, prompts, jax.random.key(0), rows, sampling))


def test_any_id_of_the_stop_set_ends_a_response_and_stays_in_it(params):
    free = rollout(params, dataclasses.replace(SAMPLING, stop_ids=()))
    assert not free.ended.any() and (free.response_length == N).all()
    found = rollout(params, SAMPLING)
    for row, prompt in enumerate(tiny.PROMPTS):
        unstopped = free.tokens[row, len(prompt) : len(prompt) + N]
        places = [n for n in range(N) if unstopped[n] in tiny.STOPS]
        length = places[0] + 1 if places else N
        assert found.ended[row] == bool(places) and found.response_length[row] == length
        # Prompt, response, padding, without a gap; what was sampled before the stop is what was sampled without it.
        np.testing.assert_array_equal(found.tokens[row, : len(prompt)], prompt)
        np.testing.assert_array_equal(found.tokens[row, len(prompt) : len(prompt) + length], unstopped[:length])
        assert not found.tokens[row, len(prompt) + length :].any()
        np.testing.assert_allclose(found.logprobs[row, :length], free.logprobs[row, :length], atol=1e-6)
        assert not found.logprobs[row, length:].any()
    last = found.tokens[np.arange(8), found.prompt_length + found.response_length - 1]
    assert len(set(last[found.ended])) > 1, "only one id of the stop set was met; choose others"


def test_id_0_can_be_sampled_and_can_be_a_stop(params):
    """0 fills the padding too; lengths keep them apart."""
    free = rollout(params, dataclasses.replace(SAMPLING, stop_ids=()), [[1, 4]] * 8, range(8))
    rows, places = np.nonzero(free.tokens[:, 2 : 2 + N] == 0)
    assert len(rows), "no row sampled id 0; choose other rows"
    found = rollout(params, dataclasses.replace(SAMPLING, stop_ids=(0,)), [[1, 4]] * 8, range(8))
    for row in range(8):
        first = places[rows == row].min() + 1 if (rows == row).any() else N
        assert found.response_length[row] == first and found.ended[row] == (rows == row).any()


def test_rows_that_only_fill_the_batch_are_empty(params, expected):
    found = rollout(params, SAMPLING, tiny.PROMPTS[:3], ROWS[:3])
    np.testing.assert_array_equal(found.prompt_length, [3, 2, 7, 0, 0, 0, 0, 0])
    assert not found.response_length[3:].any() and not found.tokens[3:].any() and not found.logprobs[3:].any()
    assert (found.response_length[:3] > 0).all()


def test_rows_that_only_fill_the_batch_keep_nothing_running(params):
    """Were they waited for, generation would go on to the last token after all others have stopped."""
    everything = tuple(range(32))
    prompts = np.zeros((8, 8), np.int32)
    prompts[0, :2] = 1
    length = np.array([2] + [0] * 7, np.int32)
    sampling = dataclasses.replace(SAMPLING, stop_ids=everything)
    found = generate(tiny.model(), params, prompts, length, jax.random.key(0), jnp.arange(8), sampling)
    assert found.response_length.tolist() == [1] + [0] * 7 and bool(found.ended[0])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 0.8)])
def test_the_samplers_log_probabilities_are_the_trainers(params, temperature, top_k, top_p):
    """Token by token, with ragged prompts and responses; filters do not change what a log-probability means."""
    sampled = rollout(params, dataclasses.replace(SAMPLING, temperature=temperature, top_k=top_k, top_p=top_p))
    stats = jax.jit(response_stats, static_argnums=(0, 3))(tiny.model(), params, sampled, temperature)
    inside = np.arange(N)[None] < sampled.response_length[:, None]
    np.testing.assert_allclose(np.where(inside, stats.logprobs, 0), sampled.logprobs, atol=1e-5)
    assert (sampled.logprobs[inside] < 0).all()


def test_one_new_token(params):
    found = rollout(params, dataclasses.replace(SAMPLING, max_new_tokens=1))
    assert found.logprobs.shape == (8, 1) and (found.response_length == 1).all()


def test_an_empty_queue_has_no_responses(params):
    assert respond(params, [], []) == []


def test_progress_counts_rows_and_tokens(params, expected):
    seen = []
    engine = Engine(tiny.model(), 3, 32, 8)
    engine.respond(params, tiny.PROMPTS, jax.random.key(0), SAMPLING, ROWS, lambda *counts: seen.append(counts))
    assert [rows for rows, _ in seen] == [3, 3, 2]
    assert sum(tokens for _, tokens in seen) == sum(len(response.ids) for response in expected)


def test_a_prompt_that_leaves_no_room_is_a_sentence(params):
    engine = Engine(tiny.model(), 2, 16, 8)
    tokens, length = engine.pad([[1] * 8, [1, 2]], N)
    assert tokens.shape == (2, 8) and length.tolist() == [8, 2]
    message = "a prompt has 9 tokens, but model.max_length 16 less 8 new tokens leaves room for 8"
    with pytest.raises(UserError, match=message):
        engine.pad([[1, 2], [1] * 9], N)
    with pytest.raises(UserError, match="a prompt is empty"):
        engine.pad([[1, 2], []], N)


def test_prompts_are_padded_to_a_multiple_of_the_bucket_within_the_limit():
    engine = Engine(tiny.model(), 4, 30, 8)
    assert engine.pad([[1] * 9], 8)[0].shape == (4, 16)
    assert engine.pad([[1] * 17], 8)[0].shape == (4, 22)
