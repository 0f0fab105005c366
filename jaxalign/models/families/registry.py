"""The families by the model_type of config.json."""

from __future__ import annotations

from jaxalign.models.families import gemma, gemma2, gemma3, llama, mistral, mixtral, neox, qwen2, qwen3, qwen3_moe
from jaxalign.models.families.base import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma, gemma2, gemma3, neox)
}
