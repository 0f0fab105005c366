"""Losses and gradients on every mesh equal those on one device: sums are divided by global counts."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import numpy as np
import optax
import pytest

from jaxalign.rl.state import init_ppo_state
from jaxalign.rl.update import minibatch_update
from jaxalign.steps.arguments import LmArguments, PreferenceArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.preference_step import preference_step
from jaxalign.steps.state import init_state
from tests import tiny
from tests.steps.batches import PAIRS, ROWS
from tests.steps.made_experience import made_experience

SGD = optax.sgd(1.0)  # the update subtracts the gradient


@functools.partial(jax.jit, static_argnums=0)
def all_steps(setup, language, pairs, policy, critic, batches):
    """Run one step of each kind of training, in one program."""
    rows, comparisons, experience = batches
    language, first = lm_step(language, LmArguments(model=setup.policy, optimizer=SGD, batch=rows))
    given = PreferenceArguments(model=setup.critic, optimizer=SGD, centering_coef=0.01, batch=comparisons)
    pairs, second = preference_step(pairs, given)
    policy, critic, third = minibatch_update(setup, policy, critic, experience, 0.05)
    return [state.params for state in (language, pairs, policy, critic)], (first, second, third)


def keeping(model):
    """The model with weights that stay gathered over an update."""
    return model.on(dataclasses.replace(model.sharding, keep_gathered=True))


@functools.cache
def result(mesh, keep=False):
    """Return (gradients, metrics) of all steps, on the host."""
    setup = dataclasses.replace(tiny.setup(mesh), policy_optimizer=SGD, critic_optimizer=SGD)
    if keep:
        setup = dataclasses.replace(setup, policy=keeping(setup.policy), critic=keeping(setup.critic))
    starts = [tiny.host_params(), tiny.host_params("scalar"), tiny.host_params(), tiny.host_params("scalar", seed=3)]
    models = (setup.policy, setup.critic, setup.policy, setup.critic)
    placed = [tiny.place(model, start) for model, start in zip(models, starts, strict=True)]
    language, pairs = (init_state(m, SGD, p, jax.random.key(0)) for m, p in zip(models[:2], placed[:2], strict=True))
    ppo = init_ppo_state(setup, *placed[2:], jax.random.key(0))
    batches = tiny.rows(setup.policy, (ROWS, PAIRS, made_experience()))
    params, metrics = all_steps(setup, language, pairs, ppo.policy, ppo.critic, batches)
    if mesh is not None:
        for model, tree in zip(models, params, strict=True):
            same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), tree, model.shardings())
            assert all(jax.tree.leaves(same)), "an update moved parameters to another placement"
    return jax.tree.map(np.subtract, starts, tiny.to_host(params)), tiny.to_host(metrics)


@pytest.mark.slow
# Weights stay gathered over an update on the mesh that splits them most; `test_mesh_grid.py` has it without.
@pytest.mark.parametrize(("mesh", "keep"), [(mesh, mesh == (1, 4, 2)) for mesh in tiny.MESHES])
def test_pitfall_21_losses_and_gradients_equal_those_on_one_device(mesh, keep):
    """Another system silently did not synchronise gradients on one mesh shape."""
    gradients, metrics = result(None)
    found, found_metrics = result(mesh, keep)
    chex.assert_trees_all_close(found_metrics, metrics, rtol=1e-4, atol=2e-6)
    chex.assert_trees_all_close(found, gradients, rtol=1e-4, atol=2e-6)


def test_no_compared_gradient_is_zero():
    """Every step has a non-zero gradient for every parameter that takes part."""
    gradients, _ = result(None)
    for tree in gradients:
        assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(tree))
