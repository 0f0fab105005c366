"""Building blocks for model families: reading config.json, and where each weight is stored.

A family is a record in `jaxalign.registry.families` with two functions: `decoder(fields)` returns the arguments of
`DecoderConfig`, and `weights(config)` returns the stored weights.

Letters of weight layouts: D model, H query heads, K key/value heads, h head dim, F mlp, V vocab, E experts, n parts of a
fused weight.
"""

from __future__ import annotations

import logging
import math
import pathlib
from typing import Any, NamedTuple

from jaxalign.config.schema import FLOAT32_MAX, FLOAT32_TINY
from jaxalign.errors import UserError, shown
from jaxalign.models.architecture import DecoderConfig, RopeScaling


class Weight(NamedTuple):
    """One weight of the decoder and where it is stored.

    stored: its name in the files; "{layer}" and "{expert}" stand for the indices along which the decoder's leaf is stacked.
    path: its path in the parameter tree.
    layout: "stored axes -> the decoder's axes" by letters, such as "(H h) D -> D H h"; axes in parentheses are merged.
    pick: the index of this part in a fused weight. If the letter n occurs only on the left of the layout, it is the index along
      n; otherwise the parts of the same `stored` name follow each other along the first stored axis.
    """

    stored: str
    path: tuple[str, ...]
    layout: str
    pick: int = 0


LARGEST = 2**31 - 1
"""The largest size and token id of a model: arrays are indexed by int32."""
# Lists with an entry for each layer and the frequencies of a head are built before weights are compared with config.json.
_MOST_LAYERS, _WIDEST_HEAD = 10_000, 65_536

# Fields that do not affect the decoder's outputs.
_HARMLESS = frozenset((
    "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "max_position_embeddings", "pretraining_tp", "id2label",
    "label2id", "num_labels", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "torchscript",
    "use_return_dict", "chunk_size_feed_forward", "cache_implementation", "gradient_checkpointing", "classifier_dropout",
    "output_router_logits", "router_aux_loss_coef", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix",
    "attn_implementation", "use_bfloat16",
))


class Fields:
    """The fields of one config.json. `finish` rejects fields that were never read and could matter."""

    def __init__(self, path: pathlib.Path, raw: dict[str, Any]):
        self.path, self.raw, self._read = path, raw, set(_HARMLESS)

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value; the default if it is absent or null."""
        self._read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, most: int = 0) -> int:
        """A positive integer of at most `most`, or LARGEST."""
        value = self._number(name, default, int)
        if most and value > most:
            raise UserError(f"{self.path}: {name} is {value}; at most {most} is expected")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        return self._number(name, default, float)

    def optional_real(self, name: str) -> float | None:
        """A positive number, or None if the field is absent or null."""
        return None if self.get(name) is None else self.real(name)

    def reals(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        values = self.get(name)
        if not isinstance(values, list) or not values:
            raise UserError(f"{self.path}: {name} is {shown(str(values))}; a list of positive numbers is expected")
        return tuple(Fields(self.path, {f"{name}[{i}]": value}).real(f"{name}[{i}]") for i, value in enumerate(values))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.path}: {name} is {value!r}; true or false is expected")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty if the field is absent or null."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: {name} is {value!r}; an object is expected")
        return value

    def choice(self, name: str, table: dict[str, Any], default: str | None = None) -> Any:
        """The entry of `table` for the field's value."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in table:
            raise self.unsupported(name, value, ", ".join(table))
        return table[value]

    def only(self, name: str, *values: Any) -> None:
        """Raises UserError unless the field is absent, null or one of the values."""
        value = self.get(name, values[0])
        if value not in values:
            raise self.unsupported(name, value, repr(values[0]))

    def unsupported(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.path}: {name} is {value!r}, which is not supported; {expected} is expected")

    def finish(self) -> None:
        """Raises UserError for a non-empty field that was never read and is not known to be harmless."""
        for name, value in self.raw.items():
            if name not in self._read and not name.startswith("_") and value not in (None, False, "", [], {}):
                raise UserError(f"{self.path}: {shown(name)} is {str(value)[:60]!r}, which this model family does not support; "
                                "remove it only if the model computes the same without it")

    def _number(self, name: str, default: float | None, kind: type):
        value = self.get(name, default)
        allowed, most = ((int, float), FLOAT32_MAX) if kind is float else (int, LARGEST)
        if isinstance(value, bool) or not isinstance(value, allowed) or not value > 0:
            raise UserError(f"{self.path}: {name} is {value!r}; a positive {kind.__name__} is expected")
        if not (FLOAT32_TINY if kind is float else 1) <= value <= most:
            raise UserError(f"{self.path}: {name} is {value!r}; a positive {kind.__name__} of 32 bits is expected")
        return kind(value)


_ACTIVATION_NAMES = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation(fields: Fields, name: str, default: str) -> str:
    """The decoder's name of the activation function in that field."""
    return fields.choice(name, _ACTIVATION_NAMES, default)


def sizes(fields: Fields, eps: float, tied: bool, partial: bool = False) -> dict[str, Any]:
    """The arguments common to all families with Llama's field names; eps and tied are the family's defaults. partial: the
    family reads partial_rotary_factor itself."""
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        rate = fields.get(name, 0)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise UserError(f"{fields.path}: {name} is {shown(str(rate))}; a number from 0 to below 1 is expected")
        if rate:
            logging.getLogger("jaxalign").warning("%s: %s is %s; dropout is not used here", fields.path, name, rate)
    fields.only("quantization_config", None)
    if not partial:
        fields.only("partial_rotary_factor", 1)
    fields.only("is_decoder", False, True)
    fields.only("is_encoder_decoder", False)
    return {
        "vocab": fields.integer("vocab_size"), "layers": fields.integer("num_hidden_layers", most=_MOST_LAYERS), "embed": width,
        "heads": heads, "kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", max(1, width // heads), most=_WIDEST_HEAD),
        "mlp": fields.integer("intermediate_size"), "norm_eps": fields.real("rms_norm_eps", eps),
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def rope(fields: Fields, base: float = 10000.0, partial: bool = False, original: int | None = None) -> dict[str, Any]:
    """rope_base and rope_scaling, from rope_theta and rope_scaling or (transformers 5) rope_parameters; with `partial` also,
    as "partial", the share of a head that is rotated, if it is given. original: see `scaled_rope`."""
    values: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):  # If both are given, the latter counts.
        values = dict(fields.mapping(name)) or values
    share = values.pop("partial_rotary_factor", None) if partial else None
    arguments = scaled_rope(fields, values, fields.real("rope_theta", base), original)
    return arguments if share is None else arguments | {"partial": share}


def scaled_rope(fields: Fields, values: dict[str, Any], base: float, original: int | None = None) -> dict[str, Any]:
    """rope_base and rope_scaling from one object with rope_type, rope_theta and the fields of that type.

    original: the positions of the first training, if a field outside the object gives them.
    """
    inner = Fields(fields.path, values)
    kind = inner.get("rope_type", inner.get("type", "default"))
    inner.get("type")
    arguments = {"rope_base": inner.real("rope_theta", base)}
    if kind == "linear":
        arguments["rope_scaling"] = RopeScaling("linear", inner.real("factor"))
    elif kind == "llama3":
        arguments["rope_scaling"] = RopeScaling(
            "llama3", inner.real("factor"), inner.real("low_freq_factor"), inner.real("high_freq_factor"),
            inner.integer("original_max_position_embeddings"),
        )
    elif kind in _LONG:
        if arguments["rope_base"] <= 1:
            raise fields.unsupported("rope_theta", arguments["rope_base"], "a number above 1")
        arguments["rope_scaling"] = _LONG[kind](fields, inner, original)
    elif kind != "default":
        names = ", ".join(("default", "linear", "llama3", *_LONG))
        raise fields.unsupported("the type of rotary positions (rope_type)", kind, f"one of {names}")
    inner.only("partial_rotary_factor", 1)
    inner.finish()
    return arguments


def _extension(fields: Fields, inner: Fields, original: int | None) -> tuple[int, float]:
    """The positions of the first training, and by how much the context was extended since."""
    given = inner.get("original_max_position_embeddings")
    if original is None and given is None:
        original = fields.integer("max_position_embeddings")
    elif original is None:
        original = inner.integer("original_max_position_embeddings")
    if original < 2:
        raise fields.unsupported("original_max_position_embeddings", original, "a number above 1")
    factor = inner.optional_real("factor")
    return original, fields.integer("max_position_embeddings") / original if factor is None else factor


def _yarn(fields: Fields, inner: Fields, original: int | None) -> RopeScaling:
    original, factor = _extension(fields, inner, original)

    def growth(slope: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0

    slopes = [inner.optional_real(name) for name in ("mscale", "mscale_all_dim")]
    usual = growth(1.0) if None in slopes else growth(slopes[0]) / growth(slopes[1])
    return RopeScaling(
        "yarn", factor, inner.real("beta_slow", 1.0), inner.real("beta_fast", 32.0), original,
        inner.real("attention_factor", usual), inner.flag("truncate", True),
    )


def _longrope(fields: Fields, inner: Fields, original: int | None) -> RopeScaling:
    """Only the frequencies of texts within the original positions: those of longer texts differ, and a text that grows beyond
    the limit would need new keys for all of its tokens."""
    original, factor = _extension(fields, inner, original)
    inner.reals("long_factor")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling("longrope", factor, original_positions=original, magnitude=inner.real("attention_factor", usual),
                       divisors=inner.reals("short_factor"), positions=original)


def _dynamic(fields: Fields, inner: Fields, original: int | None) -> None:
    """No scaling: the frequencies change only beyond max_position_embeddings, which is the longest sequence here."""
    fields.integer("max_position_embeddings")
    inner.real("factor")


_LONG = {"yarn": _yarn, "longrope": _longrope, "su": _longrope, "dynamic": _dynamic}  # The first Phi 3 files say "su".
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


def windows(fields: Fields, window: int | None, usual: tuple[bool, ...]) -> dict[str, Any]:
    """window and local_layers. usual: which layers have the window if layer_types is not given."""
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or set(types) - set(_LAYER_TYPES) or len(types) != len(usual):
            raise fields.unsupported("layer_types", types, f"one of {', '.join(_LAYER_TYPES)} for each layer")
        usual = tuple(_LAYER_TYPES[kind] for kind in types)
    return {"window": window, "local_layers": usual} if window is not None and any(usual) else {}


_DENSE = (
    ("mlp.gate_proj", ("mlp", "gate"), "F D -> D F"),
    ("mlp.up_proj", ("mlp", "up"), "F D -> D F"),
    ("mlp.down_proj", ("mlp", "down"), "D F -> F D"),
)


def llama_weights(c: DecoderConfig, experts: tuple[str, str, str, str] | None = None) -> tuple[Weight, ...]:
    """The weights of a decoder whose family uses Llama's weight names.

    experts: stored names, after "model.layers.N.", of the router and of an expert's gate, up and down projections.
    """
    names = [
        ("self_attn.q_proj.weight", ("attention", "query"), "(H h) D -> D H h"),
        ("self_attn.k_proj.weight", ("attention", "key"), "(K h) D -> D K h"),
        ("self_attn.v_proj.weight", ("attention", "value"), "(K h) D -> D K h"),
        ("self_attn.o_proj.weight", ("attention", "out"), "D (H h) -> H h D"),
    ]
    norms = {}
    if c.pre_norms:
        norms = {"input": "attention_norm", "pre_feedforward" if c.sandwich_norms else "post_attention": "mlp_norm"}
    if c.sandwich_norms:
        norms |= {"post_attention": "after_attention_norm", "post_feedforward": "after_mlp_norm"}
    names += [(f"{stored}_layernorm.weight", (norm, "scale"), "D -> D") for stored, norm in norms.items()]
    if c.qkv_bias:
        names += [
            ("self_attn.q_proj.bias", ("attention", "query_bias"), "(H h) -> H h"),
            ("self_attn.k_proj.bias", ("attention", "key_bias"), "(K h) -> K h"),
            ("self_attn.v_proj.bias", ("attention", "value_bias"), "(K h) -> K h"),
        ]
    if c.out_bias:
        names += [("self_attn.o_proj.bias", ("attention", "out_bias"), "D -> D")]
    if c.head_norm:
        queries, keys = ("(H h) -> H h", "(K h) -> K h") if c.joint_head_norm else ("h -> h", "h -> h")
        names += [
            ("self_attn.q_norm.weight", ("attention", "query_norm", "scale"), queries),
            ("self_attn.k_norm.weight", ("attention", "key_norm", "scale"), keys),
        ]
    if experts is None:
        for stored, path, layout in _DENSE:
            names += [(f"{stored}.weight", path, layout)]
            if c.mlp_bias:
                width = layout[0]
                names += [(f"{stored}.bias", (path[0], f"{path[1]}_bias"), f"{width} -> {width}")]
    else:
        router, *kernels = experts
        names += [(router, ("mlp", "router"), "E D -> D E")]
        names += [(name, path, layout) for name, (_, path, layout) in zip(kernels, _DENSE, strict=True)]
    return (
        Weight("model.embed_tokens.weight", ("embedding",), "V D -> V D"),
        Weight("model.norm.weight", ("final_norm", "scale"), "D -> D"),
        *(Weight(f"model.layers.{{layer}}.{stored}", ("blocks", *path), layout) for stored, path, layout in names),
    )
