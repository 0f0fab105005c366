"""Sampling filters against numpy, keys by position, log-probabilities at the sampling temperature."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rollout.sampling import Sampling, Variant, draw, filter_logits, sample, unpack
from tests.rollout.simple import row_keys, settings

V = 10
LOGITS = np.random.default_rng(0).normal(size=(6, V)).astype(np.float32) * 2


def filtered(logits, top_k, top_p):
    """`filter_logits` with the same top-k and top-p for each row."""
    (rows, variant), logits = settings(Sampling(8, (), 1.0, top_k, top_p), len(logits)), jnp.asarray(logits)
    return np.asarray(filter_logits(logits, rows.top_k, rows.top_p, variant.largest_k, variant.top_p))


def numpy_filter(logits, top_k, top_p):
    """Mark the tokens that stay: of the k likeliest, the fewest whose probability among those k reaches top_p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[:top_k] if top_k else order
    weights = np.exp(logits[order].astype(np.float64))
    stay, total = [], 0.0
    for i, weight in zip(order, weights / weights.sum(), strict=True):
        if total >= top_p:
            break
        stay.append(i)
        total += weight
    return set(stay)


@pytest.mark.parametrize("top_k", [0, 1, 3, V, V + 5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
def test_filters_equal_numpy(top_k, top_p):
    found = filtered(LOGITS, top_k, top_p)
    for row in range(len(LOGITS)):
        assert set(np.flatnonzero(np.isfinite(found[row]))) == numpy_filter(LOGITS[row], top_k, top_p)
        kept = np.isfinite(found[row])
        np.testing.assert_array_equal(found[row][kept], LOGITS[row][kept])


def test_tied_tokens_are_kept_or_dropped_together():
    tied = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
    np.testing.assert_array_equal(np.isfinite(filtered(tied, 2, 1.0))[0], [True, True, True, True])
    np.testing.assert_array_equal(np.isfinite(filtered(tied, 0, 0.5))[0], [True, True, True, True])
    np.testing.assert_array_equal(np.isfinite(filtered(tied, 0, 0.3))[0], [True, False, False, False])


def draws(sampling, count=4000):
    """Return tokens and log-probabilities of `count` rows with the same logits."""
    logits = jnp.broadcast_to(LOGITS[0][None], (count, V))
    keys = row_keys(jax.random.key(3), jnp.arange(count))
    fn = jax.jit(sample, static_argnums=4)
    return (np.asarray(x) for x in fn(logits, keys, jnp.full(count, 4, jnp.int32), *settings(sampling, count)))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 4, 1.0), (1.0, 0, 0.8)]
)
def test_frequencies_and_log_probabilities(temperature, top_k, top_p):
    """Frequencies follow the filtered softmax. Log-probs are those of the unfiltered softmax at the temperature, as the trainer
    computes them for policy and reference."""
    scaled = LOGITS[0].astype(np.float64) / temperature
    tokens, logprobs = draws(Sampling(8, (2,), temperature, top_k, top_p))
    probability = np.exp(scaled) / np.exp(scaled).sum()
    np.testing.assert_allclose(logprobs, np.log(probability)[tokens], atol=1e-5)
    stay = numpy_filter(scaled, top_k, top_p)
    kept = np.array([p if i in stay else 0.0 for i, p in enumerate(probability)])
    kept /= kept.sum()
    frequency = np.bincount(tokens, minlength=V) / len(tokens)
    # Five standard deviations of a binomial share; filtered tokens never occur.
    assert (np.abs(frequency - kept) <= 5 * np.sqrt(kept * (1 - kept) / len(tokens))).all()


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1000])
def test_any_vocabulary_size_is_sampled_by_its_probabilities(vocab):
    """Half of the probability is on the last token and the rest uniform; every third token is filtered. Five standard
    deviations."""
    count, logits = 4000, np.zeros(vocab, np.float32)
    logits[::3] = -np.inf
    logits[-1] = np.log(max(1, np.isfinite(logits[:-1]).sum()))
    keys = row_keys(jax.random.key(1), jnp.arange(count))
    tokens = np.asarray(jax.jit(draw)(jnp.broadcast_to(logits[None], (count, vocab)), keys))
    assert np.isfinite(logits[tokens]).all()
    assert abs((tokens == vocab - 1).mean() - (0.5 if vocab > 1 else 1)) <= 5 * 0.5 / np.sqrt(count)
    others = tokens[tokens < vocab - 1]
    for low, high in ((0, vocab // 2), (vocab // 2, vocab - 1)):
        share = np.isfinite(logits[low:high]).sum() / max(1, np.isfinite(logits[:-1]).sum())
        found = ((others >= low) & (others < high)).mean() if len(others) else share
        assert abs(found - share) <= 5 * np.sqrt(share * (1 - share) / max(1, len(others)))


@pytest.mark.medium
def test_each_row_has_its_own_settings():
    """Rows with different temperature, top-k and top-p draw the tokens that they draw in a batch with equal settings."""
    rows = [Sampling(8, (), *row) for row in ((0.0,), (1.0,), (1.5, 3), (0.7, 0, 0.8), (1.0, 5, 0.5), (1.0, V + 5))]
    keys, positions = row_keys(jax.random.key(2), jnp.arange(len(rows))), jnp.arange(len(rows))
    singles, variants = zip(*(settings(row, len(rows)) for row in rows), strict=True)
    mixed = jax.tree.map(lambda *x: jnp.stack([part[i] for i, part in enumerate(x)]), *singles)
    every = functools.reduce(Variant.joined, variants)
    assert every == Variant("threefry2x32", True, True, 16, True)
    for seed in range(20):
        logits = jnp.asarray(np.random.default_rng(seed).normal(size=(len(rows), V)).astype(np.float32) * 2)
        found = sample(logits, keys, positions, mixed, every)
        for i, (single, variant) in enumerate(zip(singles, variants, strict=True)):
            expected = sample(logits, keys, positions, single, variant)
            assert [np.asarray(x)[i] for x in found] == [np.asarray(x)[i] for x in expected]


def test_settings_and_keys_survive_packing():
    rows = [Sampling(8, (2, 9), 0.7, 40, 0.9), Sampling(8, ()), Sampling(8, (5,), 0.0)]
    keys = [jax.random.key(seed) for seed in range(3)]
    packed = [row.packed(key) for row, key in zip(rows, keys, strict=True)]
    columns = [np.pad(column, (0, len(packed[0]) - len(column)), constant_values=-1) for column in packed]
    found = unpack(jnp.asarray(np.stack(columns, axis=1)), "threefry2x32")
    np.testing.assert_array_equal(found.temperature, np.float32([0.7, 1, 0]))
    np.testing.assert_array_equal(found.top_k, [40, 0, 0])
    np.testing.assert_array_equal(found.top_p, np.float32([0.9, 1, 1]))
    np.testing.assert_array_equal(found.stop_ids, [[2, -1, 5], [9, -1, -1]])
    assert all(found.keys[i] == key for i, key in enumerate(keys))


def test_greedy_takes_the_likeliest_token_with_its_log_probability_at_temperature_1():
    sampling = Sampling(8, (2,), 0.0)
    keys = row_keys(jax.random.key(0), jnp.arange(6))
    tokens, logprobs = sample(jnp.asarray(LOGITS), keys, jnp.zeros(6, jnp.int32), *settings(sampling, 6))
    np.testing.assert_array_equal(tokens, LOGITS.argmax(-1))
    expected = LOGITS.max(-1) - np.log(np.exp(LOGITS).sum(-1))
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_the_noise_depends_only_on_key_row_and_position():
    """With equal logits the token shows the noise: it is the same exactly if (key, row, position) is the same."""
    @functools.partial(jax.jit, static_argnums=4)
    def drawn(key, rows, positions, mine, variant):
        return sample(jnp.zeros((len(rows), 1000)), row_keys(jax.random.key(key), rows), positions, mine, variant)[0]

    def tokens(key, rows, positions):
        mine = settings(Sampling(8, (2,)), len(rows))
        return np.asarray(drawn(key, np.asarray(rows), np.asarray(positions), *mine))

    first = tokens(0, [5, 6, 7, 8], [3, 3, 4, 4])
    assert len(set(first)) == 4
    np.testing.assert_array_equal(tokens(0, [8, 5], [4, 3]), [first[3], first[0]])
    assert tokens(1, [5], [3]) != first[0]


@pytest.mark.parametrize(("changes", "message"), [
    ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"), ({"temperature": -1.0}, "temperature is -1.0; 0"),
    ({"temperature": float("nan")}, "temperature is nan; a finite number"),
    ({"temperature": 1e-40}, "temperature is 1e-40, which float32"),
    ({"stop_ids": (2**31,)}, "stop_ids has 2147483648; token ids"),
    ({"top_k": -2}, "top_k is -2; it must be at least 0"), ({"top_p": 0.0}, "top_p is 0.0; a number in"),
    ({"top_p": 1.5}, "top_p is 1.5; a number in"),
])
def test_settings_out_of_range_are_reported_in_one_sentence(changes, message):
    with pytest.raises(UserError, match=message):
        Sampling(**{"max_new_tokens": 8, "stop_ids": (2,)} | changes)
