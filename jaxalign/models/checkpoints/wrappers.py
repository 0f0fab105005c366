"""Text models inside of multimodal models: the fields of their config and the names of their weights.

A multimodal folder has the text model's fields in `text_config` and its weights under a prefix. Text without images passes only
through the text model, so its outputs are those of the whole model.
"""

from __future__ import annotations

import functools
import logging
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from jaxalign.errors import UserError

WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama", "llava_next": "llama"}
"""The multimodal models, and the text model that each has if text_config does not name one."""
# The sizes that `transformers` assumes for a text_config that lacks them, as released files do.
_SIZES = {
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 131072,
    },
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
_NAME = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")


def text_fields(path: pathlib.Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json for the text model of a multimodal model.

    Raises:
      UserError: text_config is not an object, or `architectures` has another head than a language model's.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{path}: text_config is {str(text)[:60]!r}; the fields of the text model are expected, since "
                        f"model_type is {raw['model_type']!r}")
    named = raw.get("architectures") or []
    if not isinstance(named, list) or any(not str(name).endswith("ForConditionalGeneration") for name in named):
        raise UserError(f"{path}: architectures is {str(named)[:60]}; a ...ForConditionalGeneration is expected, since "
                        f"model_type is {raw['model_type']!r}")
    given = {name: value for name, value in text.items() if value is not None and name != "architectures"}
    kind = given.get("model_type", WRAPPERS[raw["model_type"]])
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    tied = {name: raw[name] for name in ("tie_word_embeddings",) if isinstance(raw.get(name), bool) and name not in given}
    # A null window means no window, but an absent one is that of the first Mistral.
    window = {"sliding_window": None} if "sliding_window" in text else {}
    sizes = _SIZES.get(kind, {}) if isinstance(kind, str) else {}
    return window | sizes | given | tied | shared | {"model_type": kind}


def text_weights(names: Iterable[str]) -> dict[str, str]:
    """The stored name of each weight of the text model, by its name in a text model of its own."""
    found = {}
    for name in names:
        inner = _NAME.fullmatch(name)
        if name.startswith("lm_head."):
            found[name] = name
        elif inner is not None:
            found[inner[1] if inner[1].startswith("lm_head.") else f"model.{inner[1]}"] = name
    return found


@functools.cache
def say_text_only(folder: pathlib.Path, kind: str) -> None:
    """Prints once that only the text model of the folder is loaded."""
    logging.getLogger("jaxalign").warning(
        "%s is a multimodal model (%s); only its text model is loaded, and exports contain only the text model", folder, kind
    )
