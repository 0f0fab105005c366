"""Statistics of LM heads in chunks, on one device and on eight, against those of all logits together: values and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.models.heads import token_kl, token_stats, weighted_nll
from jaxalign.parallel.sharding import Sharding, make_sharding

B, T, D, V = 8, 9, 8, 34  # A context axis of 2 does not divide T.
MESHES = {
    "one-device": Mesh(),
    "data8": Mesh(data=8),
    "data2-fsdp2-tensor2": Mesh(2, 2, 2),
    "fsdp2-tensor2-context2": Mesh(fsdp=2, tensor=2, context=2),
}
RNG = np.random.default_rng(0)
HIDDEN, OTHER_HIDDEN = RNG.normal(size=(2, B, T, D)).astype(np.float32)
HEAD, OTHER_HEAD = 1.5 * RNG.normal(size=(2, D, V)).astype(np.float32)
TARGETS = RNG.integers(0, V, (B, T)).astype(np.int32)
WEIGHTS = RNG.normal(size=(4, B, T)).astype(np.float32)  # Weights of log-probs, entropies, divergences and losses.


def whole(temperature: float, cap: float | None, weights, hidden, head):
    """The sums below, by the formulas. The loss has no temperature."""

    def logp(hidden, head, temperature):
        logits = hidden @ head
        return jax.nn.log_softmax((logits if cap is None else cap * jnp.tanh(logits / cap)) / temperature)

    def at_targets(x):
        return jnp.take_along_axis(x, TARGETS[..., None], -1)[..., 0]

    p, q = logp(hidden, head, temperature), logp(OTHER_HIDDEN, OTHER_HEAD, temperature)
    return {
        "stats": jnp.sum(weights[0] * at_targets(p) - weights[1] * jnp.sum(jnp.exp(p) * p, -1)),
        "kl": jnp.sum(weights[2] * jnp.sum(jnp.exp(p) * (p - q), -1)),
        "nll": -jnp.sum(weights[3] * at_targets(logp(hidden, head, 1.0))),
    }


def in_chunks(
    sharding: Sharding, size: int, temperature: float, cap: float | None, used, transposed: bool, weights, hidden, head
):
    floats, given = size * B * V, {"cap": cap, "sharding": sharding, "used": used}
    stats = token_stats(hidden, head, TARGETS, temperature, floats, transposed=transposed, **given)
    kl = token_kl(hidden, head, OTHER_HIDDEN, OTHER_HEAD, temperature, 2 * floats, **given)
    return {
        "stats": jnp.sum(weights[0] * stats.logprobs + weights[1] * stats.entropy),
        "kl": jnp.sum(weights[2] * kl),
        "nll": weighted_nll(hidden, head, TARGETS, weights[3], floats, transposed=transposed, **given),
    }


def values_and_gradients(fn, hidden, head):
    """Return {name: (value, (gradient of the hidden states, gradient of the head))} of one program, on the host."""

    def each(hidden, head):
        def one(name):
            return jax.value_and_grad(lambda *given: fn(*given)[name], (0, 1))(hidden, head)

        return {name: one(name) for name in ("stats", "kl", "nll")}

    return jax.device_get(jax.jit(each)(hidden, head))


@functools.cache
def expected(temperature: float, cap: float | None, used: int):
    return values_and_gradients(functools.partial(whole, temperature, cap, WEIGHTS * (np.arange(T) < used)), HIDDEN, HEAD)


@pytest.mark.variants(3)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(("chunks", "temperature", "cap", "used", "transposed"), [
    (3, 1.3, 2.5, None, True), (1, 0.7, None, None, False), (5, 0.7, None, None, True), (5, 1.3, 2.5, 4, False),
])
def test_chunks_on_any_mesh_equal_all_logits_together(mesh, chunks, temperature, cap, used, transposed):
    """used: the number of positions that count; the others are ignored."""
    sharding = make_sharding(mesh)
    hidden, head = jax.device_put((HIDDEN, HEAD), (sharding.batch, sharding.named(("embed", "vocab"))))
    own = -(-T // mesh.context)  # Positions of a row on one device.
    size, weights = -(-own // chunks) * mesh.context, WEIGHTS * (np.arange(T) < (T if used is None else used))
    count = None if used is None else jnp.int32(used)
    fn = functools.partial(in_chunks, sharding, size, temperature, cap, count, transposed, weights)
    found, whole_found = values_and_gradients(fn, hidden, head), expected(temperature, cap, T if used is None else used)
    for name in whole_found:
        for have, want in zip(jax.tree.leaves(found[name]), jax.tree.leaves(whole_found[name]), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)
