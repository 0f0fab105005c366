"""Optimizers and learning-rate schedules, from optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxalign.config import Optimizer


def make_schedule(config: Optimizer, total_steps: int) -> optax.Schedule:
    """Linear warm-up from 0 over `warmup_steps`, then constant, linear to 0 or cosine to 0 at `total_steps`."""
    rest = max(1, total_steps - config.warmup_steps)
    after = {
        "constant": lambda: optax.constant_schedule(config.learning_rate),
        "linear": lambda: optax.linear_schedule(config.learning_rate, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, rest),
    }[config.schedule]()
    if config.warmup_steps == 0:
        return after
    # The first step of a warm-up has a rate above 0: a step that does nothing is a step wasted.
    warm = optax.linear_schedule(config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warm, after], [config.warmup_steps])


def scale_by_adam_eps_inside(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with eps beside the *uncorrected* root: m * sqrt(1-b2^t)/(1-b1^t) / (sqrt(v) + eps), TensorFlow's form.

    Source: "The N implementation details of RLHF with PPO", detail on Adam.
    """

    def update(updates, state, params=None):
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, updates)
        count = state.count + 1
        rate = jnp.sqrt(1 - b2 ** count.astype(jnp.float32)) / (1 - b1 ** count.astype(jnp.float32))
        scaled = jax.tree.map(lambda m, v: rate * m / (jnp.sqrt(v) + eps), mu, nu)
        return scaled, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam(b1, b2).init, update)


def _decays(params):
    """Weight decay acts on matrices only: norms, biases, lengths of DoRA and the scalar head are none."""

    def decays(path, leaf):
        stacked, name = path[0].key in ("blocks", "adapters"), path[-1].key
        return leaf.ndim - stacked >= 2 and name != "magnitude" and not name.endswith("bias")

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: Optimizer, total_steps: int) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm (clip_norm None: no clipping)."""
    adam = scale_by_adam_eps_inside if config.eps_inside else optax.scale_by_adam
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    parts.append(adam(config.b1, config.b2, config.eps))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_decays))
    parts.append(optax.scale_by_learning_rate(make_schedule(config, total_steps)))
    return optax.chain(*parts)
