"""Best-of-n and rejection sampling: the choice among n responses to a prompt, its expected score, and its KL.

A batch of B rows has B / n groups, each of n contiguous rows. A row that is masked, or whose score is not finite (a reward
that failed), is never chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.groups import grouped
from jaxalign.algorithms.guards import as_float, is_set, require_range, require_same_shape, require_shape


class BestOf(NamedTuple):
    """The choice of each group: G = B / n.

    index: int32 [G], a row of the batch; the group's first row where none was chosen. found: bool [G], a row was chosen.
    """

    index: jax.Array
    found: jax.Array


def analytic_kl(n: Any) -> jax.Array:
    """KL(best-of-n policy || the policy it samples from) = log n - (n - 1) / n, in nats (Stiennon et al. 2020).

    Exact where no two responses have equal scores or equal texts, else an upper bound (Beirami et al. 2024, arXiv 2401.01879).

    Args:
      n: real, any shape, at least 1.

    Returns:
      float32 of that shape.

    Raises:
      ValueError: n is below 1.
    """
    require_range("n", n, 1)
    n = as_float("n", n)
    return jnp.log(n) - (n - 1) / n


def best_of(scores: Any, n: int, mask: Any = None) -> BestOf:
    """The row with the highest score in each group of n contiguous rows; on a tie, the first.

    Args:
      scores: real [B].
      n: responses to one prompt, in contiguous rows; a Python int, at least 1.
      mask: bool, int or float [B]; 0 for rows that may not be chosen. None allows every row with a finite score.

    Returns:
      A `BestOf`.

    Raises:
      ValueError: a shape differs, or the rows do not divide into groups of n.
    """
    scores, allowed = _grouped(scores, n, mask)
    best = jnp.argmax(jnp.where(allowed, scores, -jnp.inf), axis=1).astype(jnp.int32)
    return BestOf(jnp.arange(best.shape[0], dtype=jnp.int32) * n + best, jnp.any(allowed, axis=1))


def rejection_sample(scores: Any, n: int, threshold: Any, most: int | None = None, mask: Any = None) -> jax.Array:
    """Selects rows to fine-tune on: those whose score reaches a threshold, and at most the `most` best of each group.

    With most = 1 and a threshold below all scores this is best-of-n (RAFT, Dong et al. 2023, arXiv 2304.06767). With only a
    threshold it is the filter of ReST (Gulcehre et al. 2023, arXiv 2308.08998).

    Args:
      scores: real [B].
      n: responses to one prompt, in contiguous rows; a Python int, at least 1.
      threshold: scalar, or real [B / n] with one value per group, in units of the score.
      most: a Python int, at least 1; None for no limit. Of equal scores, earlier rows are preferred.
      mask: bool, int or float [B]; 0 for rows that may not be chosen. None allows every row with a finite score.

    Returns:
      bool [B].

    Raises:
      ValueError: a shape differs, or the rows do not divide into groups of n.
    """
    scores, allowed = _grouped(scores, n, mask)
    if jnp.ndim(threshold):
        require_shape("threshold", threshold, "[B / n]", scores.shape[:1])
        threshold = jnp.asarray(threshold)[:, None]
    kept = allowed & (scores >= threshold)
    if most is not None:
        require_range("most", most, 1)
        order = jnp.argsort(-jnp.where(kept, scores, -jnp.inf), axis=1, stable=True)
        kept = kept & (jnp.argsort(order, axis=1) < most)
    return kept.reshape(-1)


def expected_best_of(scores: Any, n: int, values: Any = None, mask: Any = None) -> jax.Array:
    """The expected best score among n responses, estimated without bias from N >= n samples as the mean over all subsets of n.

        E = sum over ranks r = 0..N-1, the best first, of  C(N - 1 - r, n - 1) / C(N, n)  times the value at rank r

    This is the unbiased pass@k of Chen et al. 2021 (arXiv 2107.03374) for real scores. With `values` it is the expected value
    (for example a gold score) of the response that the scores choose.

    Args:
      scores: real [..., N], in any order; of equal scores the earlier ranks higher, as in `best_of`.
      n: a Python int in 1..N.
      values: real [..., N], the values to average; None: the scores themselves.
      mask: bool, int or float [..., N]; 0 for samples to ignore. Samples whose score is not finite are ignored in any case;
        `values` are not checked.

    Returns:
      float32 [...]; 0 where fewer than n samples count and there is no subset of size n. Leave such rows out of averages.

    Raises:
      ValueError: a shape differs, or n is not in 1..N.
    """
    mask = jnp.ones(np.shape(scores), bool) if mask is None else mask
    values = scores if values is None else values
    require_same_shape(scores=scores, values=values, mask=mask)
    if not jnp.ndim(scores):
        raise ValueError("scores is a scalar; [..., N] is expected")
    require_range("n", n, 1, np.shape(scores)[-1])
    scores, values = as_float("scores", scores), as_float("values", values)
    counted = is_set(mask) & jnp.isfinite(scores)
    values = jnp.where(counted, values, 0)
    order = jnp.argsort(jnp.where(counted, -scores, jnp.inf), axis=-1, stable=True)
    values = jnp.take_along_axis(values, order, axis=-1)
    count = jnp.sum(counted, axis=-1, keepdims=True).astype(values.dtype)
    # In log space, as a cumulative sum of log ratios of neighbouring weights: the binomials overflow from N = 130 on.
    rank = jnp.arange(1, values.shape[-1], dtype=values.dtype).reshape((1,) * (values.ndim - 1) + (-1,))
    left = count - rank - n + 1
    ratios = jnp.log(jnp.maximum(left, 1)) - jnp.log(jnp.maximum(count - rank, 1))
    first = jnp.zeros_like(values[..., :1])
    log_weights = jnp.cumsum(jnp.concatenate([first, ratios], axis=-1), axis=-1)
    chosen = jnp.concatenate([first == 0, left > 0], axis=-1) & (count >= n)
    weights = jnp.where(chosen, n / jnp.maximum(count, 1) * jnp.exp(log_weights), 0)
    return jnp.sum(jnp.where(chosen, weights * values, 0), axis=-1)


def _grouped(scores: Any, n: int, mask: Any) -> tuple[jax.Array, jax.Array]:
    """-> (scores, allowed), each [B / n, n]; scores are 0 where not allowed."""
    scores, selected = grouped(scores, n, mask, 1, "n")
    allowed = selected & jnp.isfinite(scores)
    return jnp.where(allowed, scores, 0), allowed
