"""Preference objectives on pairs with a reference: DPO and its variants (others are in `reference_free` and `kto`).

Each loss has one value per row. Average it with `masked.masked_mean`; for micro-batches, divide the masked sum by the global
count of rows. Masked rows have loss 0 and no gradient, whatever their values. "The first" response of a pair is the chosen
response where the label is 1, and the rejected one where it is 0.

With a and b the log-ratios log pi - log ref of the first and the second response, h = a - b, s the logistic function
and e = label_smoothing, the loss of "the first is better" is, by kind:

    "sigmoid"       -log s(beta h)                                                   DPO, arXiv 2305.18290, eq. 7
    "conservative"  -(1 - e) log s(beta h) - e log s(-beta h)                        cDPO (Mitchell 2023)
    "robust"        (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)          arXiv 2403.00409
    "hinge"         max(0, 1 - beta h)                                               SLiC, arXiv 2305.10425; RSO, 2309.06657
    "ipo"           (h - 1 / (2 beta))^2                                             arXiv 2310.12036, eq. 17
    "ipo_mean"      as "ipo", with a and b divided by their response's token count   common implementations' IPO
    "exo_pair"      KL((p, 1 - p) || (1 - e, e)), p = s(beta h)                      arXiv 2402.00856
    "nca_pair"      -log s(beta a) - (log s(-beta a) + log s(-beta b)) / 2           arXiv 2402.05369
    "bco_pair"      -log s(beta a - baseline) - log s(baseline - beta b)             arXiv 2404.04656
    "apo_zero"      1 - s(beta a) + s(beta b)                                        arXiv 2408.06266, eq. 7
    "apo_down"      s(beta a) + 1 - s(beta h)                                        arXiv 2408.06266, eq. 8
    "sppo_hard"     (a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2                      arXiv 2405.00675, eq. 4.7
    "aot"           -log s(beta (q - r)) over equal quantiles q of the policy's      arXiv 2406.05882
                    margins chosen - rejected and r of the reference's
    "aot_unpaired"  -log s(beta (q - r)) over equal quantiles q of a and r of b      arXiv 2406.05882
    "discopop"      (1 - w) (-log s(beta h)) + w exp(-beta h), w = s(beta h / tau)   LRML, arXiv 2406.08414, eq. 5

Soft labels: with L the loss above, label * L(first over second) + (1 - label) * L(second over first), which for label 1
is L itself. label_smoothing is the assumed share of flipped labels: the label becomes label (1 - e) + (1 - label) e, with
three exceptions:

  * "robust" corrects for the flips instead: its label is (label - e) / (1 - 2 e), which may lie outside [0, 1].
  * "exo_pair" takes the smoothed label t = label (1 - e) + (1 - label) e as its target distribution (t, 1 - t), so its minimum
    is at p = t. The minimum of the mixture of the two losses would be at a more extreme p.
  * The "aot" kinds put each pair into the distributions in both orders, weighted by label and 1 - label. The cost of a
    quantile with margin x = beta (q - r) is then -(1 - e) log s(x) - e log s(-x).

For "ipo", "ipo_mean" and "sppo_hard" the mixture differs from a regression on 2 label - 1 (the papers' soft form) by a
constant; for "nca_pair" it equals the paper's form.

Rows are independent, with two exceptions: the "aot" kinds, which need the whole batch because a micro-batch has different
quantiles, and "bco_pair" without a baseline. In the "aot" kinds the loss of a row is the cost of its quantile.

A log-probability of -inf gives the limit of the formula, which may be infinite, as may the gradient of a squared loss.
"discopop" limits the margin to 1e30. Only a response of -inf under both policy and reference has the loss NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.answer_inputs import PreferenceStats, pair_inputs, reward_stats, token_counts, weigh
from jaxalign.algorithms.guards import require_choice, require_positive, require_positive_scalar, require_scalar, require_shape
from jaxalign.algorithms.importance import LARGE
from jaxalign.algorithms.masked import masked_mean
from jaxalign.algorithms.optimal_transport import transport
from jaxalign.registry.objectives import OBJECTIVES

_KINDS = {record.name: record for record in OBJECTIVES.builtin.values() if record.dpo_kind}
DPO_KINDS = tuple(_KINDS)
"""The kinds, declared with their formulas at the end of this module."""
SFT = "sft"


def dpo(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    ref_chosen_logprobs: Any,
    ref_rejected_logprobs: Any,
    beta: Any = 0.1,
    label: Any = 1.0,
    kind: str = "sigmoid",
    label_smoothing: Any = 0.0,
    chosen_lengths: Any = None,
    rejected_lengths: Any = None,
    mask: Any = None,
    baseline: Any = None,
    discopop_tau: Any = 0.05,
) -> tuple[jax.Array, PreferenceStats]:
    """Direct preference optimisation and the objectives that share its inputs, for hard and soft labels.

    The module docstring gives the loss of each kind.

    Args:
      chosen_logprobs: real [B], the summed log-probabilities of the first response's tokens, under the policy.
      rejected_logprobs: real [B], of the second.
      ref_chosen_logprobs: real [B], under the reference; no gradient flows into it. None, together with
        `ref_rejected_logprobs`: reference-free.
      ref_rejected_logprobs: real [B] or None.
      beta: scalar above 0; tau in the IPO paper, 1 / eta in the SPPO paper.
      label: scalar or real [B], in [0, 1]: the probability that the first is better.
      kind: one of `DPO_KINDS`.
      label_smoothing: scalar in [0, .5); above 0 for "conservative", "robust" and "exo_pair".
      chosen_lengths, rejected_lengths: int [B], the responses' token counts, which only "ipo_mean" reads; 0 counts as 1.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.
      baseline: scalar, only "bco_pair" reads it: the mean reward (`bco_baseline`) of the whole batch, or a running mean.
        None: the mean over the given rows; 0 disables it, as in TRL.
      discopop_tau: scalar in (0, 1); only "discopop" reads it.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta a and beta b.

    Raises:
      ValueError: a wrong shape, an unknown kind, a setting outside its range, only one of the two reference arrays, or no
        lengths for "ipo_mean".
    """
    require_choice("kind", kind, DPO_KINDS)
    logprobs = chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs
    selected, label, policy, reference = pair_inputs(*logprobs, label, mask)
    require_positive_scalar("beta", beta)
    flips = _flips(label_smoothing, needed_by=kind if _KINDS[kind].smoothing_required else None)
    if kind == "ipo_mean":
        lengths = token_counts(chosen_lengths, rejected_lengths, policy[0], mask, kind)
        policy, reference = ([x / n for x, n in zip(pair, lengths, strict=True)] for pair in (policy, reference))
    first, second = (x - ref for x, ref in zip(policy, reference, strict=True))

    if _KINDS[kind].sorts_the_batch:
        loss = transport(*_KINDS[kind].load()(policy, reference), label, selected, beta, flips)
    elif kind == "exo_pair":
        loss = _exo(beta * (first - second), label + flips * (1 - 2 * label))
    else:
        objective = _objective(kind, beta, first, second, selected, baseline, discopop_tau)
        weight = (label - flips) / (1 - 2 * flips) if kind == "robust" else label + flips * (1 - 2 * label)
        loss = weigh(weight, objective, (first, second), beta) + weigh(1 - weight, objective, (second, first), beta)
    return jnp.where(selected, loss, 0), reward_stats(beta * first, beta * second)


def _objective(
    kind: str, beta: Any, first: jax.Array, second: jax.Array, selected: jax.Array, baseline: Any, tau: Any
) -> Callable[..., jax.Array]:
    """The function (a, b, beta) -> loss [B] of a kind whose rows are independent."""
    objective = _KINDS[kind].load()
    if kind == "bco_pair":
        return functools.partial(objective, baseline=_baseline(baseline, beta, first, second, selected))
    if kind == "discopop":
        require_positive_scalar("discopop_tau", tau)
        require_positive_scalar("1 - discopop_tau", 1 - tau)
        return functools.partial(objective, tau=tau)
    return objective


def mixed_dpo(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    ref_chosen_logprobs: Any,
    ref_rejected_logprobs: Any,
    weights: Mapping[str, float],
    beta: Any = 0.1,
    label: Any = 1.0,
    label_smoothing: Any = 0.0,
    chosen_lengths: Any = None,
    rejected_lengths: Any = None,
    mask: Any = None,
    baseline: Any = None,
    discopop_tau: Any = 0.05,
) -> tuple[jax.Array, PreferenceStats]:
    """The weighted sum of several kinds of `dpo` and, under the name "sft", the SFT loss.

    MPO (Wang et al. 2024, arXiv 2411.10442) is {"sigmoid": .8, "bco_pair": .2, "sft": 1}. DPO with an anchor on the chosen
    response (RPO, arXiv 2404.19733) is {"sigmoid": 1, "sft": 1}. The SFT loss is `sft_loss` of the mean log-probability per
    token. All kinds share one beta and one label_smoothing.

    Args:
      weights: maps a name in `DPO_KINDS`, or "sft", to its weight, a float that is not negative; weights are not normalised.
      chosen_lengths: int [B], token count of the first response; for "ipo_mean" and "sft". 0 is treated as 1.
      rejected_lengths: int [B], of the second.
      The other arguments as in `dpo`.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta times the summed log-ratios.

    Raises:
      ValueError: as `dpo`; no weights, an unknown name, a negative weight, or no lengths for "sft".
    """
    _require_weights(weights)
    references = ref_chosen_logprobs, ref_rejected_logprobs
    selected, _, policy, reference = pair_inputs(chosen_logprobs, rejected_logprobs, *references, label, mask)
    require_positive_scalar("beta", beta)
    one_kind = functools.partial(
        dpo,
        *(chosen_logprobs, rejected_logprobs, *references, beta, label),
        label_smoothing=label_smoothing,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        mask=selected,
        baseline=baseline,
        discopop_tau=discopop_tau,
    )
    loss = jnp.zeros_like(policy[0])
    for name, weight in weights.items():
        if name == SFT:
            lengths = token_counts(chosen_lengths, rejected_lengths, policy[0], mask, SFT)
            term = sft_loss(*(x / n for x, n in zip(policy, lengths, strict=True)), label, selected)
        else:
            term, _ = one_kind(kind=name)
        loss = loss + weight * term
    first, second = (x - ref for x, ref in zip(policy, reference, strict=True))
    return loss, reward_stats(beta * first, beta * second)


def _require_weights(weights: Mapping[str, float]) -> None:
    if not isinstance(weights, Mapping) or not weights:
        given = "empty" if isinstance(weights, Mapping) else f"of type {type(weights).__name__}"
        raise ValueError(f"weights is {given}; at least one of {', '.join((*DPO_KINDS, SFT))} is expected, with its weight")
    for name, weight in weights.items():
        require_choice("a name in weights", name, (*DPO_KINDS, SFT))
        require_scalar(f"weights[{name!r}]", weight, 0)


def bco_baseline(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    ref_chosen_logprobs: Any,
    ref_rejected_logprobs: Any,
    beta: Any = 0.1,
    mask: Any = None,
) -> jax.Array:
    """The mean implicit reward over both responses of every pair: the reward shift of BCO (arXiv 2404.04656, sec. 3.3).

    Compute it over the whole batch (or keep a running mean over steps) and pass it to `dpo`, so that the losses of the
    micro-batches add up to the loss of the batch.

    Args as in `dpo`.

    Returns:
      float32 scalar without gradient; 0 where no row counts.

    Raises:
      ValueError: as `dpo`.
    """
    selected, _, policy, reference = pair_inputs(
        chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, 1.0, mask
    )
    require_positive_scalar("beta", beta)
    return _baseline(None, beta, *(x - ref for x, ref in zip(policy, reference, strict=True)), selected)


def sft_loss(chosen_avg_logprobs: Any, rejected_avg_logprobs: Any, label: Any = 1.0, mask: Any = None) -> jax.Array:
    """The supervised loss of the better response: -label * (first) - (1 - label) * (second).

    Every response has the same weight, whatever its length. (The SFT stage instead averages over all tokens of a batch.)

    Args:
      chosen_avg_logprobs: real [B], the mean log-probability of the first response's tokens; summed ones also work.
      rejected_avg_logprobs: real [B], of the second; ignored where the label is 1.
      label: scalar or real [B], in [0, 1]: the probability that the first is better.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      float32 [B], in nats (per token for mean log-probabilities).

    Raises:
      ValueError: a shape differs, or a label is outside [0, 1].
    """
    means = chosen_avg_logprobs, rejected_avg_logprobs
    selected, label, (first, second), _ = pair_inputs(*means, None, None, label, mask, "avg_")
    return jnp.where(selected, -weigh(label, jnp.asarray, (first,)) - weigh(1 - label, jnp.asarray, (second,)), 0)


# The formulas are functions of (log-ratio of the better response, log-ratio of the worse response, beta), except those of
# exo_pair and of the kinds that compare the pairs of a batch.


@OBJECTIVES.declare("sigmoid", dpo_kind=True)
@OBJECTIVES.declare("conservative", dpo_kind=True, smoothing_required=True)
@OBJECTIVES.declare("robust", dpo_kind=True, smoothing_required=True)
def logistic(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    """-log sigmoid(beta (a - b))."""
    return jax.nn.softplus(-beta * (a - b))


@OBJECTIVES.declare("hinge", dpo_kind=True)
def _hinge(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return jax.nn.relu(1 - beta * (a - b))


@OBJECTIVES.declare("ipo", dpo_kind=True)
@OBJECTIVES.declare("ipo_mean", dpo_kind=True, mean_rewards=True)
def _ipo(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return (a - b - 0.5 / beta) ** 2


@OBJECTIVES.declare("exo_pair", dpo_kind=True, smoothing_required=True)
def _exo(margin: jax.Array, target: jax.Array) -> jax.Array:
    """KL((s(margin), s(-margin)) || (target, 1 - target))."""
    margin = jnp.clip(margin, -LARGE, LARGE)  # The probability 0 times its infinite logarithm is NaN.
    ahead, behind = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return jnp.exp(ahead) * (ahead - jnp.log(target)) + jnp.exp(behind) * (behind - jnp.log1p(-target))


@OBJECTIVES.declare("nca_pair", dpo_kind=True)
def _nca(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return jax.nn.softplus(-beta * a) + 0.5 * (jax.nn.softplus(beta * a) + jax.nn.softplus(beta * b))


@OBJECTIVES.declare("bco_pair", dpo_kind=True, anchor="jaxalign.steps.objectives:mean_reward")
def _bco(a: jax.Array, b: jax.Array, beta: Any, baseline: Any) -> jax.Array:
    return jax.nn.softplus(baseline - beta * a) + jax.nn.softplus(beta * b - baseline)


@OBJECTIVES.declare("apo_zero", dpo_kind=True)
def _apo_zero(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return jax.nn.sigmoid(-beta * a) + jax.nn.sigmoid(beta * b)


@OBJECTIVES.declare("apo_down", dpo_kind=True)
def _apo_down(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return jax.nn.sigmoid(beta * a) + jax.nn.sigmoid(-beta * (a - b))


@OBJECTIVES.declare("sppo_hard", dpo_kind=True)
def _sppo(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2


@OBJECTIVES.declare("aot", dpo_kind=True, sorts_the_batch=True)
def _aot(policy: Sequence[jax.Array], reference: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The margins of the policy and of the reference, [2 B] each: every pair in both orders."""
    better, worse = policy[0] - policy[1], reference[0] - reference[1]
    return jnp.concatenate([better, -better]), jnp.concatenate([worse, -worse])


@OBJECTIVES.declare("aot_unpaired", dpo_kind=True, sorts_the_batch=True)
def _aot_unpaired(policy: Sequence[jax.Array], reference: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The log-ratios of the better and of the worse responses, [2 B] each: every pair in both orders."""
    first, second = (x - ref for x, ref in zip(policy, reference, strict=True))
    return jnp.concatenate([first, second]), jnp.concatenate([second, first])


@OBJECTIVES.declare("discopop", dpo_kind=True)
def _discopop(a: jax.Array, b: jax.Array, beta: Any, tau: Any) -> jax.Array:
    margin = jnp.clip(beta * (a - b), -LARGE, LARGE)  # 0 * inf and inf - inf are NaN.
    # Multiplied in log space: exp(-margin) overflows although its product with sigmoid(margin / tau) is finite.
    exponential = jnp.exp(jax.nn.log_sigmoid(margin / tau) - margin)
    return jax.nn.sigmoid(-margin / tau) * jax.nn.softplus(-margin) + exponential


def _flips(label_smoothing: Any, needed_by: str | None) -> Any:
    require_scalar("label_smoothing", label_smoothing, 0)
    require_positive("0.5 - label_smoothing", 0.5 - label_smoothing)
    if needed_by is not None:
        require_positive(f"label_smoothing, which {needed_by!r} needs,", label_smoothing)
    return label_smoothing


def _baseline(baseline: Any, beta: Any, first: jax.Array, second: jax.Array, selected: jax.Array) -> jax.Array:
    if baseline is None:
        baseline = 0.5 * beta * masked_mean(first + second, selected & ~jnp.isinf(first + second))
    require_shape("baseline", baseline, "scalar", ())
    return jax.lax.stop_gradient(jnp.asarray(baseline, first.dtype))
