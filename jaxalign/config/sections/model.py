"""The decoder: its sizes, the source of its weights, and how it computes."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import WholeConfig
from jaxalign.config.constraints import above, at_least, one_of
from jaxalign.config.reading import unless, when
from jaxalign.config.schema import field, like
from jaxalign.config.sections.shared import DecoderSizes
from jaxalign.errors import UserError
from jaxalign.registry.families import use_family

_SCRATCH = when("source", "scratch")
_CHECKPOINT = when("source", "huggingface")


@dataclasses.dataclass(frozen=True)
class ModelConfig(DecoderSizes):
    """The decoder. With source=huggingface the checkpoint determines the sizes; leave the sizes here at their defaults."""

    source: str = field("scratch", "Source of the weights: random initialisation (scratch), or the checkpoint at path "
                        "(huggingface).", one_of("scratch", "huggingface"))
    path: str = field("", "Folder of a Hugging Face checkpoint with its tokenizer, or of a finished stage of a run that "
                      "trained a language model, such as runs/x/sft; for source=huggingface.", None, _CHECKPOINT)
    family: str = field("", "Your own model family, as package.module:name or FILE.py:name of a jaxalign Family; empty: the "
                        "family of the model_type in config.json.", None, _CHECKPOINT)
    rope_base: float = field(10000.0, "Base of the rotary frequencies.", above(1), _SCRATCH)
    norm_eps: float = field(1e-5, "Epsilon of RMSNorm.", above(0), _SCRATCH)
    tie_embeddings: bool = field(True, "Share the input embedding with the output projection.", None, _SCRATCH)
    vocab_multiple: int = field(1, "Pad the rows of the embedding tables to a multiple of this, so that mesh.tensor can divide "
                                "them.", at_least(1))
    max_length: int = field(320, "Maximum length of prompt plus response, in tokens; longer dialogues are cut at a turn.",
                            at_least(8))
    remat: bool = field(False, "Recompute each layer in the backward pass and keep only its input: less memory for about a "
                        "third more compute.")
    remat_saves: str = field("nothing", "With remat: save only the layers' inputs (nothing), or also the results of matrix "
                             "products with weights (products), which needs more memory but less recomputation.",
                             one_of("nothing", "products"), unless("remat", False, "to True"))
    attention: str = field("auto", "auto: a fused kernel if the platform has one, ring attention if mesh.context splits rows; "
                           "plain: the plain formula, without a kernel; fused: a kernel, or an error if there is none.",
                           one_of("auto", "plain", "fused"))
    cache_dtype: str = field("compute", "Dtype of the keys and values cached during sampling: compute (the dtype of "
                             "activations) or another; int8 has one scale per token and head, and changes samples slightly.",
                             one_of("compute", "float32", "bfloat16", "int8"))
    load_balance_coef: float = field(0.0, "Weight of the load-balancing loss of mixture-of-experts models in supervised "
                                     "training.", at_least(0), _CHECKPOINT)
    compute_dtype: str = field("float32", "Dtype of activations and matrix products; parameters stay float32. float16 is for "
                               "GPUs without bfloat16, and uses loss scaling; see docs/memory.md.",
                               one_of("float32", "bfloat16", "float16"))
    matmul_precision: str = field("default", "Precision of float32 matrix products: default (the platform's), tensorfloat32 or "
                                  "float32; see docs/memory.md.", one_of("default", "tensorfloat32", "float32"))
    layers: int = like(DecoderSizes, "layers", read_by=(_SCRATCH,))
    embed: int = like(DecoderSizes, "embed", read_by=(_SCRATCH,))
    heads: int = like(DecoderSizes, "heads", read_by=(_SCRATCH,))
    kv_heads: int = like(DecoderSizes, "kv_heads", read_by=(_SCRATCH,))
    head_dim: int = like(DecoderSizes, "head_dim", read_by=(_SCRATCH,))
    mlp: int = like(DecoderSizes, "mlp", read_by=(_SCRATCH,))

    def check(self, config: WholeConfig, name: str) -> None:
        if self.source == "huggingface" and not self.path:
            raise UserError("config.model.source is 'huggingface' but config.model.path is empty; set it to the folder "
                            "with config.json, the safetensors weights and the tokenizer, or to a stage's folder of a run")
        if self.family:
            use_family(self.family, "config.model.family")
        if self.source != "huggingface":
            self.check_heads(name)
