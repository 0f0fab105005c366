"""Builds the model that a config describes: its sizes, adapters and sharding; no weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxalign import config as schema
from jaxalign.config.finished import base_stage, tokenizer_path
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters import peft_config
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.families import Family, use_family


def base_config(config: schema.Config, workdir: Path) -> huggingface.CheckpointConfig:
    """The config.json of the base model of the run in `workdir`: the file in the folder of a pretrained model, that of the base
    of the run for a stage of another run, or fields that describe a model from scratch as a Llama.

    Raises UserError if a file is missing or does not describe a language model.
    """
    section = config.model
    if section.source == "huggingface":
        if section.family:
            use_family(section.family, "config.model.family")
        stage = base_stage(config)
        return huggingface.read_config(section.path) if stage is None else base_config(stage.config, stage.workdir)
    tokenizer = load_tokenizer(tokenizer_path(config, workdir))
    fields = config_json(configured_decoder(config, tokenizer.vocab_size)[0], section.max_length)
    fields |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return huggingface.parse_config(workdir / "pretrain" / "config.json", fields)


def configured_decoder(config: schema.Config, vocab: int) -> tuple[DecoderConfig, Family | None]:
    """The architecture of config.model, and its family if model.source is "huggingface" (else None). vocab is the tokenizer's
    size; a pretrained model uses the size in its config.json, which may be larger. No weights are read.

    Raises UserError if config.json is missing or does not describe a language model.
    """
    section = config.model
    if section.source == "huggingface":
        pretrained = base_config(config, Path())
        if pretrained.head != "lm":
            raise UserError(f"model.path is {section.path}, a {pretrained.family.classifier}; a language model is expected")
        decoder = dataclasses.replace(
            pretrained.decoder, compute_dtype=section.compute_dtype, vocab_multiple=section.vocab_multiple
        )
        return with_choices(section, decoder), pretrained.family
    decoder = DecoderConfig(
        vocab, section.layers, section.embed, section.heads, section.kv_heads, section.head_dim, section.mlp,
        section.rope_base, section.norm_eps, section.tie_embeddings, section.compute_dtype, section.vocab_multiple,
    )
    return with_choices(section, decoder), None


def with_choices(section: schema.ModelConfig, decoder: DecoderConfig) -> DecoderConfig:
    """The architecture with the fields of config.model that apply to every source."""
    return dataclasses.replace(decoder, remat=section.remat, remat_saves=section.remat_saves, attention=section.attention,
                               cache_dtype=section.cache_dtype)


def adapted(section: schema.Lora, base: Model, family: Family | None) -> Model:
    """The model with the adapters of config.lora. Adapters from config.lora.path, whose adapter_config.json is read, need the
    family of their base model."""
    if section.path:
        return dataclasses.replace(base, lora=peft_config.read_adapted(section.path, family, base).lora)
    adapters = LoraAdapters(section.rank, section.alpha, section.targets, section.rank_stabilised, section.dora)
    return dataclasses.replace(base, lora=adapters if section.rank else None)


def configured_model(config: schema.Config, vocab: int, head: str, sharding: Sharding) -> Model:
    """The run's model, with its adapters. vocab is the tokenizer's size."""
    decoder, family = configured_decoder(config, vocab)
    return adapted(config.lora, Model(decoder, head, sharding), family)
