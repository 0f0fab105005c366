"""One PPO iteration as the stage runs it: prompts, keys, and the response to a gap between sampler and trainer."""

from __future__ import annotations

import dataclasses
import gc
import logging

import chex
import jax
import numpy as np
import pytest

from jaxalign.config import Checks
from jaxalign.errors import UserError
from jaxalign.parallel.ahead import Ahead
from jaxalign.rewards import learnt
from jaxalign.rl import ahead as rl_ahead
from jaxalign.rl import checks as rl_checks
from jaxalign.rl import experience, step_zero
from jaxalign.rl import iteration as rl_iteration
from jaxalign.rl import update as ppo_step
from jaxalign.rl.update import ppo_update
from jaxalign.rollout import forecast, layouts, ring
from jaxalign.steps import loss_scale
from tests import tiny
from tests.compilations import SEEN, compiled
from tests.ppo_iterations import iterate, sampled_by

pytestmark = pytest.mark.usefixtures("few_sampling_programs")

# The tolerance is smaller than any rounding error. Tests share these settings, so that they share programs.
TINIEST = {"sampler_tolerance": 1e-12}


# The first tests of the file, because they need a process without programs. Later tests use theirs.


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "mesh", "shares"), [
    (TINIEST, None, layouts.SHARES), ({}, (2, 2, 2), (1,)),
])
def test_every_program_is_compiled_once_and_ahead_of_the_iterations(monkeypatch, changes, mesh, shares):
    """Loaded weights are committed to a device. If the rest of a fresh state is not, everything is compiled again for the state
    after the first update. `test_compiled_ahead.py` has GRPO with the KL in the loss."""
    programs = (experience.packed_experience, ppo_step.packed_update, step_zero.step_zero_values)
    setup, lowered = tiny.setup(mesh, epochs=1, minibatches=1, **changes), []
    monkeypatch.setattr(layouts, "SHARES", shares)
    forecast.forget()
    SEEN.clear()
    chex.clear_trace_counter()
    monkeypatch.setattr(ppo_step, "minibatch_update", chex.assert_max_traces(ppo_step.minibatch_update, n=1))
    with Ahead() as ahead:
        add = ahead.add
        monkeypatch.setattr(ahead, "add", lambda *program: lowered.append((program[0], add(*program))))
        stream, engine, sampling = sampled_by(setup, tiny.PROMPTS)
        rl_ahead.compile_ahead(ahead, setup, engine, sampling, stream.at(0).ids, tiny.scorer(setup))
        assert all(future.result() is not None for _, future in lowered)
    assert {*programs, ring.decode_chunk, ring.insert, ring.prefill} <= {fn for fn, _ in lowered}
    assert [len(compiled(f"({fn.__name__})")) for fn in (*programs, ring.insert, ring.prefill)] == [1] * 5
    SEEN.clear()
    iterate(steps=3, mesh=mesh, **changes)
    assert [name for name in {fn.__name__ for fn, _ in lowered} if compiled(f"({name})")] == []


@pytest.mark.slow
def test_a_step_reports_every_metric_of_the_data_formats_page():
    found = []
    state, metrics = iterate(on_checks=found.extend, **TINIEST)
    promised = """score score_std reward kl_k1 kl_k3 kl_coef entropy ratio_mean ratio_max clip_fraction value_clip_fraction
        policy_loss value_loss explained_variance response_length eos_rate approx_kl grad_norm critic_grad_norm
        sampler_gap epochs_run score_changed""".split()
    assert set(promised) <= set(metrics[0])
    chex.assert_tree_all_finite(metrics)
    assert int(state.step) == int(state.policy.step) == 2
    checks, model = {check.name: check for check in found}, tiny.model()
    assert list(checks) == ["ratio", "reference KL", "sampler gap", "micro-batches", "finite gradients"]
    # Those of the sampler pass with the usual tolerance.
    assert [check.passed for check in found] == [False, True, False, True, True]
    assert 0 < checks["ratio"].value < rl_checks.ratio_tolerance(0.0, model)
    assert 0 < checks["sampler gap"].value < rl_checks.sampler_tolerance(0.0, model)


@pytest.mark.slow
def test_pitfall_10_the_sampler_gap_is_reported_at_every_step():
    """In other systems the first ratio differed from 1 without a warning, because sampler and trainer differ."""
    _, metrics = iterate(steps=3, **TINIEST)
    assert all(0 < row["sampler_gap"] < 1e-4 for row in metrics)


@pytest.mark.slow
def test_pitfall_10_a_sampler_gap_above_the_tolerance_warns_at_every_step(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        iterate(steps=3, **TINIEST)
    messages = [record.getMessage() for record in caplog.records]
    assert any("check 'ratio'" in text for text in messages)
    assert [step for step in (0, 1, 2) if any(f"at iteration {step}" in text for text in messages)] == [0, 1, 2]


# Two settings that recompute. Other tests use the programs of each.
STILL = TINIEST | {"learning_rate": 0.0, "checks": Checks(sampler_gap="recompute")}
STOPPING = TINIEST | {"checks": Checks(ratio="recompute", finite_gradients="stop")}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [STILL, STOPPING], ids=["sampler_gap", "ratio"])
def test_pitfall_10_old_log_probs_are_recomputed_if_configured(changes):
    """The ratio before the first update is 1 up to the rounding of two programs on the same weights: their float32 log-probs,
    between -8 and -4, are each correct to one unit in the last place, 4.8e-7."""
    _, metrics = iterate(first=1, **changes)
    assert [row["ratio_mean"] for row in metrics] == pytest.approx([1, 1], abs=2e-7)
    assert [row["ratio_max"] for row in metrics] == pytest.approx([1, 1], abs=2 * 4.8e-7)


@pytest.mark.parametrize("check", ["sampler_gap", "ratio"])
def test_pitfall_10_a_sampler_gap_above_the_tolerance_stops_the_run_if_configured(check):
    with pytest.raises(UserError, match=f"at iteration 0.*config.ppo.checks.{check} is 'stop'"):
        iterate(**TINIEST, checks=Checks(**{check: "stop"}))


def spoiled_updates(monkeypatch):
    """Make the gradients of policy and critic non-finite in the second iteration, by an infinite reward."""

    def update(setup, state, experience, *rest):
        if int(state.step) == 1:
            experience = dataclasses.replace(experience, rewards=experience.rewards.at[0, 0].set(np.inf))
        return ppo_update(setup, state, experience, *rest)

    monkeypatch.setattr(rl_iteration, "ppo_update", update)


@pytest.mark.medium
def test_non_finite_gradients_are_skipped_with_a_warning_in_the_last_iteration_as_well(caplog, monkeypatch):
    spoiled_updates(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        _, metrics = iterate(first=1, **TINIEST)
    assert [row["skipped"] for row in metrics] == [0, 2]  # the only update of policy and critic in each iteration
    messages = [record.getMessage() for record in caplog.records]
    assert [text for text in messages if "check 'finite gradients' is 1," in text and "iteration 2" in text]


@pytest.mark.slow
def test_non_finite_gradients_stop_the_run_immediately_if_configured(monkeypatch):
    spoiled_updates(monkeypatch)
    with pytest.raises(UserError, match="iteration 2 .*config.ppo.checks.finite_gradients is 'stop'"):
        iterate(steps=3, first=1, **STOPPING)


# Without the checks of iteration 0: those of float16 are in tests/rl/test_checks.py.
HALF = {"first": 1, "compute_dtype": "float16", "sampler_tolerance": 0.01, "checks": Checks(finite_gradients="stop")}


@pytest.mark.slow
def test_a_float16_overflow_that_halves_the_loss_scale_does_not_fail_the_check(monkeypatch):
    """At such a high initial scale the first updates overflow; a run that stops at non-finite gradients continues."""
    monkeypatch.setattr(loss_scale, "START", 2.0**24)
    state, metrics = iterate(**HALF)
    assert [row["skipped"] for row in metrics] == [row["overflowed"] for row in metrics] == [2, 2]
    assert [row["loss_scale"] for row in metrics] == [row["critic_loss_scale"] for row in metrics] == [2.0**24, 2.0**23]
    assert float(state.policy.loss_scale.scale) == float(state.critic.loss_scale.scale) == 2.0**22


@pytest.mark.slow
def test_a_non_finite_loss_fails_the_check_in_float16(monkeypatch):
    spoiled_updates(monkeypatch)
    with pytest.raises(UserError, match="iteration 2 .*config.ppo.checks.finite_gradients is 'stop'"):
        iterate(steps=3, **HALF)


def bytes_on_devices() -> int:
    """Bytes of all arrays on the devices."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted() and x.sharding.memory_kind == "device")


def bytes_by_phase(monkeypatch, **changes):
    """Return (result of `iterate`, {phase: additional bytes on the devices}) of the last iteration."""
    gc.collect()
    gc.freeze()  # Collecting the objects of earlier tests again takes half a second each time.
    found, before = {}, bytes_on_devices()

    def watch(where, name, phase):
        inner = getattr(where, name)

        def outer(*given, **named):
            found[phase] = bytes_on_devices() - before
            return inner(*given, **named)

        monkeypatch.setattr(where, name, outer)

    with monkeypatch.context() as monkeypatch:
        for where, name, phase in ((rl_iteration, "sample_rollout", "sampling"), (learnt, "rollout_scores", "reward"),
                                   (rl_iteration, "make_experience", "reference"),
                                   (rl_iteration, "ppo_update", "update")):
            watch(where, name, phase)
        result = iterate(**changes)
    gc.unfreeze()
    return result, found


@pytest.mark.slow
def test_offloading_changes_no_result_and_each_phase_holds_only_the_weights_it_needs(monkeypatch):
    mesh = (2, 2, 2)

    def size(tree):
        return sum(x.nbytes for x in jax.tree.leaves(tree) if x.ndim)

    (state, metrics), held = bytes_by_phase(monkeypatch, first=1, mesh=mesh)
    (found, found_metrics), left = bytes_by_phase(monkeypatch, first=1, mesh=mesh, offload=("optimizer", "frozen"))
    # The scores are computed and rounded in a separate program.
    chex.assert_trees_all_close(found_metrics, metrics, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(tiny.to_host(found), tiny.to_host(state), rtol=1e-3, atol=1e-5)
    optimizers = size(state.policy.opt_state) + size(state.critic.opt_state)
    reference, preference = size(tiny.host_params()), size(tiny.host_params("scalar"))
    saved = {phase: held[phase] - left[phase] for phase in held}
    assert saved["sampling"] == optimizers + reference + preference and saved["update"] == reference + preference
    # The scores and the rows packed for them exist already.
    assert 0 <= optimizers + preference - saved["reference"] <= 4096 < min(reference, preference) / 2
    # An offloaded reward model scores before the reference, otherwise together with it.
    assert held["reference"] - left["reward"] == optimizers + reference  # Without offloading there are no scores yet.
    for trained in (found.policy, found.critic):
        assert {x.sharding.memory_kind for x in jax.tree.leaves(trained.opt_state) if x.ndim} == {"pinned_host"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(trained.params)} == {"device"}


@pytest.mark.slow
def test_a_reference_that_the_loss_needs_is_on_the_devices_in_the_update():
    changes = {"advantages": "grpo", "group_size": 2, "kl_in": "loss", "kl_estimator": "full", "first": 1}
    state, metrics = iterate(**changes)
    found, found_metrics = iterate(offload=("frozen",), **changes)
    chex.assert_trees_all_close(found_metrics, metrics, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(tiny.to_host(found), tiny.to_host(state), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_every_iteration_uses_new_sampling_keys():
    """One prompt eight times in three iterations at a rate of 0: a key used twice would repeat lengths and scores."""
    _, metrics = iterate(steps=3, first=1, prompts=[[1, 4]] * 8, **STILL)
    assert len({(row["score"], row["kl_k3"], row["response_length"]) for row in metrics}) == 3


@pytest.mark.slow
def test_responses_of_older_weights_do_not_measure_the_gap_of_the_sampler():
    """Their difference to the trainer is that of an update: the second iteration's responses are from before the first's."""
    _, rows = iterate(first=1, sample_ahead=True, advantages="rloo", group_size=2, whiten_advantages=False)
    assert ["sampler_gap" in row for row in rows] == [True, False]
    assert rows[0]["sampler_gap"] < 1e-4
