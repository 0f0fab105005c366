"""Model families: how to build a decoder from the config.json of a Hugging Face folder, and where each weight is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.registry.core import Record, Registry


@dataclasses.dataclass(frozen=True)
class Family(Record):
    """A family of models.

    Attributes:
      model_type: the model_type in config.json, which selects the family.
      architecture: the language model's architecture in config.json ("...ForCausalLM").
      decoder: `decoder(fields: Fields) -> dict`, which maps the fields of config.json to the arguments of `DecoderConfig`; or
        "module:attribute" of such a function, imported on first use (`jaxalign.models.families.base`).
      weights: `weights(config: DecoderConfig) -> tuple[Weight, ...]`, which returns all weights except those of the heads
        (`lm_head` and "score.weight"); or "module:attribute" of such a function.
      lm_head: the name under which the untied output projection [V, D] is stored.
    """

    model_type: str
    architecture: str
    decoder: Callable[[Any], dict[str, Any]] | str
    weights: Callable[[Any], tuple] | str
    lm_head: str = "lm_head.weight"

    _where = "a function of model family {name!r}"

    @property
    def name(self) -> str:
        """The name in the registry: `model_type`."""
        return self.model_type

    @property
    def classifier(self) -> str:
        """The name in config.json of the architecture with a scalar head."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")


_MODULES = "jaxalign.models.families"
_LLAMA_WEIGHTS = f"{_MODULES}.base:llama_weights"

FAMILIES = Registry("model family", Family, (
    Family("llama", "LlamaForCausalLM", f"{_MODULES}.llama:decoder", _LLAMA_WEIGHTS),
    Family("mistral", "MistralForCausalLM", f"{_MODULES}.mistral:decoder", _LLAMA_WEIGHTS),
    Family("mixtral", "MixtralForCausalLM", f"{_MODULES}.mixtral:decoder", f"{_MODULES}.mixtral:weights"),
    Family("qwen2", "Qwen2ForCausalLM", f"{_MODULES}.qwen2:decoder", _LLAMA_WEIGHTS),
    Family("qwen3", "Qwen3ForCausalLM", f"{_MODULES}.qwen3:decoder", _LLAMA_WEIGHTS),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", f"{_MODULES}.qwen3_moe:decoder", f"{_MODULES}.qwen3_moe:weights"),
    Family("gemma", "GemmaForCausalLM", f"{_MODULES}.gemma:decoder", _LLAMA_WEIGHTS),
    Family("gemma2", "Gemma2ForCausalLM", f"{_MODULES}.gemma2:decoder", _LLAMA_WEIGHTS),
    Family("gemma3_text", "Gemma3ForCausalLM", f"{_MODULES}.gemma3:decoder", _LLAMA_WEIGHTS),
    Family("phi3", "Phi3ForCausalLM", f"{_MODULES}.phi3:decoder", f"{_MODULES}.phi3:weights"),
    Family("olmo2", "Olmo2ForCausalLM", f"{_MODULES}.olmo:olmo2", _LLAMA_WEIGHTS),
    Family("olmo3", "Olmo3ForCausalLM", f"{_MODULES}.olmo:olmo3", _LLAMA_WEIGHTS),
    Family("smollm3", "SmolLM3ForCausalLM", f"{_MODULES}.smollm3:decoder", _LLAMA_WEIGHTS),
    Family("granite", "GraniteForCausalLM", f"{_MODULES}.granite:decoder", _LLAMA_WEIGHTS),
    Family("gpt_neox", "GPTNeoXForCausalLM", f"{_MODULES}.neox:decoder", f"{_MODULES}.neox:weights", "embed_out.weight"),
))


def use_family(name: str, where: str) -> Family:
    """Registers the family at "package.module:name" or "FILE.py:name", so that folders with its model_type can be read.

    where: the field or argument with the name, for error messages.

    Raises:
      UserError: there is no family at `name`, or a different family has the same model_type.
    """
    return FAMILIES.register(FAMILIES.get(name, where))
