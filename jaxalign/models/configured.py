"""Builds the model that a config describes: its sizes, adapters and sharding; no weights."""

from __future__ import annotations

import dataclasses

from jaxalign import config as schema
from jaxalign.errors import UserError
from jaxalign.models.adapters import peft_config
from jaxalign.models.adapters.lora import Lora
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.families import Family


def configured_decoder(section: schema.Model, vocab: int) -> tuple[DecoderConfig, Family | None]:
    """The architecture of config.model, and its family if model.source is "huggingface" (else None). vocab is the tokenizer's
    size; a Hugging Face model uses the size in its config.json, which may be larger. No other file of it is read.

    Raises UserError if config.json is missing or does not describe a language model.
    """
    if section.source == "huggingface":
        found = huggingface.read_config(section.path, section.compute_dtype, section.vocab_multiple)
        if found.head != "lm":
            raise UserError(f"model.path is {section.path}, a {found.family.classifier}; a language model is expected")
        return with_choices(section, found.decoder), found.family
    decoder = DecoderConfig(
        vocab, section.layers, section.embed, section.heads, section.kv_heads, section.head_dim, section.mlp,
        section.rope_base, section.norm_eps, section.tie_embeddings, section.compute_dtype, section.vocab_multiple,
    )
    return with_choices(section, decoder), None


def with_choices(section: schema.Model, decoder: DecoderConfig) -> DecoderConfig:
    """The architecture with the fields of config.model that apply to every source."""
    return dataclasses.replace(decoder, remat=section.remat, remat_saves=section.remat_saves, attention=section.attention,
                               cache_dtype=section.cache_dtype)


def adapted(section: schema.Lora, base: Model, family: Family | None) -> Model:
    """The model with the adapters of config.lora. Adapters from config.lora.path, whose adapter_config.json is read, need the
    family of their base model."""
    if section.path:
        return dataclasses.replace(base, lora=peft_config.read_adapted(section.path, family, base).lora)
    adapters = Lora(section.rank, section.alpha, section.targets, section.rank_stabilised, section.dora)
    return dataclasses.replace(base, lora=adapters if section.rank else None)


def configured_model(config: schema.Config, vocab: int, head: str = "lm", sharding: Sharding | None = None) -> Model:
    """The run's model, with its adapters. vocab is the tokenizer's size."""
    decoder, family = configured_decoder(config.model, vocab)
    return adapted(config.lora, Model(decoder, head, sharding), family)
