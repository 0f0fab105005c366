"""A user's advantage estimator: the reward minus the batch mean, divided evenly over the tokens of a response."""

import jax.numpy as jnp

from jaxalign.registry.advantages import AdvantageEstimator


def centred(inputs):
    """The response's reward minus the mean over all responses that count, divided over its tokens."""
    total, kept = inputs.total, inputs.kept
    mean = jnp.sum(jnp.where(kept, total, 0.0)) / jnp.maximum(jnp.sum(kept), 1)
    share = inputs.mask / jnp.maximum(jnp.sum(inputs.mask, axis=1, keepdims=True), 1)
    return (total - mean)[:, None] * share, jnp.zeros_like(inputs.rewards)


def centred_on(inputs, baseline):
    """The response's reward minus a baseline, on each of its tokens."""
    return (inputs.total - baseline)[:, None] * inputs.mask, jnp.zeros_like(inputs.rewards)


CENTRED = AdvantageEstimator("centred", centred)
BOTH = AdvantageEstimator("both", lambda inputs: centred(inputs)[0])
ROWS = AdvantageEstimator("rows", lambda inputs: (inputs.total, inputs.rewards))
HALF = AdvantageEstimator("half", lambda inputs: (inputs.rewards.astype(jnp.float16), inputs.rewards))
NAN = AdvantageEstimator("nan", lambda inputs: (inputs.rewards * jnp.nan, inputs.rewards))
RAISES = AdvantageEstimator("raises", lambda inputs: inputs.nothing)
GREEDY = AdvantageEstimator("greedy", lambda inputs: centred_on(inputs, inputs.baseline))
CRITIC = AdvantageEstimator("critic", lambda inputs: (inputs.rewards - inputs.values, inputs.rewards))
RATIOS = AdvantageEstimator("ratios", lambda inputs: (inputs.rewards * jnp.exp(inputs.log_ratios), inputs.rewards))
SHAPES = AdvantageEstimator("shapes", lambda inputs: (inputs.rewards, jnp.zeros_like(inputs.values)))
MISSPELT = AdvantageEstimator("misspelt", centred, reads=("gama",))
