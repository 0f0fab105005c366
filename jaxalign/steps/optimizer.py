"""Optimizers and learning-rate schedules, built on optax."""

from __future__ import annotations

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxalign.config import Optimizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import LINEAR

_STACKED = ("blocks", "adapters")


def make_schedule(config: Optimizer, total_steps: int) -> optax.Schedule:
    """Linear warm-up over `warmup_steps`, then constant, linear decay to 0 or cosine decay to 0 at `total_steps`."""
    rest = max(1, total_steps - config.warmup_steps)
    after = {
        "constant": lambda: optax.constant_schedule(config.learning_rate),
        "linear": lambda: optax.linear_schedule(config.learning_rate, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, rest),
    }[config.schedule]()
    if config.warmup_steps == 0:
        return after
    # Warm-up starts above 0, so that its first step is not wasted.
    warm = optax.linear_schedule(config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warm, after], [config.warmup_steps])


def scale_by_adam_eps_inside(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with eps added to the square root of the uncorrected second moment, as in TensorFlow.

    The update is m * sqrt(1-b2^t)/(1-b1^t) / (sqrt(v) + eps). Source: "The N implementation details of RLHF with PPO", the
    detail on Adam.
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
    """The mask of weight decay, which applies only to matrices: not to norms, biases, DoRA magnitudes or the scalar head."""

    def decays(path, leaf):
        stacked, name = path[0].key in _STACKED, path[-1].key
        return leaf.ndim - stacked >= 2 and name != "magnitude" and not name.endswith("bias")

    return jax.tree_util.tree_map_with_path(decays, params)


def _direction(config: Optimizer) -> optax.GradientTransformation:
    """The transformation of `config.kind` from gradients to a direction, to which rate and sign are applied last."""
    match config.kind:
        case "lion":  # arXiv 2302.06675
            return optax.scale_by_lion(config.b1, config.b2)
        case "adafactor":  # Without momentum, as published (arXiv 1804.04235); the rate is relative to a parameter's scale.
            directions = optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms(1e-3)
            return _by_layer(optax.chain(*directions))
        case "sophia":  # Sophia-H, arXiv 2305.14342: curvature from one micro-batch every 10 updates (Hutchinson).
            descent = optax.contrib.sophia(1.0, config.b1, config.b2, config.eps, weight_decay=0.0)
            return optax.chain(descent, optax.scale(-1.0))
    adam = (scale_by_adam_eps_inside if config.eps_inside else optax.scale_by_adam)(config.b1, config.b2, config.eps)
    if config.kind == "adamw":
        return adam
    # Muon: updates of kernels are orthogonalised and scaled to the size of Adam's (arXiv 2502.16982). The rest uses Adam.
    muon = optax.contrib.scale_by_muon(beta=config.b1, weight_dimension_numbers=_dimensions)
    matrices = optax.chain(muon, optax.stateless(_as_large_as_adams))

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "adam" if _inputs(path) is None else "muon", params)

    return optax.partition({"muon": matrices, "adam": adam}, labels)


def _inputs(path) -> int | None:
    """The number of input axes of a linear layer's kernel, after the layer axis; None for other parameters."""
    names = tuple(part.key for part in path)
    if names[0] == "blocks" and names[1:] in LINEAR:
        return LINEAR[names[1:]][0]
    if names[0] == "adapters" and names[-1] in ("a", "b"):
        return LINEAR[names[1:3]][0] if names[-1] == "a" else 1
    return None


def _dimensions(tree):
    """The input and output axes of each kernel for Muon. The axes before them are layers and experts."""

    def numbers(path, leaf):
        names, first = tuple(part.key for part in path), 1
        if names[:2] == ("blocks", "mlp") and leaf.ndim == 4:  # [L, E, in, out]
            first = 2
        split = first + _inputs(path)
        return optax.contrib.MuonDimensionNumbers(tuple(range(first, split)), tuple(range(split, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(numbers, tree)


def _as_large_as_adams(updates, params=None):
    """Scales orthogonal matrices by 0.2 sqrt(max(inputs, outputs)), to a root mean square of 0.2, typical of Adam's updates."""
    del params

    def scale(update, dimensions):
        sides = (math.prod(update.shape[axis] for axis in axes) for axes in dimensions)
        return update * (0.2 * max(sides) ** 0.5)

    kind = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(scale, updates, _dimensions(updates), is_leaf=lambda x: isinstance(x, kind))


def _by_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `inner` to each layer of a stacked tree separately, as if the layers were not stacked."""

    def split(tree):
        stacked = {name: value for name, value in tree.items() if name in _STACKED}
        return stacked, {name: value for name, value in tree.items() if name not in _STACKED}

    def init(params):
        stacked, rest = split(params)
        return jax.vmap(inner.init)(stacked), inner.init(rest)

    def update(updates, state, params=None):
        (stacked, rest), (own, others) = split(updates), split(params)
        first, second = state
        stacked, first = jax.vmap(inner.update)(stacked, first, own)
        rest, second = inner.update(rest, second, others)
        return {**rest, **stacked}, (first, second)

    return optax.GradientTransformation(init, update)


def make_optimizer(
    config: Optimizer | optax.GradientTransformation, total_steps: int, custom: bool = False
) -> optax.GradientTransformation:
    """The optimizer that a config section describes.

    Jitted steps take optimizers, which compare by identity, as static arguments. Equal arguments give the same object, so that
    runs with equal settings in one process share their programs.

    Args:
      config: the kind, learning rate and schedule, decoupled weight decay, and the global norm to clip to (None: no clipping);
        or a user's optimizer, which is returned.
      total_steps: the length of the schedule.
      custom: whether the run's programs call a function of the user's, selected by name. The result is then a new object, since
        the name may stand for another function in a later run, as after a notebook cell or a module has run again.
    """
    if isinstance(config, optax.GradientTransformation):
        return config
    make = _made.__wrapped__ if custom else _made
    return make(config, 0 if config.schedule == "constant" else total_steps)


@functools.lru_cache(maxsize=64)
def _made(config: Optimizer, total_steps: int) -> optax.GradientTransformation:
    """A new optimizer. A constant schedule does not read `total_steps`."""
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    parts.append(_direction(config))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_decays))
    parts.append(optax.scale_by_learning_rate(make_schedule(config, total_steps)))
    return optax.chain(*parts)


def check_optimizer(optimizer: optax.GradientTransformation, params, name: str) -> str:
    """Traces one update of a user's optimizer.

    Args:
      optimizer: the optimizer.
      params: the parameters as ShapeDtypeStructs.
      name: the argument in error messages.

    Returns:
      A description of the optimizer's state: a hash of the names, shapes and dtypes of its arrays.

    Raises:
      UserError: the optimizer cannot update the parameters, or an update changes the shapes or dtypes of its state.
    """
    def update(params):
        before, run = optimizer.init(params), optax.with_extra_args_support(optimizer).update
        updates, after = run(params, before, params, obj_fn=optax.tree.norm)
        return before, after, optax.apply_updates(params, updates)

    try:
        before, after, _ = jax.eval_shape(update, params)
    except Exception as error:  # A user's optimizer may raise anything.
        raise UserError(f"{name} cannot update the model's parameters ({type(error).__name__}: {str(error):.200}); give an "
                        "optax optimizer whose update needs only gradients, its state and the parameters") from error
    described = [
        [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
        for state in (before, after)
    ]
    if described[0] != described[1]:
        changed = next((old for old, new in zip(*described, strict=False) if old != new), "its structure")
        raise UserError(f"{name} changes the shape or dtype of its state in an update ({changed}); give an optimizer whose "
                        "state keeps its shapes and dtypes")
    return hashlib.sha256("\n".join(described[0]).encode()).hexdigest()[:16]
