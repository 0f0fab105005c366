"""The sizes with which a model generates token ids, by continuous batching (docs/rollout.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.rollout.padding import Padding
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model and the sizes of its batches.

    Attributes:
      model: the architecture.
      batch: the maximum number of rows that decode together; a multiple of the number of parts into which the mesh splits them.
      max_length: the maximum length of prompt plus response, in tokens.
      bucket: prompts are padded to this length times a power of two, so that few shapes are compiled.
      share_prefix: whether different prompts with a common beginning compute it once, if the model can continue it.

    Raises:
      UserError: the mesh does not divide the batch, or the bucket is below 1.
    """

    model: Model
    batch: int
    max_length: int
    bucket: int = 32
    share_prefix: bool = False

    def __post_init__(self):
        parts = self.model.sharding.generation.batch_size
        if self.batch < 1 or self.batch % parts:
            raise UserError(f"the number of rows that are sampled together is {self.batch}; the mesh splits them into {parts} "
                            f"parts, so a multiple of {parts} is expected: change the batch size or the mesh")
        if self.bucket < 1:
            raise UserError(f"prompts cannot be padded to {self.bucket} tokens; at least 1 is expected")

    def start(
        self, params, prompts: Sequence[Sequence[int]], key: jax.Array, sampling: Sampling, rows: Sequence[int],
        version: int = 0,
    ) -> Session:
        """Returns a `Session` that answers the prompts step by step.

        Args:
          params: the weights.
          prompts: token ids.
          key: a PRNG key, for example a run's key folded with its step.
          sampling: the sampling settings.
          rows: the global row number of each prompt.
          version: the version of the weights.
        """
        sizes = self.batch, self.max_length, self.bucket
        session = Session(self.model, params, *sizes, version, self.share_prefix)
        session.submit(prompts, rows, key, sampling)
        return session

    @property
    def padding(self) -> Padding:
        """The shape of the arrays for this engine's prompts and responses."""
        return Padding(self.batch, self.max_length, self.bucket, self.model.config.vocab)
