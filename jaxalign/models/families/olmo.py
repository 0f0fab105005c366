"""OLMo 2 and 3 (arXiv 2501.00656, 2512.13961): norms after attention and MLP only, queries and keys normalised over all heads;
OLMo 3 also has a window in three of four layers."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Fields, activation, rope, scaled_rope, sizes, windows


def olmo2(fields: Fields) -> dict[str, Any]:
    return _common(fields) | rope(fields)


def olmo3(fields: Fields) -> dict[str, Any]:
    arguments = _common(fields)
    local = tuple((layer + 1) % 4 != 0 for layer in range(arguments["layers"]))
    arguments |= windows(fields, fields.integer("sliding_window", 4096), local)
    kinds = Fields(fields.path, fields.mapping("rope_parameters"))
    base, near = fields.real("rope_theta", 5e5), kinds.mapping("sliding_attention")
    # Only the layers without a window may be scaled.
    Fields(fields.path, near).only("rope_type", "default")
    local_base = scaled_rope(fields, near, base)["rope_base"]
    turning = scaled_rope(fields, kinds.mapping("full_attention") | fields.mapping("rope_scaling"), base)
    kinds.finish()
    return arguments | turning | {"local_rope_base": local_base}


def _common(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return sizes(fields, eps=1e-5, tied=False) | {
        "activation": activation(fields, "hidden_act", "silu"), "qkv_bias": bias, "out_bias": bias, "head_norm": True,
        "joint_head_norm": True, "sandwich_norms": True, "pre_norms": False,
    }
