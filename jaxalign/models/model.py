"""A decoder as pure functions of a parameter pytree."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxalign.models import generation
from jaxalign.models.adapters.lora import Adapters, LoraAdapters, adapter_axes, adapter_shapes, init_adapters
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.blocked import continued_attention
from jaxalign.models.attention.dispatch import attention, kind_of_attention
from jaxalign.models.attention.ring import length_multiple
from jaxalign.models.cache import CACHE_AXES, Cache, Caches, Tiers, cache_shapes, joined, restored
from jaxalign.models.decoder import Decoder, Output, Rows
from jaxalign.models.experts import load_balance
from jaxalign.models.gathering import gathered_head, gathered_weights
from jaxalign.models.heads import CHUNK_FLOATS, TokenStats, lm_logits, split_positions, token_stats, weighted_nll
from jaxalign.models.layers import times
from jaxalign.models.unstacked import unstacks
from jaxalign.parallel.sharding import Sharding, one_device
from jaxalign.parallel.zigzag import collect, context_size, deal

Params = Any  # A nested dict of arrays.

LAYERED = {"cpu": 16, "gpu": 48}
"""The maximum number of layers for which decoding unrolls the layers, by platform. Deeper models take too long to compile."""


class Decoding(NamedTuple):
    """The parts of a decoding loop: begin(tiers) -> carried, step(tokens, positions, carried, slot) -> (hidden, carried) and
    end(carried) -> tiers; see `Model.decode`."""

    begin: Callable
    step: Callable
    end: Callable


@functools.cache
def _abstract(config: DecoderConfig, head: str):
    model = nnx.eval_shape(lambda: Decoder(config, head, rngs=nnx.Rngs(params=0)))
    return nnx.split(model)


def unrolls(layers: int, platform: str) -> bool:
    """Whether decoding unrolls this number of layers on a platform."""
    return layers <= LAYERED.get(platform, 0)


@functools.lru_cache(maxsize=64)
def _creation(model: Model) -> Callable[[jax.Array], Params]:
    """The program of `Model.init`. A new function in each call would be traced and compiled again."""

    def create(key):
        return nnx.to_pure_dict(nnx.split(Decoder(model.config, model.head, rngs=nnx.Rngs(params=key)))[1])

    return jax.jit(create, out_shardings=model.shardings())


@functools.lru_cache(maxsize=64)
def _adapter_creation(model: Model) -> Callable[[Params, jax.Array], Params]:
    """The program of `Model.init_adapters`, for the same reason."""

    def create(blocks, key):
        fresh = {"adapters": init_adapters(model.lora, blocks, key)}
        return fresh | ({} if model.head == "lm" else {"score": jnp.zeros((model.config.embed,), jnp.float32)})

    return jax.jit(create, out_shardings=model.shardings())


@dataclasses.dataclass(frozen=True)
class Model:
    """Architecture, head and sharding; no weights. Hashable, so jitted functions may close over it or take it as static.

    head is "lm", "scalar" or "lm_scalar" (both). By default the mesh has one device. With `lora` the model's own parameters
    (in `axes`, `abstract`, `shardings` and a training state) are only its adapters and its scalar head. Forward passes take
    these joined with the frozen parameters of `base` (`lora.join`), or the parameters of the base only.
    """

    config: DecoderConfig
    head: str = "lm"
    sharding: Sharding = dataclasses.field(default_factory=one_device)
    lora: LoraAdapters | None = None

    def with_head(self, head: str) -> Model:
        return dataclasses.replace(self, head=head)

    def on(self, sharding: Sharding) -> Model:
        """This model with another mesh and rules."""
        return dataclasses.replace(self, sharding=sharding)

    @property
    def base(self) -> Model:
        """The frozen language model under the adapters; the model itself if it has none."""
        return self if self.lora is None else dataclasses.replace(self, lora=None, head="lm")

    def axes(self) -> Any:
        """The logical axis names of every parameter: a pytree like the parameters, with tuples for leaves."""
        if self.lora is not None:
            tree = {"adapters": adapter_axes(self.lora, self.base.axes()["blocks"])}
            return tree | ({} if self.head == "lm" else {"score": ("norm",)})
        _, state = _abstract(self.config, self.head)
        tree = {}
        for path, variable in nnx.to_flat_state(state):
            names = variable.get_metadata("axes")
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = ("layers", *names) if path[0] == "blocks" else tuple(names)
        return tree

    def abstract(self) -> Params:
        """ShapeDtypeStructs of the parameters, with their shardings."""
        _, state = _abstract(self.config, self.head)
        shapes = nnx.to_pure_dict(state)
        if self.lora is not None:
            own = {"adapters": adapter_shapes(self.lora, shapes["blocks"])}
            shapes = own | ({} if self.head == "lm" else {"score": shapes["score"]})
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings())

    def shardings(self) -> Any:
        """A pytree of NamedShardings like the parameters."""
        return self.sharding.tree(self.axes())

    def init(self, key: jax.Array) -> Params:
        """Random float32 parameters, created sharded. Equal keys give equal parameters on any mesh. For adapters, use
        `init_adapters`."""
        if self.lora is not None:
            raise ValueError("adapters start from the weights of their base; use init_adapters")
        return _creation(self)(key)

    def init_adapters(self, base: Params, key: jax.Array) -> Params:
        """Initial trained parameters for `base`. They do not change its outputs yet; the scalar head, if any, is 0."""
        return _adapter_creation(self)(base["blocks"], key)

    def random_score(self, key: jax.Array) -> jax.Array:
        """A random scalar head [D], float32."""
        scale = (self.config.embed + 1) ** -0.5  # Stiennon et al. 2020: N(0, 1/(D+1)).
        score = scale * jax.random.normal(key, (self.config.embed,), jnp.float32)
        return jax.device_put(score, self.sharding.replicated)

    def _merge(self, params: Params) -> tuple[Decoder, Adapters]:
        """The decoder with these parameters, and its adapters."""
        shape, expected = jnp.shape(params["embedding"]), (self.config.table_rows, self.config.embed)
        if shape != expected:
            # For example a reference with a different vocabulary: gathers clip, so it would silently read the wrong rows.
            raise ValueError(f"the parameters' embedding [V, D] is {shape}; this model's is {expected}: policy, reference "
                             "and critic must have the same tokenizer and the same width")
        head = self.head if self.lora is None else "lm"
        graph, state = _abstract(self.config, head)
        state = jax.tree.map(lambda x: x, state)
        known, adapters = nnx.to_pure_dict(state), Adapters(self.lora, params.get("adapters", {}))
        if self.lora is not None:
            params = {name: value for name, value in params.items() if name in known}
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state), adapters

    def on_device_of(self, params: Params) -> Model:
        """This model; if its mesh has one device, on the device to which the parameters are committed, if any."""
        if self.sharding.mesh.size > 1:
            return self
        devices = set().union(*(x.devices() for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and x.committed))
        return self if len(devices) != 1 else dataclasses.replace(self, sharding=one_device(*devices))

    @property
    def generation(self) -> Model:
        """This model with the sharding rules of generation, for weights, rows and caches."""
        return dataclasses.replace(self, sharding=self.sharding.generation)

    def generation_abstract(self, params: Params) -> Params:
        """ShapeDtypeStructs of `for_generation`'s result. params: arrays, or ShapeDtypeStructs."""
        axes = {**self.base.axes(), **self.axes()}
        return generation.abstract(params, axes, self.config.compute_dtype, self.sharding.generation)

    def for_generation(self, params: Params) -> Params:
        """Joined parameters for the model `generation`: placed by its rules, with kernels and tables in the compute dtype.

        Leaves that already have this form are returned as the same arrays.
        """
        leaves, structure = jax.tree.flatten(params)
        for changed, move in self.generation_moves(params):
            for i, moved in zip(changed, move([leaves[i] for i in changed]), strict=True):
                leaves[i] = moved
        return jax.tree.unflatten(structure, leaves)

    def generation_moves(self, params: Params) -> list[tuple[list[int], Callable]]:
        """The steps of `for_generation`: (indices of leaves, a jitted function of the list of these leaves).

        A large leaf has its own step, since two copies of it exist while it is gathered.
        """
        return generation.moves(params, self.generation_abstract(params))

    def in_use(self, params: Params | None, first: Any) -> Params | None:
        """The model's own parameters, or those of its base, as the loop over an update's micro-batches uses them: gathered once
        if `sharding.keep_gathered`, after all arrays of `first` exist; otherwise unchanged."""
        if params is None or not self.sharding.keep_gathered or self.sharding.mesh.shape["fsdp"] == 1:
            return params
        return gathered_weights(
            self.sharding, params, {**self.base.axes(), **self.axes()}, self.config.compute_dtype, first
        )

    def constrain_gradients(self, gradients: Params) -> Params:
        """Gradients of the model's own parameters, sharded according to `config.mesh.zero`."""
        return self.sharding.gradients.constrain_tree(gradients, self.axes())

    def constrain_rows(self, record: Any) -> Any:
        """Constrains the rows of arrays [B, ...] to be split over the mesh's batch axes."""
        return jax.tree.map(lambda x: self.sharding.constrain(x, ("batch",) + (None,) * (x.ndim - 1)), record)

    def hidden(self, params: Params, tokens, positions=None, segment_ids=None) -> jax.Array:
        """Final hidden states [B, T, D], causal. tokens int32 [B, T].

        segment_ids int32 [B, T] separates packed documents. Without it each row is one document; padding at its end is
        harmless, since no token attends to later ones.
        """
        return self._run(params, tokens, positions, segment_ids).hidden

    def hidden_and_balance(self, params: Params, tokens, positions=None, segment_ids=None) -> tuple[jax.Array, jax.Array]:
        """`hidden`, and the experts' load-balancing loss, float32 [], over the tokens with segment_ids > 0 (all tokens without
        segment_ids); 0 in a model without experts."""
        out = self._run(params, tokens, positions, segment_ids)
        return out.hidden, jnp.float32(0.0) if out.load is None else load_balance(out.load)

    def _run(self, params: Params, tokens, positions, segment_ids, keep_cache: bool = False):
        chex.assert_rank(tokens, 2)
        chex.assert_type(tokens, int)
        T = tokens.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, :], tokens.shape)
        chex.assert_equal_shape([tokens, positions, tokens if segment_ids is None else segment_ids])
        counted = jnp.ones(tokens.shape) if segment_ids is None else (segment_ids > 0).astype(jnp.float32)
        sharding = self.sharding
        kind = kind_of_attention(self.config, sharding, *tokens.shape, keep_cache)
        multiple = sharding.length_multiple
        if kind == "ring":
            multiple = math.lcm(multiple, length_multiple(context_size(sharding), T))
        inputs, short = (tokens, Rows(positions, counted, segment_ids)), -T % multiple
        if short:  # Causal: padding at the end changes nothing.
            inputs = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, short))), inputs)
        if kind == "ring":
            inputs = jax.tree.map(functools.partial(deal, sharding), inputs)
        lean = kind == "plain" and self.config.experts is None  # A fused kernel saves what it needs, never the scores.
        decoder, adapters = self._merge(params)
        out = decoder.hidden(
            *inputs, lambda rows: attention(kind, self.config, sharding, rows.positions.shape, rows.segment_ids),
            sharding, keep_cache, adapters, lean,
        )
        hidden = collect(sharding, out.hidden) if kind == "ring" else out.hidden
        return out._replace(hidden=hidden[:, :T]) if short else out._replace(hidden=hidden)

    @property
    def continues(self) -> bool:
        """Whether `hidden_after` can be used: the mesh splits neither the length nor the layers, and no fused kernel is
        required, since none reads the keys of another text."""
        mesh = self.sharding.mesh.shape
        return mesh["context"] == mesh["pipeline"] == 1 and self.config.attention != "fused"

    def hidden_after(self, params: Params, prefixes, counts, tokens) -> jax.Array:
        """Final hidden states [B, T, D] of texts that continue prefixes, each of which is computed once.

        Args:
          params: the weights.
          prefixes: int32 [G, P], right-padded. The mesh splits them like rows, so G is a multiple of `Sharding.batch_size`.
          counts: int32 [G], the number of tokens of each prefix; may be 0.
          tokens: int32 [B, T], right-padded, where B is a multiple of G: rows [g * B / G, (g + 1) * B / G) continue prefix g.
        """
        return self._after(params, prefixes, counts, tokens)[1].hidden

    def prefill_after(self, params: Params, prefixes, counts, tokens) -> Caches:
        """Caches of texts that continue prefixes, with P + T slots: token i of a prefix and its text in slot i. The arguments
        are those of `hidden_after`."""
        past, out = self._after(params, prefixes, counts, tokens, keep_cache=True)
        return self._apart(restored(self.config, joined(past, counts, out.cache)))

    def _after(self, params: Params, prefixes, counts, tokens, keep_cache: bool = False) -> tuple[Cache, Output]:
        """The prefixes' keys and values in the compute dtype, and the output for `tokens`."""
        chex.assert_rank([prefixes, counts, tokens], [2, 1, 2])
        chex.assert_is_divisible(len(tokens), len(prefixes))
        # Exact keys and values: `cache_dtype` saves memory during sampling, and would change the hidden states.
        exact = dataclasses.replace(self, config=dataclasses.replace(self.config, cache_dtype="compute"))
        (past,) = self._constrain_caches([exact._run(params, prefixes, None, None, keep_cache=True).cache])
        T = tokens.shape[1]
        tokens = jnp.pad(tokens, ((0, 0), (0, -T % self.sharding.length_multiple)))
        begins = jnp.repeat(counts, len(tokens) // len(prefixes))
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] + begins[:, None]
        rows, attend = Rows(positions, jnp.ones(tokens.shape), None), continued_attention(self.config, counts)
        decoder, adapters = exact._merge(params)
        out = decoder.hidden(tokens, rows, lambda rows: attend, self.sharding, keep_cache, adapters, past=past)
        return past, out._replace(hidden=out.hidden[:, :T])

    def prefill(self, params: Params, tokens) -> tuple[jax.Array, Caches]:
        """Hidden states [B, P, D] of right-padded prompts, and keys and values in caches of P slots: token i in slot i."""
        hidden, cache, _ = self._run(params, tokens, None, None, keep_cache=True)
        return hidden, self._apart(cache)

    def _apart(self, cache: Cache) -> Caches:
        """A cache of all layers in the form that decoding reads."""
        numbers = range(self.config.layers)
        apart = [jax.tree.map(lambda x: x[i : i + 1], cache) for i in numbers] if self.layered else [cache]  # noqa: B023
        return self._constrain_caches(apart)

    @property
    def layered(self) -> bool:
        """Whether decoding unrolls the layers and keeps one cache per layer.

        True on CPUs and GPUs, where a scan copies every slice of a stack that it reads (`models/unstacked.py`). False for deep
        models there, which would take too long to compile.
        """
        return unrolls(self.config.layers, self.sharding.platform)

    def decode(self, params: Params, tokens, positions, tiers: Tiers, slot) -> tuple[jax.Array, Tiers]:
        """One decode step over one ring, or over one ring per tier (`cache.by_tier`). tokens and positions [B]. A row's
        previous tokens are in the slots before `slot`, wrapping around; in each tier, `slot` counts modulo its number of slots.
        Returns hidden states [B, D] and the tiers with the new tokens."""
        loop = self.decoding(params)
        hidden, carried = loop.step(tokens, positions, loop.begin(tiers), slot)
        return hidden, loop.end(carried)

    def decoding(self, params: Params) -> Decoding:
        """`decode` for a loop: work that is needed only once is done before or after it."""
        decoder, adapters = self._merge(params)
        adapters = adapters.prepared(params["blocks"], self.config.compute_dtype)
        before = decoder.layers_apart(adapters) if unstacks(self, params) else None

        def step(tokens, positions, tiers, slot):
            chex.assert_rank([tokens, positions], 1)
            layers = decoder.layers_apart(adapters) if self.layered and before is None else before
            hidden, tiers = decoder.decode(tokens, positions, tiers, slot, self.sharding, adapters, layers)
            return hidden, tuple(self._constrain_caches(caches, skip=1 if self.layered else 0) for caches in tiers)

        if not self.layered:
            return Decoding(lambda tiers: tiers, step, lambda tiers: tiers)
        # Drop the caches' first axis, of size 1, inside the loop: with it a CPU copies every cache that it writes to.
        return Decoding(
            lambda tiers: jax.tree.map(lambda x: x[0], tiers), step, lambda tiers: jax.tree.map(lambda x: x[None], tiers)
        )

    def abstract_cache(self, rows: int, slots: int) -> Caches:
        """ShapeDtypeStructs of a ring, with their shardings."""
        shapes = cache_shapes(self.config, rows, slots, 1 if self.layered else None)
        shapes = Cache(*(
            None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding.named(axes))
            for x, axes in zip(shapes, CACHE_AXES, strict=True)
        ))
        return (shapes,) * (self.config.layers if self.layered else 1)

    def _constrain_caches(self, caches: Sequence[Cache], skip: int = 0) -> Caches:
        """Constrains the sharding of caches that lack the first `skip` axes."""
        constrained = []
        for cache in caches:
            leaves = zip(cache, CACHE_AXES, strict=True)
            constrained.append(Cache(*(None if x is None else self.sharding.constrain(x, axes[skip:]) for x, axes in leaves)))
        return tuple(constrained)

    def unembedding(self, params: Params) -> jax.Array:
        """The LM head's weight [D, V] times the logits' factor, without the padding of the vocabulary."""
        weight = times(params["embedding"].T if self.config.tie_embeddings else params["unembedding"], self.config.logit_factor)
        return weight if weight.shape[1] == self.config.vocab else weight[:, : self.config.vocab]

    def head_weight(self, params: Params, dtype) -> jax.Array:
        """`unembedding` in `dtype` for the chunked heads: gathered once instead of in each chunk, and split only over the
        vocabulary."""
        weight = times(params["embedding"].T if self.config.tie_embeddings else params["unembedding"], self.config.logit_factor)
        weight = gathered_head(self.sharding, weight.dtype != dtype, weight.astype(dtype))
        return weight if weight.shape[1] == self.config.vocab else weight[:, : self.config.vocab]

    @property
    def chunk_floats(self) -> int:
        """The limit on logits at a time over all devices: `heads.CHUNK_FLOATS` on each device."""
        rules, sizes = self.sharding.rules, self.sharding.mesh.shape
        return CHUNK_FLOATS * math.prod(sizes[axis] for name in ("rows", "length", "vocab") for axis in rules[name])

    def token_stats(
        self, params: Params, hidden: jax.Array, targets: jax.Array, temperature: float = 1.0, used=None
    ) -> TokenStats:
        """Log-probabilities of targets int32 [B, T] and entropies, float32 [B, T], of the LM head on hidden [B, T, D]. used:
        see `heads.token_stats`."""
        weight = self.head_weight(params, hidden.dtype)
        return token_stats(hidden, weight, targets, temperature, used=used, **self._head_options)

    def weighted_nll(self, params: Params, hidden: jax.Array, targets: jax.Array, weights: jax.Array, used=None) -> jax.Array:
        """float32 []: `heads.weighted_nll` of the LM head for targets int32 [B, T] with weights float32 [B, T]."""
        weight = self.head_weight(params, hidden.dtype)
        return weighted_nll(hidden, weight, targets, weights, used=used, **self._head_options)

    @property
    def _head_options(self) -> dict[str, Any]:
        """Arguments of `heads.token_stats` and `heads.weighted_nll`.

        The gradient of a tied head is summed in the layout of its table, [V, D], if the compiler would otherwise copy the sum
        to transpose it. The TPU compiler does; the GPU compiler needs less memory for a sum [D, V].
        """
        transposed = self.config.tie_embeddings and self.sharding.platform == "tpu"
        return {"chunk_floats": self.chunk_floats, "cap": self.config.final_softcap, "sharding": self.sharding,
                "transposed": transposed}

    def head_chunks(self, rows: int, length: int) -> int:
        """The maximum number of chunks in which `weighted_nll` computes [rows, length] positions if `used` is given."""
        most = self.chunk_floats // max(1, rows * self.config.vocab)
        return split_positions(length, most, self.sharding, 0)[0].chunks

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """The LM head, float32 [..., V]: hidden [..., D] times `unembedding` in hidden's dtype, with the final soft cap."""
        return lm_logits(hidden, self.unembedding(params).astype(hidden.dtype), self.config.final_softcap)

    def scores(self, params: Params, hidden: jax.Array) -> jax.Array:
        """The scalar head, float32 [...]: hidden [..., D] times `score` [D]."""
        weight = params["score"]
        return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), weight.astype(jnp.float32))


def scalar_from_lm(params: Params, scalar_params: Params) -> Params:
    """The trunk of an LM with the scalar head of `scalar_params` (for preference models and critics)."""
    trunk = {name: params[name] for name in ("embedding", "blocks", "final_norm")}
    return {**trunk, "score": scalar_params["score"]}
