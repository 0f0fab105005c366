"""A model family: Llama's decoder with a scaled embedding, another model_type, and other tensor names."""

from jaxalign.models.families import llama
from jaxalign.models.families.base import llama_weights
from jaxalign.registry.families import Family


def decoder(fields):
    return llama.decoder(fields) | {"scale_embeddings": fields.flag("scaled_input", True)}


def weights(config):
    return tuple(weight._replace(stored=weight.stored.replace("model.", "body.")) for weight in llama_weights(config))


FAMILY = Family("swallow", "SwallowForCausalLM", decoder, weights)
