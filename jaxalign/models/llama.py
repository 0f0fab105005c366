"""Hugging Face Llama checkpoints as parameters of the decoder: what config.json may say, and where each weight goes.

Layout of the files: LlamaForCausalLM of the `transformers` library. Projections are stored [out, in] and the decoder
keeps [in, out] with heads split, so each weight is transposed; rotary positions are in the halves convention on both
sides.

Dimension letters: D model, H query heads, K key/value heads, h head dim, F mlp, L layers, V vocab.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxalign.data.tokenizer import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.decoder import DecoderConfig
from jaxalign.models.model import Model, Params
from jaxalign.models.safetensors import Weights, open_weights
from jaxalign.parallel.sharding import Sharding

# Settings of config.json that would change the computation, with the only values this decoder computes. Absent is fine.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """What config.json says: the decoder, the longest text it was made for, and its special tokens (None: not said)."""

    decoder: DecoderConfig
    max_positions: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]


class Pretrained(NamedTuple):
    """A model with its weights and tokenizer."""

    model: Model
    params: Params
    tokenizer: Tokenizer


def load_pretrained(
    folder: str | pathlib.Path, *, max_length: int = 0, compute_dtype: str = "float32", sharding: Sharding | None = None
) -> Pretrained:
    """Everything a run needs of a folder with config.json, safetensors and its tokenizer.

    Args:
      folder: the checkpoint.
      max_length: the longest sequence the run will use; 0 does not ask.
      compute_dtype: of activations; parameters become float32.
      sharding: where the parameters go; None for one device.

    Raises:
      UserError: something is missing, damaged, unsupported, or does not fit together.
    """
    folder = pathlib.Path(folder).expanduser()
    config = read_config(folder, compute_dtype)
    if config.max_positions is not None and max_length > config.max_positions:
        raise UserError(
            f"model.max_length is {max_length}, but {folder} was made for at most {config.max_positions} positions; "
            "lower it"
        )
    tokenizer = load_tokenizer(folder)
    check_vocabulary(folder, config, tokenizer)
    model = Model(config.decoder, "lm", sharding)
    return Pretrained(model, load_params(folder, model), tokenizer)


def read_config(folder: str | pathlib.Path, compute_dtype: str = "float32") -> LlamaConfig:
    """Reads config.json.

    Raises:
      UserError: it is missing or broken, or asks for what the decoder does not compute (named, with its value).
    """
    path = pathlib.Path(folder).expanduser() / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; model.path must be a folder in Hugging Face layout, with config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not JSON ({error}); get it again") from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UserError(f"{path} is not a model's config: it has no model_type; 'llama' is expected")
    for name, values in _SUPPORTED.items():
        if name in raw and raw[name] not in values:
            raise UserError(f"{path}: {name} is {raw[name]!r}, which is not supported; {values[0]!r} is expected")
    width, heads = _number(path, raw, "hidden_size"), _number(path, raw, "num_attention_heads")
    try:
        decoder = DecoderConfig(
            vocab=_number(path, raw, "vocab_size"),
            layers=_number(path, raw, "num_hidden_layers"),
            embed=width,
            heads=heads,
            kv_heads=_number(path, raw, "num_key_value_heads", heads),
            head_dim=_number(path, raw, "head_dim", width // heads),
            mlp=_number(path, raw, "intermediate_size"),
            rope_base=_rope_base(path, raw),
            norm_eps=_number(path, raw, "rms_norm_eps", 1e-6, float),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            compute_dtype=compute_dtype,
        )
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    positions = raw.get("max_position_embeddings")
    positions = None if positions is None else _number(path, raw, "max_position_embeddings")
    eos = raw.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return LlamaConfig(decoder, positions, raw.get("bos_token_id"), eos_ids)


def _number(path: pathlib.Path, raw: dict[str, Any], name: str, default: Any = None, kind: type = int):
    value = raw.get(name)
    value = default if value is None else value
    allowed = (int, float) if kind is float else int
    if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
        raise UserError(f"{path}: {name} is {value!r}; a positive {kind.__name__} is expected")
    return kind(value)


def _rope_base(path: pathlib.Path, raw: dict[str, Any]) -> float:
    """rope_theta, at the top or (transformers 5) in rope_parameters; scaled rotary positions are refused."""
    found = raw
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if not isinstance(rope, dict) or kind != "default":
            raise UserError(
                f"{path}: {name} asks for {kind!r} rotary positions, which are not supported; 'default' is expected"
            )
        found = rope if rope.get("rope_theta") is not None else found
    return _number(path, found, "rope_theta", 10000.0, float)


def check_vocabulary(folder: str | pathlib.Path, config: LlamaConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError where the tokenizer, or a stop id of the folder, has an id that the embedding lacks.

    The embedding may be larger: some are padded. Where the files disagree about bos and eos, the tokenizer's begin and end
    a text, and the other ends are stop ids beside its own (`Tokenizer.stop_ids`).
    """
    highest = max(tokenizer.vocab_size - 1, *tokenizer.stop_ids)
    if highest >= config.decoder.vocab:
        raise UserError(
            f"the tokenizer in {folder} has ids up to {highest}, but config.json says vocab_size {config.decoder.vocab}; give "
            "the tokenizer that the weights were trained with"
        )


class _Place(NamedTuple):
    """One weight: its path in the parameter tree, its stored shape, and how the stored array becomes the decoder's."""

    path: tuple[str, ...]
    stored: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray]


def _same(w: np.ndarray) -> np.ndarray:
    return w


def _layer_places(c: DecoderConfig) -> dict[str, _Place]:
    """By the name after "model.layers.N."; in the tree these leaves are stacked on a leading L."""
    D, H, K, h, F = c.embed, c.heads, c.kv_heads, c.head_dim, c.mlp

    def split(heads: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda w: w.T.reshape(D, heads, h)

    return {
        "input_layernorm.weight": _Place(("attention_norm", "scale"), (D,), _same),
        "self_attn.q_proj.weight": _Place(("attention", "query"), (H * h, D), split(H)),
        "self_attn.k_proj.weight": _Place(("attention", "key"), (K * h, D), split(K)),
        "self_attn.v_proj.weight": _Place(("attention", "value"), (K * h, D), split(K)),
        "self_attn.o_proj.weight": _Place(("attention", "out"), (D, H * h), lambda w: w.T.reshape(H, h, D)),
        "post_attention_layernorm.weight": _Place(("mlp_norm", "scale"), (D,), _same),
        "mlp.gate_proj.weight": _Place(("mlp", "gate"), (F, D), np.transpose),
        "mlp.up_proj.weight": _Place(("mlp", "up"), (F, D), np.transpose),
        "mlp.down_proj.weight": _Place(("mlp", "down"), (D, F), np.transpose),
    }


def _outer_places(c: DecoderConfig) -> dict[str, _Place]:
    places = {
        "model.embed_tokens.weight": _Place(("embedding",), (c.vocab, c.embed), _same),
        "model.norm.weight": _Place(("final_norm", "scale"), (c.embed,), _same),
    }
    if not c.tie_embeddings:
        places["lm_head.weight"] = _Place(("unembedding",), (c.vocab, c.embed), np.transpose)
    return places


def load_params(folder: str | pathlib.Path, model: Model) -> Params:
    """The float32 parameters of `model` (head "lm") from the folder's safetensors, sharded as the model is.

    One leaf at a time is held on the host. A stored lm_head of a tied model and old rotary tables are not read: both
    follow from the rest.

    Raises:
      UserError: weights are missing, left over, of a wrong shape or type, or not finite, or the mesh does not divide
        them.
    """
    _check_mesh(model)
    outer, layer = _outer_places(model.config), _layer_places(model.config)
    expected = {name: place.stored for name, place in outer.items()}
    layers = range(model.config.layers)
    expected |= {f"model.layers.{i}.{name}": place.stored for i in layers for name, place in layer.items()}
    tied = model.config.tie_embeddings
    shardings = model.shardings()
    params: Params = {}
    with open_weights(folder) as weights:
        weights.check(
            expected, lambda name: name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
        )
        for name, place in outer.items():
            _put(params, place.path, place.convert(_read(weights, name)), shardings)
        for name, place in layer.items():
            stack = np.stack([place.convert(_read(weights, f"model.layers.{i}.{name}")) for i in layers])
            _put(params, ("blocks", *place.path), stack, shardings)
    return params


def _check_mesh(model: Model) -> None:
    if model.sharding is None:
        return
    c, mesh = model.config, model.sharding.mesh.shape
    split = {
        "tensor": {"query heads": c.heads, "key/value heads": c.kv_heads, "MLP width": c.mlp, "vocabulary": c.vocab}
    }
    for axis, sizes in (split | {"fsdp": {"hidden size": c.embed}}).items():
        for name, size in sizes.items():
            if size % mesh[axis]:
                raise UserError(
                    f"mesh.{axis} is {mesh[axis]}; it must divide the checkpoint's {name} ({size}): give another mesh"
                )


def _read(weights: Weights, name: str) -> np.ndarray:
    value = weights.read(name)
    if not np.isfinite(value).all():
        raise UserError(f"{name} in {weights.folder} holds numbers that are not finite; get the weights again")
    return value


def _put(params: Params, path: tuple[str, ...], value: np.ndarray, shardings: Any) -> None:
    """Places one leaf on the device(s) and in the tree."""
    for part in path[:-1]:
        params = params.setdefault(part, {})
    for part in path if shardings is not None else ():
        shardings = shardings[part]
    params[path[-1]] = jax.device_put(np.ascontiguousarray(value), shardings)
