"""Experience made from a rollout, against numpy loops over full logits."""

from __future__ import annotations

import numpy as np
import pytest

from jaxalign.rl.responses import response_mask
from tests import tiny

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module", params=[{}, {"temperature": 0.7, "kl_estimator": "k3", "missing_eos": "penalty",
                                             "missing_eos_value": 0.5, "gamma": 0.9, "score_clip": 1.0}])
def made(request):
    """Return (setup, rollout, experience, metrics), with a reference that differs from the policy."""
    setup = tiny.setup(**request.param)
    state, frozen = tiny.state(setup), tiny.roles(setup, reference_seed=1)
    sampled = tiny.rollout(setup, state.policy.params)
    experience, metrics = tiny.experience(setup, state, frozen, sampled)
    return setup, tiny.to_host(sampled), tiny.to_host(experience), tiny.to_host(metrics)


def response(sampled, row):
    """Return (ids of prompt and response, start of the response)."""
    start, count = sampled.prompt_length[row], sampled.response_length[row]
    return sampled.tokens[row, : start + count], start


def numpy_logprobs(setup, params, ids, start):
    """log p of every response token, from the logits of the whole row at the sampling temperature, in float64."""
    hidden = tiny.hidden(setup.policy, params, ids).astype(np.float64)
    logits = hidden @ params["embedding"].T / setup.config.temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.array([logp[t - 1, ids[t]] for t in range(start, len(ids))])


def test_the_rollout_has_ended_and_truncated_responses(made):
    _, sampled, _, _ = made
    assert sampled.ended.any() and not sampled.ended.all()


def test_everything_equals_a_loop(made):
    setup, sampled, experience, metrics = made
    config, N = setup.config, setup.config.max_new_tokens
    reference_params = tiny.host_params(seed=1)
    critic, preference = tiny.host_params("scalar", seed=3), tiny.host_params("scalar", seed=5)
    scores, totals, kls = [], [], []
    for row in range(8):
        ids, start = response(sampled, row)
        count = len(ids) - start
        reference = numpy_logprobs(setup, reference_params, ids, start)
        values = (tiny.hidden(setup.critic, critic, ids) @ critic["score"])[start - 1 : -1]
        score = tiny.hidden(setup.critic, preference, ids)[-1] @ preference["score"]
        score = (score - 0.1) / 0.5
        score = score if config.score_clip is None else np.clip(score, -config.score_clip, config.score_clip)
        scores.append(score)
        if not sampled.ended[row]:
            score = {"replace": -1.0, "penalty": score - 0.5}[config.missing_eos]
        d = sampled.logprobs[row, :count].astype(np.float64) - reference
        kl = d if config.kl_estimator == "k1" else np.exp(-d) - 1 + d
        rewards = -0.05 * kl
        rewards[-1] += score
        advantages, carried = np.zeros(count), 0.0
        for t in reversed(range(count)):
            after = values[t + 1] if t + 1 < count else 0.0
            carried = rewards[t] + config.gamma * after - values[t] + config.gamma * config.lam * carried
            advantages[t] = carried
        expected = {"reference_logprobs": reference, "values": values, "rewards": rewards, "advantages": advantages,
                    "returns": advantages + values}
        for name, numbers in expected.items():
            found = getattr(experience, name)[row]
            np.testing.assert_allclose(found[:count], numbers, atol=3e-5, err_msg=name)
            assert found.shape == (N,) and not found[count:].any(), name
        totals.append(rewards.sum())
        kls.append(d.sum())
    assert metrics.score == pytest.approx(np.mean(scores), abs=1e-4)
    assert metrics.score_std == pytest.approx(np.std(scores), abs=1e-4)
    assert metrics.reward == pytest.approx(np.mean(totals), abs=1e-4)
    assert metrics.kl_k1 == pytest.approx(np.mean(kls), abs=1e-4)
    assert metrics.response_length == sampled.response_length.mean()
    assert metrics.eos_rate == sampled.ended.mean()
    assert metrics.score_changed == 1 - sampled.ended.mean() > 0  # ppo.missing_eos is "replace".
    assert metrics.tokens == sampled.response_length.sum()


def test_the_mask_comes_from_lengths(made):
    _, sampled, _, _ = made
    mask = np.asarray(response_mask(sampled))
    np.testing.assert_array_equal(mask.sum(1), sampled.response_length)
    assert (np.diff(mask, axis=1) <= 0).all()


def test_log_probabilities_of_the_sampler_are_kept_or_recomputed_as_configured():
    setup = tiny.setup()
    state, frozen = tiny.state(setup), tiny.roles(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    off = tiny.to_host(sampled)
    off = type(off)(off.tokens, off.prompt_length, off.response_length, off.logprobs - 0.25, off.ended)
    kept, _ = tiny.experience(setup, state, frozen, off)
    np.testing.assert_array_equal(kept.rollout.logprobs, off.logprobs)
    again, metrics = tiny.experience(setup, state, frozen, off, recompute=True)
    np.testing.assert_allclose(again.rollout.logprobs, sampled.logprobs, atol=1e-5)
    assert abs(float(metrics.kl_k1)) < 1e-4  # the reference has the weights of the policy
