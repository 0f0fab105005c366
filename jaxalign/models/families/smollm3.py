"""SmolLM 3 (https://hf.co/blog/smollm3): Llama in which every fourth layer has no rotary positions."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families import llama
from jaxalign.models.families.base import Fields, rope, windows


def decoder(fields: Fields) -> dict[str, Any]:
    used = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window") if used and fields.get("sliding_window") is not None else None
    arguments = llama.biased_sizes(fields, tied=True) | rope(fields, 2e6)
    every, given = fields.integer("no_rope_layer_interval", 4), fields.get("no_rope_layers")
    fields.get("max_window_layers")
    unrotated = tuple((layer + 1) % every == 0 for layer in range(arguments["layers"]))
    if given is not None:  # 1 stands for a layer with rotary positions.
        if not isinstance(given, list) or set(map(str, given)) - {"0", "1"} or len(given) < len(unrotated):
            raise fields.unsupported("no_rope_layers", given, "0 or 1 for each layer")
        unrotated = tuple(flag == 0 for flag in given[: len(unrotated)])
    fields.get("sliding_window")
    return arguments | windows(fields, window, unrotated) | {"unrotated_layers": unrotated if any(unrotated) else ()}
