"""Variants of PPO in the same step: advantages from groups, other losses, KL in the loss, and no critic."""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxalign.algorithms.masked import whiten
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.records import Experience, Rollout
from jaxalign.rewards.base import Scored
from jaxalign.rewards.scorer import rollout_scores
from jaxalign.rl.experience import greedy_baseline, make_experience
from jaxalign.rl.iteration import Iteration
from jaxalign.rl.losses import joint_loss, policy_loss, totals, value_loss
from jaxalign.rl.metrics import IterationMetrics, UpdateMetrics
from jaxalign.rl.state import abstract_ppo_state, init_ppo_state
from jaxalign.rl.update import iteration_metrics, minibatch_update, minibatches, ppo_update
from jaxalign.steps.packed import pack_answers, place_parts, rows_split
from jaxalign.tracking.alerts import alerts_of
from jaxalign.tracking.metrics import by_name
from tests import tiny

pytestmark = pytest.mark.medium

SGD = optax.sgd(1.0)
VARIANTS = {
    "grpo": {"advantages": "grpo", "group_size": 4, "kl_in": "loss", "kl_estimator": "k3", "whiten_advantages": False,
             "aggregation": "sequence_mean_token_mean", "kl_controller": "adaptive"},
    "dr_grpo": {"advantages": "grpo", "group_size": 4, "group_scale": "none", "whiten_advantages": False,
                "aggregation": "token_sum_constant"},
    "dapo": {"advantages": "grpo", "group_size": 2, "clip_high": 0.28, "skip_equal_groups": True, "overlong_buffer": 4,
             "kl_coef": 0.0, "whiten_advantages": False},
    "rloo": {"advantages": "rloo", "group_size": 2, "policy_loss": "plain", "aggregation": "sequence_mean_token_sum"},
    "reinforce_pp": {"advantages": "reinforce_pp", "whiten_advantages": False, "kl_estimator": "full"},
    "reinforce": {"advantages": "reinforce", "policy_loss": "plain", "value_loss": "huber", "entropy_coef": 0.01},
}
# Each loss, aggregation, KL in the loss, kind of critic and correction is part of one of these updates.
UPDATES = {
    "gspo": {"advantages": "grpo", "group_size": 4, "policy_loss": "gspo", "clip": 3e-4, "clip_high": 4e-4, "kl_in": "loss",
             "kl_estimator": "k3", "whiten_advantages": False, "aggregation": "sequence_mean_token_mean"},
    "cispo": {"advantages": "grpo", "group_size": 4, "group_scale": "none", "policy_loss": "cispo", "clip": 1.0,
              "clip_high": 4.0, "whiten_advantages": False, "aggregation": "token_sum_constant"},
    "plain": {"advantages": "reinforce", "policy_loss": "plain", "value_loss": "huber", "entropy_coef": 0.01,
              "aggregation": "sequence_mean_token_sum"},
    "shared": {"kl_in": "loss", "kl_estimator": "full", "critic": "shared", "value_coef": 0.5, "dual_clip": 3.0,
               "clip_high": 0.28, "sampler_correction": "truncate", "correction_cap": 1.01},
}
VARIANTS |= UPDATES


def start(setup):
    """The initial weights of the policy, with the value head if the critic is shared."""
    return tiny.host_params() | ({"score": tiny.host_params("scalar", seed=3)["score"]} if setup.shares_trunk else {})


def fresh(setup):
    own = setup.has_critic and not setup.shares_trunk
    critic = tiny.place(setup.critic, tiny.host_params("scalar", seed=3)) if own else None
    return init_ppo_state(setup, tiny.place(setup.policy, start(setup)), critic, jax.random.key(11))


def collected(setup):
    """Return (state, experience, metrics) of one rollout scored by a preference model; the reference is another model."""
    state, frozen = fresh(setup), tiny.roles(setup, reference_seed=1)
    return state, *tiny.experience(setup, state, frozen, tiny.rollout(setup, state.policy.params))


def other(setup):
    """The parameters of the reference, which is another model, if the update reads them."""
    return tiny.roles(setup, reference_seed=1).reference if setup.loss_reads_reference else None


def packed(setup, experience, rows: int):
    """Pack the valid rows into parts with the given number of rows."""
    B, sharding = len(experience.weight), setup.policy.sharding
    own = experience.rollout
    given = own.tokens, own.prompt_length, own.response_length
    plan = pack_answers(*given, [np.arange(B)], experience.weight > 0, rows, -(-B // rows), rows_split(sharding)[0])
    assert int(plan.count[0]) > 1
    return place_parts(sharding, jax.tree.map(lambda x: x[0], plan))


def gradients(setup, experience, rows=None):
    """Return (the policy's gradient, the critic's gradient, metrics) of one minibatch, packed into parts with the given number
    of rows or unpacked."""
    setup = dataclasses.replace(setup, policy_optimizer=SGD, critic_optimizer=SGD)
    state, parts = fresh(setup), None if rows is None else packed(setup, experience, rows)
    policy, critic, metrics = jax.jit(minibatch_update, static_argnums=0, compiler_options=tiny.COMPILE_FAST)(
        setup, state.policy, state.critic, tiny.rows(setup.policy, experience), state.kl_coef, reference_params=other(setup),
        packed=parts,
    )
    learnt = jax.tree.map(np.subtract, start(setup), tiny.to_host(policy.params))
    if critic is not None:
        critic = jax.tree.map(np.subtract, tiny.host_params("scalar", seed=3), tiny.to_host(critic.params))
    return learnt, critic, tiny.to_host(metrics)


def filled(made: Experience, experience: Experience) -> Experience:
    """`made` with those parts that only a critic or a correction needs from `experience`, so that all updates with one setup
    share a program. An update without a critic or a correction does not read them."""
    parts = {name: getattr(experience, name) for name in ("values", "returns", "importance")}
    return dataclasses.replace(made, **{name: value for name, value in parts.items() if getattr(made, name) is None})


def scattered(experience: Experience) -> Experience:
    """The same rows, each followed by an uncounted row, with garbage, wider rows and longer responses."""

    def twice(x, garbage):
        return np.stack([x, np.full_like(x, garbage)], axis=1).reshape(-1, *x.shape[1:])

    def wide(x):
        return np.pad(twice(x, np.nan), ((0, 0), (0, 3)), constant_values=np.nan)

    past = np.arange(8)[None] >= experience.rollout.response_length[:, None]
    mine = {name: wide(np.where(past, np.nan, getattr(experience, name)))
            for name in ("reference_logprobs", "values", "rewards", "advantages", "returns", "importance")}
    old = experience.rollout
    tokens = np.pad(twice(old.tokens, 31), ((0, 0), (0, 5)), constant_values=30)
    rollout = Rollout(tokens, twice(old.prompt_length, 2), twice(old.response_length, 4),
                      wide(np.where(past, np.nan, old.logprobs)), twice(old.ended, True))
    return Experience(rollout, twice(experience.weight, 0), **mine)


@pytest.fixture(scope="module")
def experience():
    """An experience of PPO on the host, which has every part, for updates of any kind: advantages that differ from token to
    token, random corrections for the sampler, and one row that does not count."""
    setup = tiny.setup()
    _, found, _ = collected(setup)
    found = tiny.to_host(found)
    inside = np.arange(8)[None] < found.rollout.response_length[:, None]
    importance = np.where(inside, np.random.default_rng(0).uniform(0.5, 1.01, inside.shape), 0).astype(np.float32)
    return dataclasses.replace(found, weight=np.where(np.arange(8) == 5, 0, found.weight), importance=importance)


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_packing_micro_batches_and_uncounted_rows_change_nothing(name, experience):
    setup = tiny.setup(**UPDATES[name])
    whole, parts = gradients(setup, experience), gradients(setup, scattered(experience), 1)
    assert float(whole[2].grad_norm) > 0
    chex.assert_trees_all_close(parts, whole, rtol=1e-4, atol=2e-6)


def test_without_a_critic_there_is_no_critic_state():
    for name in ("rloo", "reinforce_pp", "grpo"):
        setup = tiny.setup(**VARIANTS[name])
        assert fresh(setup).critic is None and abstract_ppo_state(setup).critic is None
    state, experience, _ = collected(setup)
    state, metrics = ppo_update(setup, state, experience)
    chex.assert_tree_all_finite(metrics)
    assert state.critic is None and metrics.value_loss is None
    assert int(state.step) == 1


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    alone, meshed = (tiny.setup(mesh=m, **VARIANTS["grpo"]) for m in (None, (2, 2, 2)))
    _, experience, _ = collected(alone)
    experience = tiny.to_host(experience)
    found = []
    for setup in (alone, meshed):
        state, metrics = ppo_update(setup, fresh(setup), tiny.rows(setup.policy, experience))
        found.append((tiny.to_host(metrics), tiny.to_host(state.policy.params)))
    chex.assert_trees_all_close(found[1][0], found[0][0], rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-3)


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("mesh", "name"),
    [((2, 2, 2), "rloo"), ((8, 1, 1), "reinforce_pp"), ((1, 4, 2), "gspo"), ((4, 2, 1), "cispo"), ((2, 2, 2), "shared")],
)
def test_a_mesh_changes_neither_advantages_nor_gradients(mesh, name, experience):
    """Groups and whole batches are spread over devices: their means and standard deviations must not be those of one device."""
    alone, meshed = (tiny.setup(mesh=m, **VARIANTS[name]) for m in (None, mesh))
    _, made, metrics = collected(alone)
    made = tiny.to_host(made)
    state, frozen = fresh(meshed), tiny.roles(meshed, reference_seed=1)
    found, found_metrics = tiny.experience(meshed, state, frozen, tiny.rows(meshed.policy, made.rollout))
    chex.assert_trees_all_close(tiny.to_host(found), made, rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(tiny.to_host(found_metrics), tiny.to_host(metrics), rtol=1e-4, atol=1e-5)
    if name in UPDATES:  # The others update as PPO does, which tests/steps/test_meshes.py has on each mesh.
        made = filled(made, experience)
        chex.assert_trees_all_close(gradients(meshed, made), gradients(alone, made), rtol=1e-3, atol=5e-6)


def test_if_every_score_was_dropped_there_is_no_gradient(experience):
    setup = tiny.setup(**VARIANTS["grpo"])
    state, frozen = fresh(setup), tiny.roles(setup, reference_seed=1)
    sampled = tiny.rollout(setup, state.policy.params)
    made, measured = make_experience(
        setup, False, frozen.reference, state.policy.params, None, state.kl_coef, sampled, np.full(8, np.nan), np.zeros(8, bool)
    )
    learnt, _, metrics = gradients(setup, filled(tiny.to_host(made), experience))
    assert metrics.policy_loss == metrics.grad_norm == metrics.skipped == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(learnt))
    # The controller must not take the KL of no responses for a small KL.
    after, metrics = ppo_update(setup, state, made)
    assert float(after.kl_coef) == np.float32(setup.config.kl_coef)
    # A mean over no responses is undefined, and not 0.
    row = {name: float(value) for name, value in by_name(IterationMetrics(experience=measured, update=metrics)).items()}
    undefined = {"score", "score_std", "reward", "kl_k1", "kl_k3", "response_length", "eos_rate", "policy_loss", "entropy",
                 "ratio_mean", "ratio_max", "clip_fraction", "approx_kl"}
    assert undefined <= {name for name, value in row.items() if math.isnan(value)} <= undefined | {"score_changed"}
    assert (row["kept"], row["no_score"], row["grad_norm"]) == (0, 8, 0) and row["tokens"] > 0
    assert alerts_of([{"step": 0} | row]) == []


def test_a_reference_with_another_vocabulary_is_refused_while_tracing():
    setup = tiny.setup(**VARIANTS["grpo"])
    state, other = fresh(setup), tiny.model(vocab=40).abstract()
    sampled = tiny.rollout(setup, state.policy.params)
    with pytest.raises(ValueError, match=r"embedding \[V, D\] is \(40, 16\); this model's is \(32, 16\)"):
        jax.eval_shape(
            lambda params: make_experience(
                setup, False, params, state.policy.params, None, state.kl_coef, sampled, np.zeros(8, np.float32)
            ),
            other,
        )


def test_group_advantages_are_scores_minus_the_group_mean_over_the_group_deviation():
    setup = tiny.setup(**VARIANTS["grpo"])
    state, frozen = fresh(setup), tiny.roles(setup, reference_seed=1)
    sampled = tiny.rollout(setup, state.policy.params)
    scores = np.asarray(rollout_scores(tiny.scorer(setup), frozen.preference, sampled))
    experience, _ = tiny.experience(setup, state, frozen, sampled)
    # The KL is in the loss, so the reward is the score, or -1 if the response did not end.
    total = np.where(np.asarray(sampled.ended), scores, -1.0)
    for row in range(8):
        group = total[row // 4 * 4 : row // 4 * 4 + 4]
        expected = (total[row] - group.mean()) / (group.std(ddof=1) + 1e-6)
        count = int(sampled.response_length[row])
        np.testing.assert_allclose(experience.advantages[row, :count], expected, rtol=2e-4, atol=1e-5)
        assert not np.asarray(experience.advantages)[row, count:].any()


def test_a_dropped_score_does_not_count():
    """The group mean, the loss, the metrics and the counts are those without its row."""
    setup = tiny.setup(**VARIANTS["grpo"])
    state, frozen = fresh(setup), tiny.roles(setup, reference_seed=1)
    sampled = tiny.rollout(setup, state.policy.params)
    scores = np.array(rollout_scores(tiny.scorer(setup), frozen.preference, sampled))
    kept = np.ones(8, bool)
    kept[2] = False
    found = []
    for garbage in (np.nan, 1e9):
        scores[2] = garbage
        experience, metrics = make_experience(
            setup, False, frozen.reference, state.policy.params, None, state.kl_coef, sampled, scores, kept
        )
        _, learnt = ppo_update(setup, fresh(setup), experience)
        found.append(by_name(IterationMetrics(experience=metrics, update=learnt)))
        assert not np.asarray(experience.advantages)[2].any() and (float(metrics.kept), float(metrics.no_score)) == (7, 1)
    chex.assert_tree_all_finite(found[0])
    assert found[0] == found[1]


def test_groups_of_equal_scores_are_skipped_if_configured():
    setup = tiny.setup(**VARIANTS["dapo"] | {"overlong_buffer": 0})
    state, frozen = fresh(setup), tiny.roles(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    scores = np.asarray([1, 1, 0, 1, 0, 0, 1, 0], np.float32)
    experience, metrics = make_experience(
        setup, False, frozen.reference, state.policy.params, None, state.kl_coef, sampled, scores
    )
    # The comparison uses the score after the missing-eos rule: -1 for a truncated response.
    settled = np.where(np.asarray(sampled.ended), scores, -1).reshape(4, 2)
    expected = np.repeat(settled[:, 0] != settled[:, 1], 2)
    np.testing.assert_array_equal(experience.weight, expected)
    assert float(metrics.kept) == expected.sum() and float(metrics.score) == scores.mean()


def test_the_metrics_are_means_over_the_minibatches_that_have_responses():
    """One group of four has unequal scores. Without learning the mean ratio is 1, and the mean entropy that of numpy's softmax
    at the tokens of its two responses."""
    setup = tiny.setup(**VARIANTS["dapo"] | {"overlong_buffer": 0, "missing_eos": "none", "epochs": 1, "minibatches": 4})
    setup = dataclasses.replace(setup, policy_optimizer=optax.sgd(0.0))
    state, frozen = fresh(setup), tiny.roles(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    experience, _ = make_experience(
        setup, False, frozen.reference, state.policy.params, None, state.kl_coef, sampled,
        np.asarray([1, 0, 1, 1, 1, 1, 1, 1], np.float32),
    )
    (order, _), = minibatches(setup, state, experience, (setup.policy.sharding,))
    _, metrics = ppo_update(setup, state, experience)
    own, entropy = tiny.to_host(sampled), {}
    for row in (0, 1):
        begin, end = own.prompt_length[row], own.prompt_length[row] + own.response_length[row]
        states = tiny.hidden(setup.policy, tiny.host_params(), own.tokens[row, :end])[begin - 1 : -1].astype(np.float64)
        p = np.exp(states @ tiny.host_params()["embedding"].T)
        p /= p.sum(axis=1, keepdims=True)
        entropy[row] = -np.sum(p * np.log(p), axis=1)
    parts = [[entropy[row] for row in rows if row in entropy] for rows in np.asarray(order).tolist()]
    means = [np.concatenate(part).mean() for part in parts if part]
    assert len(means) < len(parts) == 4
    assert float(metrics.ratio_mean) == pytest.approx(1, abs=1e-5)
    assert float(metrics.entropy) == pytest.approx(np.mean(means), rel=1e-4)


def test_a_minibatch_without_responses_counts_among_the_skipped_updates_and_not_in_the_losses():
    """Two minibatches, the second without a response that counts."""
    two = dict.fromkeys(("policy_loss", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "approx_kl", "sampler_gap"),
                        jnp.asarray([4.0, 0.0]))
    two |= {"grad_norm": jnp.asarray([3.0, 0.0]), "skipped": jnp.asarray([0.0, 1.0]), "overflowed": jnp.asarray([0.0, 1.0]),
            "loss_scale": jnp.asarray([8.0, 8.0])}
    setup = tiny.setup(epochs=1, minibatches=2)
    found = iteration_metrics(setup, UpdateMetrics(**two), jnp.ones(2), jnp.asarray([1.0, 0.0]))
    assert (found.policy_loss, found.grad_norm) == (4.0, 3.0)
    assert (found.skipped, found.overflowed, found.loss_scale) == (0.5, 0.5, 8.0)
    none = iteration_metrics(setup, UpdateMetrics(**two), jnp.ones(2), jnp.zeros(2))
    assert np.isnan(none.policy_loss) and (none.grad_norm, none.loss_scale) == (0.0, 8.0)


def test_the_overlong_penalty_is_added_to_the_missing_eos_rule():
    """A truncated response has the maximum length: it gets the rule's score and the whole penalty."""
    setup = tiny.setup(overlong_buffer=4, kl_coef=0.0)
    state, frozen = fresh(setup), tiny.roles(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    scores = np.full(8, 0.5, np.float32)
    experience, _ = make_experience(
        setup, False, frozen.reference, state.policy.params, state.critic.params, state.kl_coef, sampled, scores
    )
    length = np.asarray(sampled.response_length)
    expected = np.where(np.asarray(sampled.ended), 0.5, -1) - np.clip((length - 4) / 4, 0, 1)
    np.testing.assert_allclose(np.asarray(experience.rewards).sum(axis=1), expected, atol=1e-5)


def test_an_update_without_counted_responses_changes_no_weights_although_the_optimizer_has_moments(experience):
    setup = tiny.setup(critic_warmup=1)  # As the next test, so that they share a program.
    state = fresh(setup)
    for _ in range(2):  # The policy has no moments after its warm-up.
        state, _ = ppo_update(setup, state, experience)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves((state.policy.opt_state, state.critic.opt_state)))
    before = tiny.to_host((state.policy.params, state.policy.opt_state, state.critic.params, state.critic.opt_state))
    state, metrics = ppo_update(setup, state, dataclasses.replace(experience, weight=np.zeros_like(experience.weight)))
    after = tiny.to_host((state.policy.params, state.policy.opt_state, state.critic.params, state.critic.opt_state))
    chex.assert_trees_all_equal(after, before)
    minibatches = setup.config.epochs * setup.config.minibatches
    assert int(state.policy.step) == 2 * minibatches and int(state.critic.step) == 3 * minibatches
    assert float(metrics.skipped) == 0


@pytest.mark.slow
def test_only_the_critic_is_updated_in_its_warm_up(experience):
    setup = tiny.setup(critic_warmup=1)
    state = fresh(setup)
    before = tiny.to_host((state.policy.params, state.critic.params))
    state, _ = ppo_update(setup, state, experience)
    chex.assert_trees_all_equal(tiny.to_host(state.policy.params), before[0])
    assert not np.array_equal(state.critic.params["score"], before[1]["score"])
    state, _ = ppo_update(setup, state, experience)
    assert not np.array_equal(state.policy.params["embedding"], before[0]["embedding"])


def test_kl_in_the_loss_pulls_to_the_reference():
    """With advantages of 0 only the KL moves the policy, towards the reference."""
    setup = tiny.setup(**VARIANTS["grpo"])
    state, experience, metrics = collected(setup)
    experience = dataclasses.replace(experience, advantages=jnp.zeros_like(experience.advantages))
    for _ in range(5):
        state = dataclasses.replace(state, kl_coef=jnp.full_like(state.kl_coef, 1.0))
        state, _ = ppo_update(setup, state, experience)
    again, _ = tiny.experience(setup, state, tiny.roles(setup, reference_seed=1), experience.rollout, recompute=True)
    mask = np.arange(8)[None] < np.asarray(experience.rollout.response_length)[:, None]

    def distance(e):
        return np.abs((np.asarray(e.rollout.logprobs) - np.asarray(e.reference_logprobs)) * mask).sum()

    assert distance(again) < 0.9 * distance(experience)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": "grpo"}, "group_size is 1"),
        ({"missing_eos": "penalty"}, "it must be at least 0"),
        ({"critic_warmup": 28}, "the policy is never trained"),
        ({"policy_loss": "gspo", "dual_clip": 3.0}, "has no effect when config.ppo.policy_loss is 'gspo'"),
        ({"clip": 1.5}, "at most 1"),
        ({"advantages": "rloo", "group_size": 3}, "multiple of config.ppo.group_size"),
        ({"skip_equal_groups": True}, "every group would be equal"),
        ({"kl_in": "loss"}, "gradient is 0 on average"),
        ({"kl_controller": "adaptive", "kl_coef": 0.0}, "it would stay at 0"),
        ({"advantages": "grpo", "group_size": 4, "top_k": 1}, "makes all responses to a prompt equal"),
        ({"advantages": "remax", "top_k": 1}, "makes all responses to a prompt equal"),
        ({"advantages": "rloo", "group_size": 4, "batch": 8, "minibatches": 8}, "each minibatch is one response"),
        ({"target_kl": 0.1, "epochs": 1, "minibatches": 1},
         "has no effect when config.ppo.epochs is 1 and config.ppo.minibatches is 1"),
        ({"overlong_buffer": 100}, "overlong_buffer is 100"),
        ({"advantages": "reinforce_pp", "critic_warmup": 2}, "has no effect when config.ppo.advantages is 'reinforce_pp'"),
    ],
)
def test_incompatible_choices_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"ppo": changes})


@pytest.mark.parametrize("changes", [
    {"advantages": "rloo", "group_size": 4, "batch": 8, "minibatches": 8, "whiten_advantages": False},
    {"batch": 8, "minibatches": 8}, {"top_k": 1}, {"target_kl": 0.1, "epochs": 1}, {"kl_coef": 0.0},
])
def test_choices_that_still_train_are_accepted(changes):
    assert from_config_dict({"ppo": changes}).ppo


def test_whitening_a_minibatch_of_one_response_leaves_no_advantage():
    """The reason why it is refused: by hand, the mean of equal advantages is each of them."""
    one = np.where(np.arange(8) < 5, 0.7, 0.0)[None]
    assert not np.asarray(whiten(one, one > 0)).any()


def test_a_value_head_on_the_trunk_gets_the_gradients_of_both_losses(experience):
    shared, apart = tiny.setup(critic="shared", value_coef=0.5), tiny.setup(value_coef=0.5)
    whole, params = totals(shared, experience), start(shared)
    joint = jax.jit(jax.grad(lambda p: joint_loss(shared, p, experience, whole, 0.05)[0]))(params)
    lm = {name: value for name, value in params.items() if name != "score"}
    of_policy = jax.jit(jax.grad(lambda p: policy_loss(apart, p, experience, whole, 0.05)[0]))(lm)
    of_value = jax.jit(jax.grad(lambda p: value_loss(apart, p, experience, whole)[0]))(params)
    expected = jax.tree.map(np.add, of_policy, {name: of_value[name] for name in of_policy})
    chex.assert_trees_all_close(joint, expected | {"score": of_value["score"]}, rtol=1e-4, atol=1e-7)


def test_a_shared_critic_has_no_separate_state_and_does_not_change_the_reference():
    setup = tiny.setup(**VARIANTS["shared"])
    state, experience, _ = collected(setup)
    assert state.critic is None and abstract_ppo_state(setup).critic is None
    assert jax.tree.structure(abstract_ppo_state(setup)) == jax.tree.structure(state)
    assert float(np.abs(experience.values).max()) > 0
    before = tiny.to_host(state.policy.params["score"])
    reference = other(setup)
    state, metrics = ppo_update(setup, state, experience, None, reference)
    chex.assert_trees_all_equal(tiny.to_host(reference), tiny.host_params(seed=1))
    chex.assert_tree_all_finite(metrics)
    assert metrics.value_loss is not None and metrics.explained_variance is not None
    assert np.abs(tiny.to_host(state.policy.params["score"]) - before).max() > 1e-4


@pytest.mark.variants(1)
@pytest.mark.parametrize(("mode", "level"), [("truncate", "token"), ("mask", "sequence")])
def test_the_loss_corrects_for_an_inexact_sampler(mode, level):
    setup = tiny.setup(sampler_correction=mode, correction_level=level, correction_cap=1.2)
    state, frozen = fresh(setup), tiny.roles(setup, reference_seed=1)
    sampled = tiny.rollout(setup, state.policy.params)
    inside = np.arange(sampled.logprobs.shape[1])[None] < np.asarray(sampled.response_length)[:, None]
    gap = np.where(inside, np.random.default_rng(0).normal(0, 0.3, inside.shape), 0).astype(np.float32)
    shifted = dataclasses.replace(sampled, logprobs=np.asarray(sampled.logprobs) + gap)
    experience, metrics = tiny.experience(setup, state, frozen, shifted, recompute=True)
    ratio = np.exp(-gap if level == "token" else np.broadcast_to(-gap.sum(axis=1, keepdims=True), gap.shape))
    weight = np.minimum(ratio, 1.2) if mode == "truncate" else np.where(ratio > 1.2, 0, ratio)
    np.testing.assert_allclose(experience.importance, np.where(inside, weight, 0), atol=2e-4)
    np.testing.assert_allclose(experience.rollout.logprobs, sampled.logprobs, atol=1e-4)  # not the reported ones
    assert float(metrics.correction_outside) == pytest.approx((ratio > 1.2)[inside].mean(), abs=1e-5)
    assert 0 < float(metrics.effective_sample_share) <= 1
    assert float(metrics.sampler_gap) == pytest.approx(np.abs(gap).max(), abs=2e-4)
    plain = tiny.setup()
    whole = totals(setup, experience)
    loss, _ = policy_loss(setup, state.policy.params, experience, whole, 0.05)
    # At the first update the ratio is 1, so the loss is -weight * advantage.
    by_hand = -np.sum(np.where(inside, weight * np.asarray(experience.advantages), 0)) / inside.sum()
    assert float(loss) == pytest.approx(by_hand, abs=2e-4)
    assert float(policy_loss(plain, state.policy.params, experience, whole, 0.05)[0]) != pytest.approx(by_hand, abs=2e-4)


def test_vtrace_uses_the_log_probs_of_the_sampler():
    setup = tiny.setup(advantages="vtrace", gamma=0.9)
    state, frozen = fresh(setup), tiny.roles(setup, reference_seed=1)
    sampled = tiny.rollout(setup, state.policy.params)
    shifted = dataclasses.replace(sampled, logprobs=np.asarray(sampled.logprobs) + np.float32(0.5))
    found, _ = tiny.experience(setup, state, frozen, shifted, recompute=True)
    for row in range(8):  # Espeholt et al. 2018, equation 1, backwards; every ratio is exp(-0.5)
        n, rho = int(sampled.response_length[row]), np.exp(-0.5)
        rewards, values = np.asarray(found.rewards)[row], np.append(np.asarray(found.values)[row, :n], 0)
        target = 0.0
        for t in reversed(range(n)):
            delta = rho * (rewards[t] + 0.9 * values[t + 1] - values[t])
            following = target
            target = values[t] + delta + 0.9 * 0.95 * rho * (following - values[t + 1])
            assert found.returns[row, t] == pytest.approx(target, abs=1e-4)
            ahead = values[t + 1] + 0.95 * (following - values[t + 1])
            assert found.advantages[row, t] == pytest.approx(rho * (rewards[t] + 0.9 * ahead - values[t]), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": "rloo", "group_size": 2, "critic": "shared"}, "has no effect when config.ppo.advantages is 'rloo'"),
        ({"critic": "shared", "critic_warmup": 2}, "has no effect when config.ppo.critic is 'shared'"),
        ({"correction_cap": 3.0}, "has no effect when config.ppo.sampler_correction is 'none'"),
    ],
)
def test_options_incompatible_with_the_other_choices_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"ppo": changes})


def test_the_greedy_baseline_is_scored_by_the_rules_for_samples():
    setup = tiny.setup(advantages="remax", overlong_buffer=4)
    sampled = tiny.rollout(setup, tiny.place(setup.policy, tiny.host_params(seed=4)), temperature=0.0)
    scores = np.linspace(-1, 1, 8, dtype=np.float32)
    length, ended = np.asarray(sampled.response_length), np.asarray(sampled.ended)
    assert ended.any() and not ended.all()
    expected = np.where(ended, scores, -1.0) + np.clip((8 - 4 - length) / 4, -1, 0)  # replaced by -1, plus DAPO's slope
    np.testing.assert_allclose(greedy_baseline(setup.config, sampled, scores), expected, atol=1e-6)


@pytest.mark.parametrize("kept", [None, [True] * 7 + [False]])
def test_a_greedy_score_that_is_not_finite_is_no_baseline(kept):
    """An infinite score must not become a large finite one, nor NaN a 0; the score of a dropped row is not read."""
    setup = tiny.setup(advantages="remax", missing_eos="none")
    scores = np.asarray([0.5, np.inf, -np.inf, 1, 2, 3, 4, np.nan], np.float32)
    iteration = object.__new__(Iteration)
    iteration.setup, iteration.sampling = setup, tiny.sampling(setup)
    rollout = Rollout(np.ones((8, 16), np.int32), *np.full((2, 8), 4, np.int32), np.zeros((8, 8), np.float32), np.ones(8, bool))
    iteration.respond = lambda batch, key, sampling: rollout
    iteration.scored = lambda sampled, batch: Scored(scores, kept)
    baseline, found = iteration._baseline(None, None)
    assert found is kept
    np.testing.assert_array_equal(baseline, scores if kept is None else [*scores[:7], 0])
