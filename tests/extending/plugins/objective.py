"""A user's objective, the squared distance of the margin from a target, and invalid objectives."""

import jax.numpy as jnp

from jaxalign.registry.objectives import Objective


def squared(inputs):
    """(beta h - 1)^2, where h is the difference of the log-ratios, weighted by the certainty of the label."""
    margin = (inputs.first - inputs.reference_first) - (inputs.second - inputs.reference_second)
    return (2 * inputs.label - 1) * (inputs.settings.beta * margin - 1) ** 2


SQUARED = Objective("squared", squared, reads=())
SCALAR = Objective("scalar", lambda inputs: jnp.mean(squared(inputs)))
NAN = Objective("nan", lambda inputs: squared(inputs) * jnp.nan)
