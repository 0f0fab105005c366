"""Model families: how to build a decoder from the config.json of a Hugging Face folder, and where each weight is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxalign.registry.core import Registry, load_object


@dataclasses.dataclass(frozen=True)
class Family:
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

    @property
    def name(self) -> str:
        """The name in the registry: `model_type`."""
        return self.model_type

    @property
    def classifier(self) -> str:
        """The name in config.json of the architecture with a scalar head."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")

    def decoder_arguments(self, fields: Any) -> dict[str, Any]:
        """Calls `decoder`."""
        return self._load(self.decoder)(fields)

    def stored_weights(self, config: Any) -> tuple:
        """Calls `weights`."""
        return self._load(self.weights)(config)

    def _load(self, function: Callable | str) -> Callable:
        if isinstance(function, str):
            return load_object(function, f"a function of model family {self.model_type!r}")
        return function


_HERE = "jaxalign.models.families"


def _builtin(
    model_type: str, architecture: str, module: str = "", own_weights: bool = False, lm_head: str = "lm_head.weight"
) -> Family:
    module = f"{_HERE}.{module or model_type}"
    weights = f"{module}:weights" if own_weights else f"{_HERE}.base:llama_weights"
    return Family(model_type, architecture, f"{module}:decoder", weights, lm_head)


FAMILIES = Registry("model family", Family, (
    _builtin("llama", "LlamaForCausalLM"),
    _builtin("mistral", "MistralForCausalLM"),
    _builtin("mixtral", "MixtralForCausalLM", own_weights=True),
    _builtin("qwen2", "Qwen2ForCausalLM"),
    _builtin("qwen3", "Qwen3ForCausalLM"),
    _builtin("qwen3_moe", "Qwen3MoeForCausalLM", own_weights=True),
    _builtin("gemma", "GemmaForCausalLM"),
    _builtin("gemma2", "Gemma2ForCausalLM"),
    _builtin("gemma3_text", "Gemma3ForCausalLM", "gemma3"),
    _builtin("gpt_neox", "GPTNeoXForCausalLM", "neox", own_weights=True, lm_head="embed_out.weight"),
))


def use_family(name: str, where: str) -> Family:
    """Registers the family at "package.module:name" or "FILE.py:name", so that folders with its model_type can be read.

    where: the field or argument with the name, for error messages.

    Raises:
      UserError: there is no family at `name`, or a different family has the same model_type.
    """
    return FAMILIES.register(FAMILIES.get(name, where))
