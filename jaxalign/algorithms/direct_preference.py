"""Preference objectives without a reward model: DPO and its kin, CPO, ORPO and SimPO on pairs, KTO on single responses.

Every loss is one number a row; their mean over the rows that count is `masked.masked_mean`, or for micro-batches the masked
sum over the global count of rows. Masked rows have loss 0 and no gradient, whatever stands there. "The first" of a pair is
the chosen response where the label is 1, and the rejected one where it is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    require_choice,
    require_positive,
    require_range,
    require_same_shape,
    require_shape,
)
from jaxalign.algorithms.masked import masked_mean

DPO_KINDS = (
    "sigmoid",
    "conservative",
    "robust",
    "hinge",
    "ipo",
    "ipo_mean",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "discopop",
)
SFT = "sft"

# The kinds whose very definition needs label_smoothing above 0, and those that couple the rows of a batch.
_SMOOTHED_KINDS = ("conservative", "robust", "exo_pair")
_TRANSPORT_KINDS = ("aot", "aot_unpaired")


class PreferenceStats(NamedTuple):
    """The implicit rewards of a pair, float32 [B] each and without gradient; 0 at masked rows.

    chosen_rewards: of the first response. rejected_rewards: of the second. margins: the first less the second. A pair is
    ranked as its label says where the margin is above 0 and the label above .5, or both are below.
    """

    chosen_rewards: jax.Array
    rejected_rewards: jax.Array
    margins: jax.Array


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

    With a and b the log-ratios log pi - log ref of the first and the second response, h = a - b, s the logistic function
    and e = label_smoothing, the loss of "the first is better" is, by kind:

        "sigmoid"       -log s(beta h)                                                   DPO, arXiv 2305.18290, eq. 7
        "conservative"  -(1 - e) log s(beta h) - e log s(-beta h)                        cDPO (Mitchell 2023)
        "robust"        (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)          arXiv 2403.00409
        "hinge"         max(0, 1 - beta h)                                               SLiC, arXiv 2305.10425; RSO, 2309.06657
        "ipo"           (h - 1 / (2 beta))^2                                             arXiv 2310.12036, eq. 17
        "ipo_mean"      as "ipo", with a and b divided by their response's tokens        common implementations' IPO
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
    is L itself. label_smoothing is the share of labels taken to be flipped: the label becomes label (1 - e) + (1 - label) e,
    in every kind but three:

      * "robust" undoes the flips instead: its label is (label - e) / (1 - 2 e), which may leave [0, 1].
      * "exo_pair" has a soft target of its own, (label (1 - e) + (1 - label) e, and the rest): its minimum is where p is that
        target. The mixture of the two losses would be least at a p which is more extreme.
      * The "aot" kinds put each pair into the distributions in both orders, weighed by label and 1 - label; then
        -(1 - e) log s - e log s of the negative is what a quantile costs.

    For "ipo", "ipo_mean" and "sppo_hard" the mixture differs from a regression on 2 label - 1 (the papers' soft forms) by a
    constant; for "nca_pair" it is the paper's.

    Rows do not depend on each other, but for the "aot" kinds, to be called on the whole batch (a micro-batch has other
    quantiles), and "bco_pair" without a baseline. Of the "aot" kinds the loss of a row is what its quantiles cost.

    Args:
      chosen_logprobs: real [B], the summed log-probabilities of the first response's tokens, under the policy.
      rejected_logprobs: real [B], those of the second.
      ref_chosen_logprobs: real [B], under the reference; no gradient flows into it. None, together with the next one: 0,
        the reference-free form.
      ref_rejected_logprobs: real [B] or None.
      beta: scalar above 0; in IPO's paper tau, in SPPO's 1 / eta.
      label: scalar or real [B], in [0, 1]: the probability that the first is better.
      kind: one of `DPO_KINDS`.
      label_smoothing: scalar in [0, .5); above 0 for "conservative", "robust" and "exo_pair".
      chosen_lengths: int [B], tokens of the first response; for "ipo_mean", not read by the others. 0 is taken as 1.
      rejected_lengths: int [B], of the second.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.
      baseline: scalar, for "bco_pair", not read by the others: the mean reward (`bco_baseline`), of the whole batch or a
        running one. None: that of the rows at hand.
      discopop_tau: scalar in (0, 1), for "discopop", not read by the others.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta a and beta b.

    Raises:
      ValueError: a shape differs, an unknown kind, a label or a setting outside its range, half a reference, or no lengths
        for "ipo_mean".
    """
    require_choice("kind", kind, DPO_KINDS)
    selected, label, policy, reference = _pairs(
        chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, label, mask
    )
    _require_positive_scalar("beta", beta)
    flips = _flips(label_smoothing, needed_by=kind if kind in _SMOOTHED_KINDS else None)
    if kind == "ipo_mean":
        lengths = _lengths(chosen_lengths, rejected_lengths, policy[0], mask, kind)
        policy, reference = ([x / n for x, n in zip(pair, lengths, strict=True)] for pair in (policy, reference))
    first, second = (x - ref for x, ref in zip(policy, reference, strict=True))

    if kind in _TRANSPORT_KINDS:
        loss = _transport(policy, reference, label, selected, beta, flips, paired=kind == "aot")
    elif kind == "exo_pair":
        loss = _exo(beta * (first - second), label + flips * (1 - 2 * label))
    else:
        objective = _OBJECTIVES[kind]
        if kind == "bco_pair":
            objective = functools.partial(objective, baseline=_baseline(baseline, beta, first, second, selected))
        elif kind == "discopop":
            _require_positive_scalar("discopop_tau", discopop_tau)
            _require_positive_scalar("1 - discopop_tau", 1 - discopop_tau)
            objective = functools.partial(objective, tau=discopop_tau)
        weight = (label - flips) / (1 - 2 * flips) if kind == "robust" else label + flips * (1 - 2 * label)
        loss = _weigh(weight, objective(first, second, beta)) + _weigh(1 - weight, objective(second, first, beta))
    return jnp.where(selected, loss, 0), _stats(beta * first, beta * second)


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
    """The weighted sum of several kinds of `dpo`, and of the SFT loss under the name "sft".

    MPO (Wang et al. 2024, arXiv 2411.10442) is {"sigmoid": .8, "bco_pair": .2, "sft": 1}; DPO with an anchor on the chosen
    response (RPO, arXiv 2404.19733) {"sigmoid": 1, "sft": 1}. The SFT loss is `sft_loss` of the mean log-probability of a
    token. All kinds share one beta and one label_smoothing.

    Args:
      weights: from a name of `DPO_KINDS` or "sft" to its weight, a float that is not negative; they are not normalised.
      chosen_lengths: int [B], tokens of the first response; for "ipo_mean" and "sft". 0 is taken as 1.
      rejected_lengths: int [B], of the second.
      The others as in `dpo`.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta times the summed log-ratios.

    Raises:
      ValueError: as `dpo`; no weights, an unknown name, a negative weight, or no lengths for "sft".
    """
    if not weights:
        raise ValueError(f"weights is empty; names out of {', '.join((*DPO_KINDS, SFT))} and their weights are expected")
    for name, weight in weights.items():
        require_choice("a name in weights", name, (*DPO_KINDS, SFT))
        require_shape(f"weights[{name!r}]", weight, "scalar", ())
        require_range(f"weights[{name!r}]", weight, 0)
    references = ref_chosen_logprobs, ref_rejected_logprobs
    selected, _, policy, reference = _pairs(chosen_logprobs, rejected_logprobs, *references, label, mask)
    _require_positive_scalar("beta", beta)
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
            lengths = _lengths(chosen_lengths, rejected_lengths, policy[0], mask, SFT)
            term = sft_loss(*(x / n for x, n in zip(policy, lengths, strict=True)), label, selected)
        else:
            term, _ = one_kind(kind=name)
        loss = loss + weight * term
    first, second = (x - ref for x, ref in zip(policy, reference, strict=True))
    return loss, _stats(beta * first, beta * second)


def bco_baseline(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    ref_chosen_logprobs: Any,
    ref_rejected_logprobs: Any,
    beta: Any = 0.1,
    mask: Any = None,
) -> jax.Array:
    """The mean implicit reward of all responses, both of each pair: the reward shift of BCO (arXiv 2404.04656, sec. 3.3).

    Taken over the whole batch, or averaged over steps by the caller, and handed to `dpo`, it makes the losses of
    micro-batches add up.

    Args as in `dpo`.

    Returns:
      float32 scalar without gradient; 0 where no row counts.

    Raises:
      ValueError: as `dpo`.
    """
    selected, _, policy, reference = _pairs(
        chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, 1.0, mask
    )
    _require_positive_scalar("beta", beta)
    return _baseline(None, beta, *(x - ref for x, ref in zip(policy, reference, strict=True)), selected)


def sft_loss(chosen_avg_logprobs: Any, rejected_avg_logprobs: Any, label: Any = 1.0, mask: Any = None) -> jax.Array:
    """The supervised loss of the better response: -label * (first) - (1 - label) * (second).

    A response weighs the same whatever its length (the SFT stage, by contrast, averages over all tokens of a batch).

    Args:
      chosen_avg_logprobs: real [B], the mean log-probability of the first response's tokens; sums work as well.
      rejected_avg_logprobs: real [B], of the second; not read where the label is 1.
      label: scalar or real [B], in [0, 1]: the probability that the first is better.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      float32 [B], in nats (a token).

    Raises:
      ValueError: a shape differs, or a label outside [0, 1].
    """
    selected, label, (first, second), _ = _pairs(chosen_avg_logprobs, rejected_avg_logprobs, None, None, label, mask, "avg_")
    return jnp.where(selected, -_weigh(label, first) - _weigh(1 - label, second), 0)


def cpo(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    beta: Any = 0.1,
    label: Any = 1.0,
    nll: Any = None,
    nll_coef: Any = 1.0,
    mask: Any = None,
) -> tuple[jax.Array, PreferenceStats]:
    """Contrastive preference optimisation (Xu et al. 2024, arXiv 2401.08417, eq. 4): no reference, and an SFT term.

        loss = -log sigmoid(beta (chosen - rejected)) + nll_coef * nll

    The first term is `dpo` without a reference, so for its other kinds (hinge, ipo) call that and add the same `nll`.

    Args:
      chosen_logprobs: real [B], the summed log-probabilities of the first response's tokens, under the policy.
      rejected_logprobs: real [B], those of the second.
      beta: scalar above 0.
      label: scalar or real [B], in [0, 1]: the probability that the first is better; soft labels as in `dpo`.
      nll: real [B], `sft_loss` of the summed log-probabilities (the paper) or of the mean ones (common implementations);
        None for the first term alone.
      nll_coef: scalar, not negative; 1 in the paper.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta times the log-probabilities.

    Raises:
      ValueError: a shape differs, or a label or a setting outside its range.
    """
    loss, stats = dpo(chosen_logprobs, rejected_logprobs, None, None, beta, label, mask=mask)
    return _add_nll(loss, nll, nll_coef, mask), stats


def orpo(
    chosen_avg_logprobs: Any,
    rejected_avg_logprobs: Any,
    beta: Any = 1.0,
    label: Any = 1.0,
    nll: Any = None,
    mask: Any = None,
) -> tuple[jax.Array, PreferenceStats]:
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7): SFT and a penalty, one stage.

        odds(p) = p / (1 - p),    p = exp(mean log-probability of a token)
        loss = nll + beta * (-log sigmoid(log odds(chosen) - log odds(rejected)))

    As called with two arguments it is the odds term. ORPO itself has beta = .1 (lambda in the paper) and
    nll = sft_loss(chosen_avg_logprobs, rejected_avg_logprobs, label, mask): the odds term alone has no anchor.

    Args:
      chosen_avg_logprobs: real [B], the mean log-probability of the first response's tokens, at most 0. Odds are capped at
        1 / epsilon of the dtype: a probability of 1 has infinite ones.
      rejected_avg_logprobs: real [B], of the second.
      beta: scalar above 0, the odds term's weight.
      label: scalar or real [B], in [0, 1]: the probability that the first is better; soft labels as in `dpo`.
      nll: real [B], or None for the odds term alone.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are the log odds, and the margins their difference.

    Raises:
      ValueError: a shape differs, a label or a setting outside its range, or a log-probability above 0.
    """
    _require_positive_scalar("beta", beta)
    selected, label, pair, _ = _pairs(chosen_avg_logprobs, rejected_avg_logprobs, None, None, label, mask, "avg_")
    for name, x in (("chosen_avg_logprobs", chosen_avg_logprobs), ("rejected_avg_logprobs", rejected_avg_logprobs)):
        require_range(name, _counted(x, mask), -jnp.inf, 0, tolerance=1e-6)
    first, second = (_log_odds(x) for x in pair)
    odds = _weigh(label, _logistic(first, second, 1)) + _weigh(1 - label, _logistic(second, first, 1))
    loss = _add_nll(jnp.where(selected, beta * odds, 0), nll, 1.0, mask)
    return loss, _stats(*(jnp.where(selected, x, 0) for x in (first, second)))


def simpo(
    chosen_avg_logprobs: Any,
    rejected_avg_logprobs: Any,
    beta: Any = 2.0,
    gamma: Any = 0.5,
    label: Any = 1.0,
    mask: Any = None,
) -> tuple[jax.Array, PreferenceStats]:
    """Simple preference optimisation (Meng et al. 2024, arXiv 2405.14734, eq. 6): mean log-probabilities and a margin.

        loss = -log sigmoid(beta (chosen - rejected) - gamma)

    Args:
      chosen_avg_logprobs: real [B], the mean log-probability of the first response's tokens, under the policy.
      rejected_avg_logprobs: real [B], of the second.
      beta: scalar above 0.
      gamma: scalar, not negative, in units of the reward; elsewhere given as gamma / beta.
      label: scalar or real [B], in [0, 1]: the probability that the first is better; soft labels as in `dpo`, so that the
        margin is asked for in both directions.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta times the mean log-probabilities, the margins without gamma.

    Raises:
      ValueError: a shape differs, or a label or a setting outside its range.
    """
    _require_positive_scalar("beta", beta)
    require_shape("gamma", gamma, "scalar", ())
    require_range("gamma", gamma, 0)
    selected, label, pair, _ = _pairs(chosen_avg_logprobs, rejected_avg_logprobs, None, None, label, mask, "avg_")
    first, second = (beta * x for x in pair)
    loss = _weigh(label, _logistic(first - gamma, second, 1)) + _weigh(1 - label, _logistic(second - gamma, first, 1))
    return jnp.where(selected, loss, 0), _stats(first, second)


def kto(
    policy_logprobs: Any,
    ref_logprobs: Any,
    desirable: Any,
    kl: Any,
    beta: Any = 0.1,
    desirable_weight: Any = 1.0,
    undesirable_weight: Any = 1.0,
    mask: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Kahneman-Tversky optimisation of single responses (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8).

        loss = desirable_weight (1 - sigmoid(beta (a - kl)))      where desirable, a = policy_logprobs - ref_logprobs
        loss = undesirable_weight (1 - sigmoid(beta (kl - a)))    where not

    A judgement between 0 and 1 mixes the two.

    Args:
      policy_logprobs: real [B], the summed log-probabilities of a response's tokens, under the policy.
      ref_logprobs: real [B], under the reference; no gradient flows into it. None: 0.
      desirable: bool or real [B], in [0, 1]: (the probability that) the response is good.
      kl: scalar, the reference point z0 (`kto_baseline`), over the whole batch; no gradient flows into it.
      beta: scalar above 0.
      desirable_weight: scalar, not negative. The paper wants the weights' ratio, times that of the two counts, in
        [1, 3/2].
      undesirable_weight: scalar, not negative.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, rewards): float32 [B] both; the rewards, beta a, without gradient.

    Raises:
      ValueError: a shape differs, or a judgement or a setting outside its range.
    """
    _require_positive_scalar("beta", beta)
    for name, x in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        require_shape(name, x, "scalar", ())
        require_range(name, x, 0)
    require_shape("kl", kl, "scalar", ())
    selected, desirable, log_ratios = _singles(policy_logprobs, ref_logprobs, mask, desirable)
    gain = beta * (log_ratios - jax.lax.stop_gradient(as_float("kl", kl)))
    good, bad = desirable_weight * jax.nn.sigmoid(-gain), undesirable_weight * jax.nn.sigmoid(gain)
    loss = jnp.where(selected, desirable * good + (1 - desirable) * bad, 0)
    return loss, jax.lax.stop_gradient(beta * log_ratios)


def kto_baseline(policy_logprobs: Any, ref_logprobs: Any, mask: Any = None) -> jax.Array:
    """KTO's reference point: max(0, mean of log pi - log ref over mismatched pairs), an estimate of KL(pi || ref).

    A mismatched pair is a row's prompt with another row's response, commonly that of the next row; the last row takes the
    first's. Call it on the whole batch: the mean of micro-batches, each cut off at 0, is another number.

    Args:
      policy_logprobs: real [B], the summed log-probabilities of the other response's tokens after this row's prompt.
      ref_logprobs: real [B], under the reference. None: 0.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      float32 scalar without gradient, in nats, never negative; 0 where no row counts.

    Raises:
      ValueError: a shape differs.
    """
    selected, _, log_ratios = _singles(policy_logprobs, ref_logprobs, mask, 1.0)
    return jax.lax.stop_gradient(jnp.maximum(masked_mean(log_ratios, selected), 0))


def _logistic(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return jax.nn.softplus(-beta * (a - b))


def _ipo(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return (a - b - 0.5 / beta) ** 2


def _bco(a: jax.Array, b: jax.Array, beta: Any, baseline: Any) -> jax.Array:
    return jax.nn.softplus(baseline - beta * a) + jax.nn.softplus(beta * b - baseline)


def _nca(a: jax.Array, b: jax.Array, beta: Any) -> jax.Array:
    return jax.nn.softplus(-beta * a) + 0.5 * (jax.nn.softplus(beta * a) + jax.nn.softplus(beta * b))


def _discopop(a: jax.Array, b: jax.Array, beta: Any, tau: Any) -> jax.Array:
    margin = beta * (a - b)
    # The product in logarithms: exp(-margin) overflows long before sigmoid(margin / tau) has outweighed it.
    exponential = jnp.exp(jax.nn.log_sigmoid(margin / tau) - margin)
    return jax.nn.sigmoid(-margin / tau) * jax.nn.softplus(-margin) + exponential


# Each of (log-ratio of the better response, of the worse, beta).
_OBJECTIVES: dict[str, Callable[..., jax.Array]] = {
    "sigmoid": _logistic,
    "conservative": _logistic,
    "robust": _logistic,
    "hinge": lambda a, b, beta: jax.nn.relu(1 - beta * (a - b)),
    "ipo": _ipo,
    "ipo_mean": _ipo,
    "nca_pair": _nca,
    "bco_pair": _bco,
    "apo_zero": lambda a, b, beta: jax.nn.sigmoid(-beta * a) + jax.nn.sigmoid(beta * b),
    "apo_down": lambda a, b, beta: jax.nn.sigmoid(beta * a) + jax.nn.sigmoid(-beta * (a - b)),
    "sppo_hard": lambda a, b, beta: (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
    "discopop": _discopop,
}


def _exo(margin: jax.Array, target: jax.Array) -> jax.Array:
    """KL of (s(margin), s(-margin)) from (target, 1 - target)."""
    ahead, behind = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return jnp.exp(ahead) * (ahead - jnp.log(target)) + jnp.exp(behind) * (behind - jnp.log1p(-target))


def _transport(
    policy: Any, reference: Any, label: jax.Array, selected: jax.Array, beta: Any, flips: Any, paired: bool
) -> jax.Array:
    """AOT: how far one distribution is from dominating the other. A row is two atoms, one for each order of its pair."""
    if paired:
        better, worse = policy[0] - policy[1], reference[0] - reference[1]
        better, worse = (jnp.concatenate([x, -x]) for x in (better, worse))
    else:
        first, second = (x - ref for x, ref in zip(policy, reference, strict=True))
        better, worse = jnp.concatenate([first, second]), jnp.concatenate([second, first])
    weights = jnp.where(selected[None, :], jnp.stack([label, 1 - label]), 0).reshape(-1)

    def cost(violation: jax.Array) -> jax.Array:
        return (1 - flips) * jax.nn.softplus(-beta * violation) + flips * jax.nn.softplus(beta * violation)

    return jnp.sum(_coupled(better, worse, weights, cost).reshape(2, -1), axis=0)


def _coupled(x: jax.Array, y: jax.Array, weights: jax.Array, cost: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """What each atom of `x` pays when equal quantiles of `x` and `y`, of the same weights [M], meet. float32 [M].

    With weights of 0 and 1 it pairs the sorted values; a fractional atom is split where the other side's ends.
    """
    # Atoms without weight come last, where no quantile reaches them.
    order_x, order_y = (jnp.argsort(jnp.where(weights > 0, values, jnp.inf)) for values in (x, y))
    ends_x, ends_y = jnp.cumsum(weights[order_x]), jnp.cumsum(weights[order_y])
    cuts = jnp.sort(jnp.concatenate([ends_x, ends_y]))
    starts = jnp.concatenate([jnp.zeros(1, cuts.dtype), cuts[:-1]])
    middles, widths = 0.5 * (starts + cuts), cuts - starts
    last = max(weights.shape[0] - 1, 0)
    i, j = (
        order[jnp.minimum(jnp.searchsorted(ends, middles, side="right"), last)]
        for order, ends in ((order_x, ends_x), (order_y, ends_y))
    )
    return jnp.zeros_like(weights).at[i].add(_weigh(widths, cost(x[i] - y[j])))


def _weigh(weight: jax.Array, loss: jax.Array) -> jax.Array:
    # A response that is impossible under the policy makes the loss of the order that does not count infinite.
    return jnp.where(weight == 0, 0, weight * loss)


def _log_odds(logprobs: jax.Array) -> jax.Array:
    logprobs = jnp.minimum(logprobs, -jnp.finfo(logprobs.dtype).eps)
    # Of log(1 - exp(x)) each form keeps its digits on one side of -log 2; the inner `where`s keep the other's gradient finite.
    near = logprobs > -0.6931
    log_rest = jnp.where(
        near,
        jnp.log(-jnp.expm1(jnp.where(near, logprobs, -0.1))),
        jnp.log1p(-jnp.exp(jnp.where(near, -1.0, logprobs))),
    )
    return logprobs - log_rest


def _pairs(
    chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, label: Any, mask: Any, of: str = ""
) -> tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]:
    """The guards that all pairs share. -> (selected, label [B], [first, second], [their references]), 0 where masked."""
    if (ref_chosen is None) != (ref_rejected is None):
        raise ValueError("one of ref_chosen_logprobs and ref_rejected_logprobs is None; give both, or neither")
    selected = jnp.ones(jnp.shape(chosen), bool) if mask is None else jnp.asarray(mask) != 0
    arrays = {f"chosen_{of}logprobs": chosen, f"rejected_{of}logprobs": rejected}
    if ref_chosen is not None:
        arrays |= {"ref_chosen_logprobs": ref_chosen, "ref_rejected_logprobs": ref_rejected}
    require_same_shape(**arrays, mask=selected)
    require_shape(f"chosen_{of}logprobs", chosen, "[B]", (None,))
    floats = [jnp.where(selected, as_float(name, x), 0) for name, x in arrays.items()]
    dtype = jnp.result_type(*floats)
    floats = [x.astype(dtype) for x in floats]
    policy = floats[:2]
    reference = [jax.lax.stop_gradient(x) for x in floats[2:]] or [jnp.zeros_like(x) for x in policy]
    return selected, _judged("label", label, mask, policy[0]), policy, reference


def _singles(policy_logprobs: Any, ref_logprobs: Any, mask: Any, desirable: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The guards that KTO's functions share. -> (selected, desirable [B], log-ratios [B], 0 where masked)."""
    selected = jnp.ones(jnp.shape(policy_logprobs), bool) if mask is None else jnp.asarray(mask) != 0
    ref_logprobs = jnp.zeros(jnp.shape(policy_logprobs)) if ref_logprobs is None else ref_logprobs
    require_same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs, mask=selected)
    require_shape("policy_logprobs", policy_logprobs, "[B]", (None,))
    reference = jax.lax.stop_gradient(as_float("ref_logprobs", ref_logprobs))
    log_ratios = jnp.where(selected, as_float("policy_logprobs", policy_logprobs) - reference, 0)
    return selected, _judged("desirable", desirable, mask, log_ratios), log_ratios


def _judged(name: str, judgement: Any, mask: Any, like: jax.Array) -> jax.Array:
    """A scalar or [B] in [0, 1] as [B] without gradient, 0 or the scalar where masked."""
    if jnp.ndim(judgement):
        require_shape(name, judgement, "[B]", like.shape)
        judgement = _counted(judgement, mask)
    require_range(name, judgement, 0, 1)
    return jax.lax.stop_gradient(jnp.broadcast_to(jnp.asarray(judgement, like.dtype), like.shape))


def _flips(label_smoothing: Any, needed_by: str | None) -> Any:
    require_shape("label_smoothing", label_smoothing, "scalar", ())
    require_range("label_smoothing", label_smoothing, 0)
    require_positive("0.5 - label_smoothing", 0.5 - label_smoothing)
    if needed_by is not None:
        require_positive(f"label_smoothing, which {needed_by!r} needs,", label_smoothing)
    return label_smoothing


def _lengths(chosen_lengths: Any, rejected_lengths: Any, like: jax.Array, mask: Any, needed_by: str) -> list[jax.Array]:
    lengths = []
    for name, x in (("chosen_lengths", chosen_lengths), ("rejected_lengths", rejected_lengths)):
        if x is None:
            raise ValueError(f"{name} is None; {needed_by!r} averages over tokens and needs it")
        require_shape(name, x, "[B]", like.shape)
        x = _counted(x, mask)
        require_range(name, x, 0)
        lengths.append(jnp.maximum(jnp.asarray(x, like.dtype), 1))
    return lengths


def _counted(x: Any, mask: Any) -> Any:
    """`x` with 0 where masked. Without a mask `x` itself, for under `jit` a guard can read no other."""
    return x if mask is None else jnp.where(jnp.asarray(mask) != 0, jnp.asarray(x), 0)


def _baseline(baseline: Any, beta: Any, first: jax.Array, second: jax.Array, selected: jax.Array) -> jax.Array:
    if baseline is None:
        baseline = 0.5 * beta * masked_mean(first + second, selected)
    require_shape("baseline", baseline, "scalar", ())
    return jax.lax.stop_gradient(jnp.asarray(baseline, first.dtype))


def _add_nll(loss: jax.Array, nll: Any, coef: Any, mask: Any) -> jax.Array:
    require_shape("nll_coef", coef, "scalar", ())
    require_range("nll_coef", coef, 0)
    if nll is None:
        return loss
    require_same_shape(loss=loss, nll=nll)
    nll = as_float("nll", nll)
    return loss + coef * (nll if mask is None else jnp.where(jnp.asarray(mask) != 0, nll, 0))


def _require_positive_scalar(name: str, x: Any) -> None:
    require_shape(name, x, "scalar", ())
    require_positive(name, x)


def _stats(first: jax.Array, second: jax.Array) -> PreferenceStats:
    return jax.lax.stop_gradient(PreferenceStats(first, second, first - second))
