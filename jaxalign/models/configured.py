"""The model that a config asks for: its sizes, its adapters and its place on the mesh; no weights."""

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
    """The architecture of config.model, and its family where it comes from outside. vocab is the tokenizer's size; an outside
    model says its own, which may be larger. Of an outside model config.json alone is read.

    Raises UserError where that is missing, or is of no language model.
    """
    if section.source == "huggingface":
        found = huggingface.read_config(section.path, section.compute_dtype, section.vocab_multiple)
        if found.head != "lm":
            raise UserError(f"model.path is {section.path}, a {found.family.classifier}; a language model is expected")
        return with_choices(section, found.decoder), found.family
    decoder = DecoderConfig(
        vocab, section.layers, section.embed, section.heads, section.kv_heads, section.head_dim, section.mlp,
        section.rope_base, section.norm_eps, section.tie_embeddings, section.compute_dtype, section.vocab_multiple,
    )  # fmt: skip
    return with_choices(section, decoder), None


def with_choices(section: schema.Model, decoder: DecoderConfig) -> DecoderConfig:
    """An architecture with what config.model chooses for any."""
    return dataclasses.replace(decoder, remat=section.remat, remat_saves=section.remat_saves, attention=section.attention,
                               cache_dtype=section.cache_dtype)  # fmt: skip


def adapted(section: schema.Lora, base: Model, family: Family | None) -> Model:
    """The model with the adapters of config.lora; those of config.lora.path, of which adapter_config.json is read, need the
    family of their base."""
    if section.path:
        return dataclasses.replace(base, lora=peft_config.read_adapted(section.path, family, base).lora)
    adapters = Lora(section.rank, section.alpha, section.targets, section.rank_stabilised, section.dora)
    return dataclasses.replace(base, lora=adapters if section.rank else None)


def configured_model(config: schema.Config, vocab: int, head: str = "lm", sharding: Sharding | None = None) -> Model:
    """The run's architecture, with its adapters. vocab is the tokenizer's size."""
    decoder, family = configured_decoder(config.model, vocab)
    return adapted(config.lora, Model(decoder, head, sharding), family)
