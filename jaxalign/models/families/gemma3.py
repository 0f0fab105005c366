"""Gemma 3 text models (arXiv 2503.19786): five local layers per global layer, each kind with its own rotary base."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Fields, scaled_rope, windows
from jaxalign.models.families.gemma2 import capped_sizes


def decoder(fields: Fields) -> dict[str, Any]:
    arguments = capped_sizes(fields, None, None)
    every = fields.integer("sliding_window_pattern", 6)
    local = tuple((layer + 1) % every != 0 for layer in range(arguments["layers"]))
    return arguments | _ropes(fields) | {"head_norm": True} | windows(fields, fields.integer("sliding_window", 4096), local)


def _ropes(fields: Fields) -> dict[str, Any]:
    """The rotary bases of both kinds of layers. Only the global layers' frequencies may be scaled."""
    kinds = Fields(fields.path, fields.mapping("rope_parameters"))
    wide = kinds.mapping("full_attention") | fields.mapping("rope_scaling")
    arguments = scaled_rope(fields, wide, fields.real("rope_theta", 1e6))
    near = scaled_rope(fields, kinds.mapping("sliding_attention"), fields.real("rope_local_base_freq", 1e4))
    kinds.finish()
    if near.get("rope_scaling") is not None:
        raise fields.unsupported("rope_type of sliding_attention", near["rope_scaling"].kind, "default")
    return arguments | {"local_rope_base": near["rope_base"]}
