"""The decoder: its sizes, where its weights come from, and how it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, one_of
from jaxalign.config.schema import field
from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class Model(Section):
    """The decoder. With source=huggingface its sizes are read from the checkpoint, and those here are not used."""

    source: str = field("scratch", "Where the weights come from.", one_of("scratch", "huggingface"))
    path: str = field("", "Folder of a Hugging Face checkpoint with its tokenizer, for source=huggingface.")
    layers: int = field(4, "Decoder layers.", at_least(1))
    embed: int = field(128, "Width of the residual stream.", at_least(1))
    heads: int = field(4, "Query heads.", at_least(1))
    kv_heads: int = field(2, "Key/value heads; they must divide the query heads.", at_least(1))
    head_dim: int = field(32, "Width of a head; even, for the rotary positions.", at_least(2))
    mlp: int = field(352, "Width of the gated MLP.", at_least(1))
    rope_base: float = field(10000.0, "Base of the rotary frequencies.", above(1))
    norm_eps: float = field(1e-5, "Epsilon of RMSNorm.", above(0))
    tie_embeddings: bool = field(True, "Use the input embedding as the output projection too.")
    vocab_multiple: int = field(1, "The tables' rows are padded to a multiple of this, so that mesh.tensor can divide them.",
                                at_least(1))
    max_length: int = field(320, "Longest prompt and response together, in tokens; longer dialogues are cut at a turn.",
                            at_least(8))
    remat: bool = field(False, "Compute each layer again in the backward pass, keeping only what goes into it: less memory for "
                        "about a third more work.")
    remat_saves: str = field("nothing", "With remat: keep nothing else of a layer, or the results of its products with weights "
                             "too (products): more memory, less computed twice.", one_of("nothing", "products"))
    attention: str = field("auto", "auto: a fused kernel where the platform has one, ring attention where mesh.context splits "
                           "rows; plain: the formula; fused: refused where there is no kernel.",
                           one_of("auto", "plain", "fused"))
    cache_dtype: str = field("compute", "Type of the keys and values that sampling keeps: that of activations (compute), or "
                             "another; int8 has a scale for each token and head, and changes what is sampled a little.",
                             one_of("compute", "float32", "bfloat16", "int8"))
    load_balance_coef: float = field(0.0, "Weight of the load-balancing loss of a model with experts, in supervised training.",
                                     at_least(0))
    compute_dtype: str = field("float32", "Type of activations and matrix products; parameters stay float32. float16 is for "
                               "GPUs without bfloat16, and scales the loss: docs/memory.md.",
                               one_of("float32", "bfloat16", "float16"))

    def check(self, config: WholeConfig, name: str) -> None:
        if self.remat_saves != "nothing" and not self.remat:
            raise UserError(f"config.model.remat_saves is {self.remat_saves!r} but config.model.remat is False, so every "
                            "activation is kept: set remat to True, or remat_saves to 'nothing'")
        if self.source == "huggingface" and not self.path:
            raise UserError("config.model.source is 'huggingface' but config.model.path is empty; set it to the folder "
                            "with config.json, the safetensors weights and the tokenizer")
        if self.source != "huggingface":
            check_heads(self, name)


def check_heads(sizes: Any, name: str) -> None:
    """Checks the attention heads of a decoder whose sizes are in the section `name`."""
    if sizes.heads % sizes.kv_heads:
        raise UserError(f"config.{name}.heads is {sizes.heads}; it must be a multiple of config.{name}.kv_heads "
                        f"({sizes.kv_heads})")
    if sizes.head_dim % 2:
        raise UserError(f"config.{name}.head_dim is {sizes.head_dim}; an even number is expected, for the rotary positions")
