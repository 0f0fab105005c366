"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): LayerNorm, partial rotary positions, parallel attention and MLP."""

from __future__ import annotations

from typing import Any

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.families.base import Fields, Weight, activation, rope, sizes


def decoder(fields: Fields) -> dict[str, Any]:
    arguments, bias = sizes(fields, eps=1e-5, tied=False), fields.flag("attention_bias", True)
    turning = rope(fields, fields.real("rotary_emb_base", 10000.0), partial=True)
    share = fields.real("rotary_pct", 0.25)
    share = turning.pop("partial", share)
    return arguments | turning | {
        "norm": "layer", "norm_eps": fields.real("layer_norm_eps", 1e-5), "gated": False,
        "activation": activation(fields, "hidden_act", "gelu"), "rotary_dim": int(arguments["head_dim"] * share),
        "qkv_bias": bias, "out_bias": bias, "mlp_bias": True,
        "parallel_residual": fields.flag("use_parallel_residual", True),
    }


def weights(c: DecoderConfig) -> tuple[Weight, ...]:
    at = "gpt_neox.layers.{layer}."
    leaves = [
        Weight("gpt_neox.embed_in.weight", ("embedding",), "V D -> V D"),
        Weight(f"{at}mlp.dense_h_to_4h.weight", ("blocks", "mlp", "up"), "F D -> D F"),
        Weight(f"{at}mlp.dense_h_to_4h.bias", ("blocks", "mlp", "up_bias"), "F -> F"),
        Weight(f"{at}mlp.dense_4h_to_h.weight", ("blocks", "mlp", "down"), "D F -> F D"),
        Weight(f"{at}mlp.dense_4h_to_h.bias", ("blocks", "mlp", "down_bias"), "D -> D"),
        Weight(f"{at}attention.dense.weight", ("blocks", "attention", "out"), "D (H h) -> H h D"),
    ]
    for part, name in enumerate(("query", "key", "value")):
        fused = f"{at}attention.query_key_value"
        leaves += [Weight(f"{fused}.weight", ("blocks", "attention", name), "(H n h) D -> D H h", part)]
        if c.qkv_bias:
            leaves += [Weight(f"{fused}.bias", ("blocks", "attention", f"{name}_bias"), "(H n h) -> H h", part)]
    if c.out_bias:
        leaves += [Weight(f"{at}attention.dense.bias", ("blocks", "attention", "out_bias"), "D -> D")]
    norms = (
        (f"{at}input_layernorm", ("blocks", "attention_norm")), (f"{at}post_attention_layernorm", ("blocks", "mlp_norm")),
        ("gpt_neox.final_layer_norm", ("final_norm",)),
    )
    for stored, path in norms:
        leaves += [Weight(f"{stored}.weight", (*path, "scale"), "D -> D"), Weight(f"{stored}.bias", (*path, "bias"), "D -> D")]
    return tuple(leaves)
