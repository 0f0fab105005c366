"""ShapeDtypeStructs of the records that jitted steps take, for ahead-of-time compilation and the planner."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxalign.parallel.sharding import Sharding
from jaxalign.records import AnswerRows, PackedParts, Rollout


@dataclasses.dataclass(frozen=True)
class Shapes:
    """ShapeDtypeStructs of arrays with the shardings that `place_rows` and `place_parts` give them."""

    sharding: Sharding

    def rows(self, dtype, *shape: int) -> jax.ShapeDtypeStruct:
        """An array whose leading axis is split over the mesh's batch axes."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding.batch)

    def whole(self, dtype, *shape: int) -> jax.ShapeDtypeStruct:
        """An array that is replicated on every device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding.replicated)

    def rollout(self, batch: int, prompt: int, new_tokens: int, versions: bool = False) -> Rollout:
        """`batch` responses of at most `new_tokens` tokens to prompts padded to `prompt` tokens.

        versions: add the version of the weights that sampled each token.
        """
        row, each = self.rows(jnp.int32, batch), (batch, new_tokens)
        tokens = self.rows(jnp.int32, batch, prompt + new_tokens)
        written = self.rows(jnp.int32, *each) if versions else None
        return Rollout(tokens, row, row, self.rows(jnp.float32, *each), self.rows(jnp.bool_, batch), written)

    def parts(self, sequences: int, rows: int, most: int, T: int, plans: int | None = None) -> PackedParts:
        """`sequences` sequences in at most `most` parts of `rows` rows of T tokens, for one minibatch or for `plans`."""
        more = () if plans is None else (plans,)
        shape = (*more, most, rows, T)
        where = self.sharding.named((None,) * (len(shape) - 2) + ("batch", None))
        packed = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
        own = self.whole(jnp.int32, *more, sequences)
        lines = AnswerRows(packed, packed, packed, packed, own, own, self.whole(jnp.int32, *more, most))
        return PackedParts(lines, own, self.whole(jnp.int32, *more))
