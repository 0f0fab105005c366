"""Weighted sums of rewards, minus a length penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.rewards import combine_scores, length_penalty
from jaxalign.config import RewardConfig
from jaxalign.parallel.rows import fetch
from jaxalign.records import Prompt
from jaxalign.registry.core import names_in
from jaxalign.registry.rewards import reward_records
from jaxalign.rewards.base import DroppedRows, Listener, Reward, RewardBatch, Scored


def sum_of_rewards(parts: Mapping[str, Reward], weights: Sequence[float] = (), settings: RewardConfig | None = None) -> Reward:
    """The single part itself if its weight is 1 and there is no length penalty; else a `SummedReward`.

    Args:
      parts: the rewards by name.
      weights: their weights; empty: 1 each.
      settings: the length penalty and how many rows the sum may drop, in a stage of a run; None for the defaults of
        `config.reward`, outside of a run.
    """
    in_run, settings, weights = settings is not None, settings or RewardConfig(), tuple(weights) or (1.0,) * len(parts)
    if weights == (1.0,) and not settings.length_coef:
        return next(iter(parts.values()))
    dropped = DroppedRows(f"reward {'+'.join(parts)!r}", settings.max_dropped_share, in_run)
    return SummedReward(parts, weights, settings.length_coef, settings.length_free, dropped)


def is_single(settings: RewardConfig) -> bool:
    """Whether `sum_of_rewards` will return the only part of `config.reward` itself. No part needs to be constructed."""
    return len(names_in(settings.source)) == 1 and tuple(settings.weights) in ((), (1.0,)) and not settings.length_coef


def fused_source(settings: RewardConfig, offloaded: Sequence[str]) -> str | None:
    """The name of the learned reward that will be fused into the scoring program (`LearntReward.fused`); None if there is none.

    Args:
      settings: `config.reward`.
      offloaded: `config.mesh.offload`.
    """
    record = reward_records(settings.source)[0]
    return record.name if is_single(settings) and record.learnt and "frozen" not in offloaded else None


class SummedReward(Reward):
    """The sum of weight * score over the parts, minus `length_coef` for each response token past the first `length_free`.

    A row has a score only if every part has one. If any part scores tokens, the sum scores tokens, and a score of a whole
    response is added at its last token.

    Args:
      parts: the rewards by name.
      weights: their weights.
      length_coef, length_free: the length penalty.
      dropped: counts the rows that have no score only because that of a part is not finite. The parts count their own rows.
    """

    is_checked = True

    def __init__(
        self, parts: Mapping[str, Reward], weights: Sequence[float], length_coef: float, length_free: int, dropped: DroppedRows
    ):
        self.name = "+".join(parts)
        self.parts, self.weights, self.length = dict(parts), np.asarray(weights, np.float32), (length_coef, length_free)
        self._dropped = dropped

    def score(self, batch: RewardBatch) -> Scored:
        """The summed scores, with the scores of each part and the length penalty, if any, for the metrics."""
        scored = {name: part.score(batch) for name, part in self.parts.items()}
        self._check_finite(scored, len(batch.prompts))
        total, kept = _weighted_sum(list(scored.values()), self.weights, batch)
        shown = {name: _present(part) for name, part in scored.items()} if len(scored) > 1 else {}
        if self.length[0]:
            cost = length_penalty(batch.rollout.response_length, *self.length)
            total = total + (cost if total.ndim == 1 else at_last_token(cost, batch, total.shape[1]))
            shown = shown | {"length": cost}
        return Scored(total, kept, shown)

    def _check_finite(self, scored: Mapping[str, Scored], rows: int) -> None:
        """Counts the rows that every part keeps although a score is not finite. rows: those without padding.

        Raises:
          UserError: their share is above `config.reward.max_dropped_share`.
        """
        names = [name for name, weight in zip(scored, self.weights, strict=True) if weight]
        kept, finite = fetch((
            [scored[name].kept for name in names if scored[name].kept is not None],
            [_is_finite(scored[name].scores) for name in names],
        ))
        lost = np.logical_and.reduce([np.ones(rows, bool), *(np.asarray(part, bool)[:rows] for part in kept)])
        faults = {name: lost & ~part[:rows] for name, part in zip(names, finite, strict=True)}
        faulty = [name for name, fault in faults.items() if fault.any()]
        dropped = int(np.logical_or.reduce([np.zeros(rows, bool), *faults.values()]).sum())
        self._dropped.check(dropped, rows, f"scores of {' and '.join(faulty)} are not finite")

    def listen(self, prompts: Sequence[Prompt]) -> Listener | None:
        """A listener that calls the listeners of all parts; None if no part has one."""
        listeners = [listener for part in self.parts.values() if (listener := part.listen(prompts)) is not None]
        if not listeners:
            return None

        def call_all(ended) -> None:
            for listener in listeners:
                listener(ended)

        return call_all


def _present(part: Scored):
    """The scores of a part, NaN in rows without a score."""
    if part.kept is None:
        return part.scores
    kept, scores = jnp.asarray(part.kept), jnp.asarray(part.scores, jnp.float32)
    return jnp.where(kept if scores.ndim == 1 else kept[:, None], scores, jnp.nan)


def _is_finite(scores):
    """bool [B]: whether all scores of each response are finite. scores: [B], or [B, N]."""
    finite = jnp.isfinite(jnp.asarray(scores, jnp.float32))
    return finite if finite.ndim == 1 else finite.all(axis=1)


def at_last_token(scores_B, batch: RewardBatch, N: int):
    """float32 [B, N]: each response's score [B] at its last token, 0 elsewhere."""
    chex.assert_rank(scores_B, 1)
    last = jnp.asarray(batch.rollout.response_length)[:, None] - 1
    return jnp.where(jnp.arange(N)[None, :] == last, scores_B[:, None], 0.0)


def _weighted_sum(parts: Sequence[Scored], weights: np.ndarray, batch: RewardBatch):
    """(sum, kept bool [B]) of the parts. The sum is float32 [B], or [B, N] if any part scores tokens."""
    scores = [jnp.asarray(part.scores, jnp.float32) for part in parts]
    N = max((s.shape[1] for s in scores if s.ndim == 2), default=0)
    everything = jnp.ones(scores[0].shape[0], bool)
    present = jnp.stack([everything if part.kept is None else jnp.asarray(part.kept) for part in parts])
    if not N:
        return combine_scores(jnp.stack(scores), weights, present)
    scores_KxBxN = jnp.stack([s if s.ndim == 2 else at_last_token(s, batch, N) for s in scores])
    total, kept = jax.vmap(combine_scores, in_axes=(2, None, None), out_axes=1)(scores_KxBxN, weights, present)
    kept = kept.all(axis=1)
    return jnp.where(kept[:, None], total, 0), kept
