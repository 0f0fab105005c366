"""Scorers: hashable records of reward models and ensembles, with functions that score rows and rollouts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.ensembles import combine
from jaxalign.algorithms.rewards import normalise_scores
from jaxalign.config import RewardDistillConfig
from jaxalign.models import flops
from jaxalign.models.adapters.lora import TRAINED, trained
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.records import AnswerRows, PackedParts, PairBatch, Rollout, ScoredPairs
from jaxalign.steps.arguments import static
from jaxalign.steps.packed import each_part, pack_rollout, pairs_alone
from jaxalign.steps.preference_step import row_scores, sequence_scores


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """How members' scores are combined: each is normalised with its shift and scale, then `ensembles.combine` combines them.

    Members that were trained separately differ in level and scale; both are measured on the same answers.
    """

    shift: tuple[float, ...]
    scale: tuple[float, ...]
    how: str
    std_weight: float

    def normalised(self, scores_KxB):
        """float32 [K, B]: the members' scores on a common level and scale."""
        shift, scale = (jnp.asarray(x, jnp.float32)[:, None] for x in (self.shift, self.scale))
        return (scores_KxB - shift) / scale


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A reward model without its weights; static for jit.

    model has a scalar head; its sizes may differ from the policy's. A raw score is normalised to (raw - shift) / scale and then
    clipped to +-clip unless that is None. With an ensemble, the weights of all members are stacked, each leaf [K, ...], and the
    raw score is the combined score of the members.
    """

    model: Model
    shift: float = 0.0
    scale: float = 1.0
    clip: float | None = None
    ensemble: Ensemble | None = None

    @property
    def members(self) -> int:
        """The number of models that score: the members of an ensemble, or 1."""
        return 1 if self.ensemble is None else len(self.ensemble.shift)


def scoring_work(scorer: Scorer, rollout: Rollout) -> tuple[int, float]:
    """(tokens, FLOPs) for scoring a rollout of numpy arrays with every member."""
    lengths = rollout.prompt_length + rollout.response_length
    return int(np.sum(lengths)), scorer.members * flops.forward(scorer.model, lengths)


def student_model(section: RewardDistillConfig, policy: Model) -> Model:
    """The student's architecture: its own sizes, and otherwise the policy's architecture."""
    names = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")
    decoder = dataclasses.replace(policy.config, **{name: getattr(section, name) for name in names})
    return Model(decoder, "scalar", policy.sharding)


class LearntScore(NamedTuple):
    """Scores that are yet to be computed: the scorer and its weights."""

    scorer: Scorer
    params: Any


def _raw(scorer: Scorer, params, score: Callable):
    """The scores [B] from `score(params)`, combined over the members if the scorer is an ensemble.

    The members' scores are computed in one batched forward pass. Each leaf of `params` is then [K, ...], except the base that
    members with adapters share.
    """
    ensemble = scorer.ensemble
    if ensemble is None:
        return score(params)
    axes = {name: 0 if scorer.model.lora is None or name in TRAINED else None for name in params}
    scores_KxB = jax.vmap(score, in_axes=(axes,))(params)
    return combine(ensemble.normalised(scores_KxB), ensemble.how, ensemble.std_weight)


def raw_row_scores(scorer: Scorer, params, rollout: Rollout, rows: AnswerRows):
    """float32 [B]: raw scores of prompt and response in packed rows. Entries of sequences in other parts are meaningless."""
    length = jnp.maximum(rollout.prompt_length + rollout.response_length, 1)
    return _raw(scorer, params, lambda own: row_scores(scorer.model, own, rows, length))


def normalised(scorer: Scorer, raw):
    """Normalised scores, which RL uses as the reward."""
    return normalise_scores(raw, scorer.shift, scorer.scale, scorer.clip)


def stack_members(members):
    """The weights of K members as one pytree, each leaf [K, ...]; the base that members with adapters share is not stacked."""
    own = [trained(member) if "adapters" in member else member for member in members]
    return {**members[0], **jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)}


@functools.partial(MeshProgram, static_argnames=("scorer",))
def raw_sequence_scores(scorer: Scorer, params, tokens, length):
    """float32 [B]: scores of whole sequences before normalisation. tokens int32 [B, T], length int32 [B]."""
    length = jnp.maximum(length, 1)
    return _raw(scorer, params, lambda own: sequence_scores(scorer.model, own, tokens, length))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PairScoreArguments:
    """Arguments of `raw_pair_scores`.

    Attributes:
      scorer: the reward model.
      params: its weights, stacked for an ensemble.
      pairs: the sequences; their tokens are not read if `packed` is given.
      packed: the pairs in micro-batches, from `pack_pairs`; None gives each sequence its own row.
    """

    scorer: Scorer = static()
    params: Any
    pairs: PairBatch | ScoredPairs
    packed: PackedParts | None = None


@MeshProgram
def raw_pair_scores(arguments: PairScoreArguments):
    """float32 [B, 2]: raw scores of both sequences of each pair."""
    scorer, packed, pairs = arguments.scorer, arguments.packed, arguments.pairs
    length = pairs.length.reshape(-1)

    def score(rows: AnswerRows):
        return _raw(scorer, arguments.params, lambda own: row_scores(scorer.model, own, rows, length))

    return (score(pairs_alone(pairs)) if packed is None else each_part(packed, score)).reshape(-1, 2)


def raw_rollout_scores(scorer: Scorer, params, rollout: Rollout):
    """float32 [B]: raw scores of prompt and response, computed on packed rows."""
    return packed_rollout_scores(scorer, params, *pack_rollout(rollout, 0, scorer.model.sharding))


def rollout_scores(scorer: Scorer, params, rollout: Rollout):
    """float32 [B]: normalised scores of prompt and response, computed on packed rows."""
    return normalised(scorer, raw_rollout_scores(scorer, params, rollout))


@functools.partial(MeshProgram, static_argnames=("scorer",))
def packed_rollout_scores(scorer: Scorer, params, rollout: Rollout, parts: PackedParts):
    """`raw_rollout_scores` of packed rows."""
    return each_part(parts, lambda rows: raw_row_scores(scorer, params, rollout, rows))
