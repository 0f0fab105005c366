"""Generation: samples depend only on the prompt, the row number and the position."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LoraAdapters, join
from jaxalign.models.architecture import Experts
from jaxalign.rl.responses import response_stats
from jaxalign.rollout import session
from jaxalign.rollout.forecast import _Played
from jaxalign.rollout.prefills import KEPT
from jaxalign.rollout.responses import Response
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.rollout import simple

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
    return tiny.respond(engine, params, prompts, jax.random.key(key), sampling, rows)


def defined(params, sampling=SAMPLING, **changes) -> list[Response]:
    """The result by definition, without a cache."""
    found = simple.respond(tiny.model(**changes), params, tiny.PROMPTS, jax.random.key(0), sampling, ROWS)
    return [Response(ids, ids[-1] in sampling.stop_ids, sum(logprobs)) for ids, logprobs in found]


@pytest.fixture(scope="module")
def expected(params):
    return defined(params)


def ids(responses):
    return [response.ids for response in responses]


def assert_same(found, expected) -> None:
    assert ids(found) == ids(expected)
    assert [r.ended for r in found] == [r.ended for r in expected] and {r.error for r in found} == {None}
    np.testing.assert_allclose([r.logprob for r in found], [r.logprob for r in expected], atol=1e-4)
    np.testing.assert_allclose([sum(r.logprobs) for r in found], [r.logprob for r in found], atol=1e-5)
    assert all(len(r.logprobs) == len(r.versions) == len(r.ids) for r in found)


def test_the_expected_responses_are_varied(expected):
    """Some responses stop, some are truncated, and most differ; otherwise the comparisons below would show little."""
    ended = [response.ended for response in expected]
    assert any(ended) and not all(ended)
    assert len(set(ids(expected))) >= 6


@pytest.mark.medium
@pytest.mark.variants(3)
@pytest.mark.parametrize(("batch", "bucket"), [(8, 2), (1, 8), (3, 8), (8, 24)])
def test_samples_equal_the_definition(params, expected, batch, bucket):
    """With one slot prompts run one after another, with 3 slots they overlap, and with 8 all run together; buckets of 2 and 24
    give little and much padding. The sampling options below have 2 slots."""
    assert_same(respond(params, tiny.PROMPTS, ROWS, batch, bucket), expected)


@pytest.mark.variants(3)
@pytest.mark.parametrize("changes", [
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "max_new_tokens": 17, "stop_ids": ()}, {"stop_ids": tuple(range(0, 32, 3))},
    {"max_new_tokens": 1},
], ids=str)
def test_samples_equal_the_definition_for_all_sampling_options(params, changes):
    sampling = dataclasses.replace(SAMPLING, **changes)
    assert_same(respond(params, tiny.PROMPTS, ROWS, 2, sampling=sampling), defined(params, sampling))


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize("changes", [
    {"layers": 2, "window": 3, "local_layers": (True, False), "local_rope_base": 500.0, "attention_softcap": 2.0},
    {"window": 3, "experts": Experts(4, 2)},
], ids=str)
def test_samples_equal_the_definition_for_every_kind_of_layer(changes):
    """Rows outgrow the windows, and the ring wraps around."""
    model, sampling = tiny.model(**changes), dataclasses.replace(SAMPLING, max_new_tokens=17)
    params = jax.tree.map(lambda x: 1.5 * x, model.init(jax.random.key(0)))
    found = tiny.respond(Engine(model, 2, 32, 8), params, tiny.PROMPTS, jax.random.key(0), sampling, ROWS)
    assert_same(found, defined(params, sampling, **changes))


@pytest.mark.medium
def test_samples_equal_the_definition_with_adapters(params):
    plain = tiny.model()
    model = dataclasses.replace(plain, lora=LoraAdapters(2, 8.0, ("*",)))
    fresh = model.init_adapters(params, jax.random.key(1))
    moved = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(2), x.shape), fresh)
    joined = join(params, moved)
    found = tiny.respond(Engine(model, 3, 32, 8), joined, tiny.PROMPTS, jax.random.key(0), SAMPLING, ROWS)
    expected = simple.respond(model, joined, tiny.PROMPTS, jax.random.key(0), SAMPLING, ROWS)
    assert ids(found) == [ids for ids, _ in expected] != ids(respond(params, tiny.PROMPTS, ROWS))


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_a_narrower_cache_dtype_changes_log_probabilities_only_slightly(params, kept):
    """Greedy, so that the first token shows errors: keys and values have 8 bits; sums over 16 numbers have errors of 2 **
    -8."""
    model, sampling = tiny.model(cache_dtype=kept), dataclasses.replace(SAMPLING, max_new_tokens=1, temperature=0.0)
    found = tiny.respond(Engine(model, 3, 32, 8), params, tiny.PROMPTS, jax.random.key(0), sampling, ROWS)
    expected = defined(params, sampling)
    far = np.abs([a.logprob - b.logprob for a, b in zip(found, expected, strict=True)])
    assert 0 < far.max() < 0.1 and ids(found) == ids(expected)


def test_samples_do_not_depend_on_order_or_on_other_rows(params, expected):
    order = [5, 2, 7, 0]
    found = respond(params, [tiny.PROMPTS[i] for i in order], [ROWS[i] for i in order])
    assert_same(found, [expected[i] for i in order])


def test_samples_of_one_prompt_share_its_prefill(params, monkeypatch):
    """Two prompts, 6 samples of each, 4 slots: each prompt is prefilled once."""
    seen, real = [], session.prefill
    monkeypatch.setattr(session, "prefill", lambda model, params, prompts: seen.append(prompts) or real(model, params, prompts))
    prompts, rows = [[1, 4, 7]] * 6 + [[1, 9, 2]] * 6, range(12)
    found = respond(params, prompts, rows, 4)
    assert len(seen) == 2
    monkeypatch.undo()
    assert_same(found, [respond(params, [prompts[i]], [rows[i]], 1)[0] for i in range(12)])


def test_a_prompt_that_waits_for_a_slot_is_not_prefilled_again(params, monkeypatch):
    """Two alternating prompts with two slots, then more prompts than the engine keeps."""
    seen, real = [], session.prefill
    monkeypatch.setattr(session, "prefill", lambda model, params, prompts: seen.append(prompts) or real(model, params, prompts))
    work = Engine(tiny.model(), 2, 32, 8).start(params, [], jax.random.key(0), SAMPLING, [])
    for row in range(0, 10, 2):
        work.submit([[1, 4, 7], [1, 9, 2]], [row, row + 1], jax.random.key(0), SAMPLING)
    answered = []
    while work.unfinished:
        answered += work.step()
        assert len(work.prefills.kept) <= 2
    assert len(seen) == 2 and len(answered) == 10 and not work.prefills.kept
    for row in range(2):
        work.submit([[1, token] for token in range(3, 12)], range(9 * row, 9 * row + 9), jax.random.key(0), SAMPLING)
    while work.unfinished:
        answered += work.step()
        assert len(work.prefills.kept) <= KEPT
    assert len(answered) == 28 and not work.prefills.kept


@pytest.mark.parametrize("mesh", [(4, 1, 2), (8, 1, 1)])
def test_a_group_is_prefilled_once_per_batch_shard(mesh):
    """32 prompts, 8 samples of each; only the host's part of the work, without a device."""
    class Counted(_Played):
        def _prefill(self, fresh):
            again = [(part, prompt) for part, prompts in enumerate(fresh) for prompt in prompts]
            repeated.extend(set(seen) & set(again))
            seen.extend(again)
            super()._prefill(fresh)

    model, seen, repeated = tiny.model(mesh), [], []
    key, sampling = jax.random.key(0), Sampling(32, (9,))
    work = Counted(Engine(model, 32, 64, 16).start(model.abstract(), [], key, sampling, []))
    prompts = [[1, *map(int, digits)] for digits in itertools.product("3456", "78", "3579")]
    work.submit([prompt for prompt in prompts for _ in range(8)], range(8 * len(prompts)), key, sampling)
    while work.unfinished:
        work.step()
    assert len(prompts) == 32 and len(set(seen)) >= 32 and not repeated


@pytest.mark.parametrize("mesh", [(2, 2, 2), (8, 1, 1)])
def test_samples_do_not_depend_on_the_mesh(params, mesh):
    """Three rounds of 8 slots, with prompts of several lengths."""
    prompts, rows = tiny.PROMPTS * 3, range(24)
    assert ids(respond(params, prompts, rows, mesh=mesh)) == ids(respond(params, prompts, rows))


def test_samples_depend_on_the_row_and_on_the_key(params):
    same = [[1, 4]] * 8
    found = ids(respond(params, same, ROWS))
    assert len(set(found)) == 8
    assert ids(respond(params, same[:1], [40])) == found[:1]
    assert not set(ids(respond(params, same, ROWS, key=1))) & set(found)


def full_logits(model, params, tokens):
    """Logits after the last of `tokens`, by a forward pass of the whole row without a cache, padded to one shape."""
    row = np.zeros((1, 24), np.int32)
    row[0, : len(tokens)] = tokens
    hidden = _forward(model, params, row)[0, len(tokens) - 1]
    return np.asarray(hidden) @ np.asarray(params["embedding"]).T


_forward = jax.jit(lambda model, params, row: model.hidden(params, row), static_argnums=0)


def test_greedy_equals_argmax_of_full_forward_passes(params):
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
    return tiny.to_host(tiny.sample(engine, params, prompts, jax.random.key(0), rows, sampling))


def test_any_stop_id_ends_a_response_and_is_part_of_it(params):
    free = rollout(params, dataclasses.replace(SAMPLING, stop_ids=()))
    assert not free.ended.any() and (free.response_length == N).all()
    found = rollout(params, SAMPLING)
    for row, prompt in enumerate(tiny.PROMPTS):
        unstopped = free.tokens[row, len(prompt) : len(prompt) + N]
        places = [n for n in range(N) if unstopped[n] in tiny.STOPS]
        length = places[0] + 1 if places else N
        assert found.ended[row] == bool(places) and found.response_length[row] == length
        # Prompt, response and padding have no gaps between them; tokens before the stop equal those sampled without a stop.
        np.testing.assert_array_equal(found.tokens[row, : len(prompt)], prompt)
        np.testing.assert_array_equal(found.tokens[row, len(prompt) : len(prompt) + length], unstopped[:length])
        assert not found.tokens[row, len(prompt) + length :].any()
        np.testing.assert_allclose(found.logprobs[row, :length], free.logprobs[row, :length], atol=3e-6)
        assert not found.logprobs[row, length:].any()
    last = found.tokens[np.arange(8), found.prompt_length + found.response_length - 1]
    assert len(set(last[found.ended])) > 1, "only one id of the stop set was met; choose others"


def test_id_0_can_be_sampled_and_can_be_a_stop(params):
    """Padding is 0 as well; lengths distinguish the two."""
    free = rollout(params, dataclasses.replace(SAMPLING, stop_ids=()), [[1, 4]] * 8, range(8))
    rows, places = np.nonzero(free.tokens[:, 2 : 2 + N] == 0)
    assert len(rows), "no row sampled id 0; choose other rows"
    found = rollout(params, dataclasses.replace(SAMPLING, stop_ids=(0,)), [[1, 4]] * 8, range(8))
    for row in range(8):
        first = places[rows == row].min() + 1 if (rows == row).any() else N
        assert found.response_length[row] == first and found.ended[row] == (rows == row).any()


def test_padding_rows_are_empty(params, expected):
    found = rollout(params, SAMPLING, tiny.PROMPTS[:3], ROWS[:3])
    np.testing.assert_array_equal(found.prompt_length, [3, 2, 7, 0, 0, 0, 0, 0])
    assert not found.response_length[3:].any() and not found.tokens[3:].any() and not found.logprobs[3:].any()
    assert (found.response_length[:3] > 0).all()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.0, 5, 0.8), (1.3, 5, 0.8)])
def test_log_probabilities_of_sampler_and_trainer_agree(params, temperature, top_k, top_p):
    """Token by token, for prompts and responses of several lengths; filters do not change log-probabilities."""
    sampled = rollout(params, dataclasses.replace(SAMPLING, temperature=temperature, top_k=top_k, top_p=top_p))
    stats = jax.jit(response_stats, static_argnums=(0, 3))(tiny.model(), params, sampled, temperature)
    inside = np.arange(N)[None] < sampled.response_length[:, None]
    np.testing.assert_allclose(np.where(inside, stats.logprobs, 0), sampled.logprobs, atol=1e-5)
    assert (sampled.logprobs[inside] < 0).all()


def test_an_empty_queue_has_no_responses(params):
    assert respond(params, [], []) == []
    rollout = tiny.sample(Engine(tiny.model(), 3, 32, 8), params, [], jax.random.key(0), [], SAMPLING)
    assert rollout.tokens.shape[0] == len(rollout.prompt_length) == 0 and rollout.logprobs.shape == (0, N)


def test_the_callback_gets_each_response_when_it_ends(params, expected):
    seen = []
    engine = Engine(tiny.model(), 3, 32, 8)
    tiny.respond(engine, params, tiny.PROMPTS, jax.random.key(0), SAMPLING, ROWS, seen.append)
    assert len(seen) > 2 and all(seen)
    finished = sorted((index, response.ids) for ended in seen for index, response in ended)
    assert finished == [(index, response.ids) for index, response in enumerate(expected)]


def test_a_prompt_that_leaves_no_space_for_new_tokens_is_reported_in_one_sentence(params):
    engine = Engine(tiny.model(), 2, 16, 8)
    tokens, length = engine.padding.prompts([[1] * 8, [1, 2]], N)
    assert tokens.shape == (2, 8) and length.tolist() == [8, 2]
    message = "a prompt has 9 tokens, but model.max_length 16 minus 8 new tokens leaves only 8"
    with pytest.raises(UserError, match=message):
        engine.padding.prompts([[1, 2], [1] * 9], N)
    with pytest.raises(UserError, match="a prompt is empty"):
        engine.padding.prompts([[1, 2], []], N)


def test_a_rollout_has_rows_for_any_number_of_prompts(params):
    """They are padded to a multiple of the slots, so that later programs see few shapes."""
    engine = Engine(tiny.model(), 3, 32, 8)
    found = tiny.sample(engine, params, tiny.PROMPTS, jax.random.key(0), ROWS, SAMPLING)
    whole = rollout(params, SAMPLING)
    assert found.tokens.shape == (9, 16) and isinstance(found.tokens, np.ndarray)
    for name in ("tokens", "prompt_length", "response_length", "ended"):
        np.testing.assert_array_equal(getattr(found, name)[:8], getattr(whole, name))
    np.testing.assert_allclose(found.logprobs[:8], whole.logprobs, atol=1e-5)


def test_prompts_are_padded_to_a_multiple_of_the_bucket_within_the_limit():
    engine = Engine(tiny.model(), 4, 30, 8)
    assert engine.padding.prompts([[1] * 9], 8)[0].shape == (4, 16)
    assert engine.padding.prompts([[1] * 17], 8)[0].shape == (4, 22)
