"""An objective of one's own: the squared distance of the margin from a target, and objectives that are wrong."""

import jax.numpy as jnp

from jaxalign.registry.objectives import Objective


def squared(inputs):
    """(beta h - 1)^2, h the difference of the log-ratios, weighted by how sure the label is."""
    margin = (inputs.first - inputs.reference_first) - (inputs.second - inputs.reference_second)
    return (2 * inputs.label - 1) * (inputs.settings.beta * margin - 1) ** 2


SQUARED = Objective("squared", squared, reads=())
SCALAR = Objective("scalar", lambda inputs: jnp.mean(squared(inputs)))
NAN = Objective("nan", lambda inputs: squared(inputs) * jnp.nan)
