"""The architecture to plan for: the config's, or that of a published model. No weights or tokenizers are read."""

from __future__ import annotations

import functools
import json
import pathlib

from jaxalign.config import Config
from jaxalign.data.tokenizers.sentence_piece import least_vocabulary
from jaxalign.errors import UserError
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints.huggingface import parse_config
from jaxalign.models.configured import adapted, configured_decoder, with_choices
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.families import Family

_FILE = pathlib.Path(__file__).parent / "published_shapes.json"


@functools.cache
def published_shapes() -> dict[str, dict]:
    """The fields of config.json that determine a decoder's shape, by the name of a published model."""
    return json.loads(_FILE.read_text(encoding="utf-8"))


def architecture(config: Config, shape: str | None = None) -> tuple[DecoderConfig, Family | None]:
    """The policy's architecture, and its family if it is a Hugging Face model.

    Args:
      config: the run's config.
      shape: the name of a published model; None: the architecture of config.model (of its folder, only config.json is read).

    Raises:
      UserError: the shape is unknown, or model.path has no config.json.
    """
    if shape is None:
        # Without a folder, the vocabulary is that of the tokenizer that stage pretrain trains.
        alphabet = data_source(config).alphabet
        return configured_decoder(config, least_vocabulary(alphabet) if alphabet else config.world.vocab_size)
    if shape not in published_shapes():
        raise UserError(f"shape is {shape!r}; it must be one of {', '.join(published_shapes())}. For another model, leave it "
                        "out and set config.model.path to a folder with the model's config.json")
    chosen = config.model
    checkpoint = parse_config(pathlib.Path(shape), published_shapes()[shape], chosen.compute_dtype, chosen.vocab_multiple)
    return with_choices(chosen, checkpoint.decoder), checkpoint.family


def policy_model(config: Config, sharding: Sharding, shape: str | None = None) -> Model:
    """The run's policy, with its adapters if it has any. `shape` is as in `architecture`."""
    decoder, family = architecture(config, shape)
    return adapted(config.lora, Model(decoder, "lm", sharding), family)
