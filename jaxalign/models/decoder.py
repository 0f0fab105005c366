"""One decoder-only transformer in Flax NNX for all model families that `architecture.DecoderConfig` can describe.

The modules describe the architecture; `jaxalign.models.model.Model` splits them once and runs them as pure functions.
Layers are stacked on a leading axis and scanned, so compile time does not grow with depth, except while decoding
(`Model.layered`). The caller passes in the attention function (`jaxalign.models.attention.dispatch`).

Dimension letters: B batch, T time, S cache slots, D model, H query heads, K key/value heads, h head dim, F mlp, L layers,
V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxalign.models.adapters.lora import NO_ADAPTERS, Adapters
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.attention.dispatch import Attend
from jaxalign.models.attention.plain import windowed
from jaxalign.models.cache import ROW_AXIS, Cache, Tiers, all_tiers, attend_cache, by_tier, stored, write
from jaxalign.models.experts import Load, MixtureMLP
from jaxalign.models.layers import KEPT, MLP, PRODUCT, Attention, Norm, Turn, keep, param, times, turn
from jaxalign.parallel.pipeline import is_pipelined, micro_batches, run_stages
from jaxalign.parallel.sharding import Sharding

_SAVED = {"nothing": None, "products": jax.checkpoint_policies.save_only_these_names(PRODUCT)}
_LEAN = jax.checkpoint_policies.save_only_these_names(KEPT)


class Rows(NamedTuple):
    """Metadata of the tokens for the layers: positions int32 [B, T]; counted float32 [B, T], 1 where a token counts in the
    experts' load; segment_ids int32 [B, T], or None if each row is one document."""

    positions: jax.Array
    counted: jax.Array
    segment_ids: jax.Array | None


class Kind(NamedTuple):
    """In what a layer, or each of all layers, differs from the others, bool [] or [L]: local, whether it has the window;
    unrotated, whether it does not rotate queries and keys. None if all layers are alike."""

    local: jax.Array | None
    unrotated: jax.Array | None


class Output(NamedTuple):
    """hidden [B, T, D] after the final norm; cache: keys and values of every layer (T slots) if requested, else None; load of
    the experts summed over all layers, None without experts."""

    hidden: jax.Array
    cache: Cache | None
    load: Load | None


class Block(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention = Attention(config, rngs)
        if config.pre_norms:
            self.attention_norm, self.mlp_norm = Norm(config), Norm(config)
        self.mlp = MLP(config, rngs) if config.experts is None else MixtureMLP(config, rngs)
        if config.sandwich_norms:
            self.after_attention_norm, self.after_mlp_norm = Norm(config), Norm(config)

    def __call__(
        self, x_BxTxD, by: Turn, counted_BxT, adapters: Adapters, sharding: Sharding, attention: Callable
    ):
        """`attention(q, k, v) -> (heads, extra)`; returns the new activations, `extra` (for the cache) and the Load."""
        config = self.config
        own = adapters.part("attention")
        q, k, v = self.attention.heads(self.attention_norm(x_BxTxD) if config.pre_norms else x_BxTxD, by, own, sharding)
        heads, extra = attention(q, k, v)
        attended = keep(self.attention.project("out", heads, "btnh,nhd->btd", own))
        if config.sandwich_norms:
            attended = self.after_attention_norm(attended)
        after = sharding.constrain(x_BxTxD + times(attended, config.residual_factor), ("batch", "residual", "embed"))
        read = x_BxTxD if config.parallel_residual else after
        normed = self.mlp_norm(read) if config.pre_norms else read
        load = None
        if config.experts is None:
            out = self.mlp(normed, adapters.part("mlp"), sharding)
        else:
            out, load = self.mlp(normed, counted_BxT, sharding)
        if config.sandwich_norms:
            out = self.after_mlp_norm(out)
        return sharding.constrain(after + times(out, config.residual_factor), ("batch", "residual", "embed")), extra, load


class Decoder(nnx.Module):
    """Tokens to final hidden states, with an LM head (tied or not), a scalar head, or both on top.

    Parameters: `embedding` [V, D], `blocks` (every leaf with a leading L), `final_norm`, then `unembedding` [D, V] if there
    is an untied LM head, and `score` [D] if there is a scalar head ("scalar", "lm_scalar"). V is config.table_rows.
    """

    def __init__(self, config: DecoderConfig, head: str, *, rngs: nnx.Rngs):
        if head not in ("lm", "scalar", "lm_scalar"):
            raise ValueError(f"head is {head!r}; 'lm', 'scalar' or 'lm_scalar' is expected")
        self.config = config
        rows = config.table_rows
        self.embedding = param(rngs, (rows, config.embed), ("vocab", "embed"), config.embed**-0.5)
        keys = jax.random.split(rngs.params(), config.layers)
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(params=key)))(keys)
        self.final_norm = Norm(config)
        if head != "lm":  # Stiennon et al. 2020 initialise the reward head from N(0, 1/(D+1)).
            self.score = param(rngs, (config.embed,), ("norm",), (config.embed + 1) ** -0.5)
        if head != "scalar" and not config.tie_embeddings:
            self.unembedding = param(rngs, (config.embed, rows), ("embed", "vocab"), config.embed**-0.5)

    def _embed(self, tokens: jax.Array, sharding: Sharding) -> jax.Array:
        # Gather the table over fsdp first: a lookup whose result is split over the batch cannot read a table split over D.
        table = sharding.constrain(self.embedding[...].astype(self.config.compute_dtype), ("vocab", None))
        x = table[tokens]
        if self.config.scale_embeddings:
            x = x * jnp.asarray(self.config.embed**0.5, x.dtype)
        x = times(x, self.config.embedding_factor)
        return sharding.constrain(x, ("batch", "residual", "embed"))

    def _kinds(self) -> Kind:
        """The `Kind` of all layers, [L]."""
        config = self.config
        return Kind(jnp.asarray(config.local_layers) if config.mixed_layers else None,
                    jnp.asarray(config.unrotated_layers) if any(config.unrotated_layers) else None)

    def _turns(self, positions_BxT: jax.Array) -> Callable[[Kind], Turn]:
        """The rotation of a layer's queries and keys, as a function of its `Kind`."""
        config = self.config

        def turned(local: bool) -> Turn:
            return turn(positions_BxT, config.frequencies(local), config.magnitude(local))

        if config.mixed_layers:
            near, far = turned(True), turned(False)
        else:
            near = far = turned(bool(config.local_layers) and all(config.local_layers))

        def of_layer(kind: Kind) -> Turn:
            by = far if kind.local is None else jax.tree.map(lambda *both: jnp.where(kind.local, *both), near, far)
            if kind.unrotated is None:
                return by
            return Turn(jnp.where(kind.unrotated, 1.0, by.cosine), jnp.where(kind.unrotated, 0.0, by.sine))

        return of_layer

    def hidden(
        self, tokens_BxT, rows: Rows, attention_of: Callable[[Rows], Attend], sharding: Sharding, keep_cache: bool = False,
        adapters: Adapters = NO_ADAPTERS, lean: bool = False, past: Cache | None = None,
    ):
        """An `Output`. attention_of: the attention function for these rows, or a subset of them; the tokens of a document must
        be contiguous in a row. adapters: stacked leaves for all layers. past: keys and values of earlier tokens in all layers;
        the attention function then also takes those of its layer, after `local`. lean: without remat the backward pass keeps
        what `layers.keep` marks and recomputes norms, activations and attention scores, which is cheaper than storing them."""
        graph, layers = nnx.split(self.blocks)

        def run(stacked, x, rows: Rows):
            """-> (x, (cache entries, the experts' load)) after the given layers."""
            attend, turns = attention_of(rows), self._turns(rows.positions)

            def body(x, indexed):
                kind, layer, own, *earlier = indexed

                def attention(q, k, v):
                    return attend(q, k, v, kind.local, *earlier), stored(self.config, k, v) if keep_cache else None

                own = Adapters(adapters.lora, own)
                x, kept, load = nnx.merge(graph, layer)(x, turns(kind), rows.counted, own, sharding, attention)
                return x, (kept, load)

            policy = _SAVED[self.config.remat_saves] if self.config.remat else _LEAN
            if (self.config.remat or lean) and not keep_cache:
                body = jax.checkpoint(body, prevent_cse=False, policy=policy)
            x, (kept, loads) = jax.lax.scan(body, x, stacked)
            return x, (kept, None if loads is None else jax.tree.map(lambda x: jnp.sum(x, axis=0), loads))

        stacked, x = (self._kinds(), layers, adapters.tree), self._embed(tokens_BxT, sharding)
        stacked += () if past is None else (past,)
        if is_pipelined(sharding) and not keep_cache:
            x, (kept, load) = run_stages(sharding, run, stacked, x, rows)
            shared = micro_batches(sharding, len(x)) % sharding.mesh.shape["pipeline"] == 0
            by = "rows" if shared else "batch"
            x = sharding.constrain(x, (by, "residual", "embed"))
        else:
            by = "batch"
            x, (kept, load) = run(stacked, x, rows)
        x = self.final_norm(x)
        if sharding.sequence_parallel:  # Gather once: otherwise every chunk of the LM head does.
            x = sharding.constrain(x, (by, "length", "embed"))
        return Output(x, kept, load)

    def layers_apart(self, adapters: Adapters = NO_ADAPTERS) -> list:
        """The unstacked layers, as `decode` takes them: each is (its `Kind`, its parameters, its adapters)."""
        stacked = self._kinds(), nnx.split(self.blocks)[1], adapters.tree
        return [jax.tree.map(lambda leaf: leaf[i], stacked) for i in range(self.config.layers)]  # noqa: B023

    def decode(
        self, tokens_B, positions_B, tiers: Tiers, slot, sharding: Sharding, adapters: Adapters = NO_ADAPTERS, layers=None
    ) -> tuple[jax.Array, Tiers]:
        """Decodes one token per row: writes its keys and values at `slot` of its tier's caches, modulo their length, and
        attends to the earlier slots, whose number is its position. Returns hidden [B, D] and the new caches.

        layers: None scans the layers. Given `layers_apart`, with a cache for each layer without the first axis, the program
        unrolls the layers, and copies none of their caches.
        """
        graph, stacked = nnx.split(self.blocks)
        parts = sharding.batch_size
        rows = [caches[0].values.shape[ROW_AXIS if layers is None else 0] for caches in tiers]
        slots = [caches[0].values.shape[-2] for caches in tiers]
        age_1xS = [((slot % S - jnp.arange(S)) % S)[None] for S in slots]  # How many steps ago each slot was written.
        seen_BxS = [age <= own[:, None] for age, own in zip(age_1xS, by_tier(rows, parts, positions_B), strict=True)]
        turns = self._turns(positions_B[:, None])

        def body(carry, indexed):
            x, caches = carry
            index, kind, layer, own = indexed

            def attention(q, k, v):
                written, heads = [], []
                qkv = zip(*(by_tier(rows, parts, x) for x in (q, k, v)), strict=True)
                for cache, (q, k, v), S, age, seen in zip(caches, qkv, slots, age_1xS, seen_BxS, strict=True):
                    new = write(cache, index, slot % S, stored(self.config, k, v))
                    layer = new if index is None else jax.tree.map(lambda x: x[index], new)
                    mask = windowed(self.config, kind.local, seen, lambda age=age: age)
                    heads.append(attend_cache(q, layer, mask, self.config.scale, self.config.attention_softcap))
                    written.append(new)
                return all_tiers(parts, heads), tuple(written)

            counted = jnp.ones((len(tokens_B), 1))
            own = Adapters(adapters.lora, own)
            x, caches, _ = nnx.merge(graph, layer)(x, turns(kind), counted, own, sharding, attention)
            return (x, caches), None

        x = self._embed(tokens_B[:, None], sharding)
        if layers is None:
            numbered = jnp.arange(self.config.layers), self._kinds(), stacked, adapters.tree
            (x, caches), _ = jax.lax.scan(body, (x, tuple(cache for (cache,) in tiers)), numbered)
            return self.final_norm(x)[:, 0], tuple((cache,) for cache in caches)
        written = []
        for layer, *own in zip(layers, *tiers, strict=True):
            (x, caches), _ = body((x, tuple(own)), (None, *layer))
            written.append(caches)
        return self.final_norm(x)[:, 0], tuple(zip(*written, strict=True))
