"""Log-probabilities, entropies, KL, values and masks of sampled responses under a model.

B responses of N tokens are packed into R rows of T tokens. Every function accepts packed rows, so that short responses cost
little. Values past a response's end are arbitrary: mask them with `response_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxalign.config.arguments import instance_of
from jaxalign.config.constraints import above
from jaxalign.config.schema import checked
from jaxalign.errors import UserError
from jaxalign.models.heads import TokenStats, gather_positions, length_mask, token_kl
from jaxalign.models.model import Model
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerRows, Experience, PackedParts, Rollout
from jaxalign.steps.packed import alone, each_part, of_answers


def response_hidden(model: Model, params, rows: AnswerRows):
    """The trunk's last hidden states [R, T, D]."""
    return model.hidden(params, rows.tokens, rows.positions, rows.segment_ids)


def _require_rollout(rollout: Any) -> None:
    instance_of(rollout, Rollout, "rollout", "a Rollout, as jaxalign.Sampler.rollout returns it,")


def _require(model: Any, params: Any, rollout: Any) -> None:
    """Raises UserError unless the arguments have the types that the functions of this module take."""
    instance_of(model, Model, "model", "a Model, such as the attribute `model` of a LanguageModel,")
    if not isinstance(params, Mapping) or "embedding" not in params:
        raise UserError(f"params is of type {type(params).__name__} or lacks 'embedding'; the model's parameters are expected, "
                        "with adapters joined with the base (`weights` of a LanguageModel)")
    _require_rollout(rollout)


def response_stats(
    model: Model, params, rollout: Rollout, temperature: float, hidden=None, rows: AnswerRows | None = None
) -> TokenStats:
    """Log-probabilities and entropies of the response tokens.

    Policy and reference are evaluated at the same temperature, so that equal weights give a KL of 0. The head reads only the
    positions of response tokens.

    Args:
      model: a model with an LM head.
      params: its parameters; with adapters, joined with the base.
      rollout: B responses of at most N tokens.
      temperature: the sampling temperature.
      hidden: `response_hidden` of the rows, if already computed.
      rows: the packed rows; None gives each response its own row.

    Returns:
      `TokenStats` of float32 [B, N] arrays, arbitrary past a response's end.
    """
    _require(model, params, rollout)
    if not isinstance(temperature, jax.core.Tracer):
        temperature = checked(temperature, float, "temperature", above(0))
    rows = alone(rollout) if rows is None else rows
    hidden = response_hidden(model, params, rows) if hidden is None else hidden
    targets = gather_positions(rows.tokens, rows.heads + 1)
    stats = model.token_stats(params, gather_positions(hidden, rows.heads), targets, temperature, rows.used)
    return TokenStats(*(of_answers(x, rows.first, rollout.logprobs.shape[1]) for x in stats))


def logprobs_by_parts(model: Model, params, rollout: Rollout, temperature: float, parts: PackedParts) -> jax.Array:
    """float32 [B, N]: the log-probabilities of `response_stats`, computed one part after another; 0 for rows in no part."""
    return each_part(parts, lambda rows: response_stats(model, params, rollout, temperature, None, rows).logprobs)


def response_kl(
    policy: Model, params, reference: Model, reference_params, rollout: Rollout, temperature: float, hidden=None,
    rows: AnswerRows | None = None,
):
    """The exact KL(policy || reference) [B, N] over the vocabulary at the state before each response token.

    Its gradient flows into `params` only. `hidden` (the policy's) and `rows` are as in `response_stats`.
    """
    _require(policy, params, rollout)
    _require(reference, reference_params, rollout)
    rows = alone(rollout) if rows is None else rows
    hidden = response_hidden(policy, params, rows) if hidden is None else hidden
    reference_rows = after(policy.sharding, rows, hidden)
    other = jax.lax.stop_gradient(response_hidden(reference, reference_params, reference_rows))
    hidden, other = (gather_positions(x, rows.heads) for x in (hidden, other))
    weights = policy.head_weight(params, hidden.dtype), reference.head_weight(reference_params, other.dtype)
    kl = token_kl(
        hidden, weights[0], other, weights[1], temperature, policy.chunk_floats, policy.config.final_softcap,
        sharding=policy.sharding, used=rows.used,
    )
    return of_answers(kl, rows.first, rollout.logprobs.shape[1])


def response_values(model: Model, params, rollout: Rollout, hidden=None, rows: AnswerRows | None = None):
    """The critic's value [B, N] of the state before each response token. `hidden` and `rows` are as in `response_stats`."""
    _require(model, params, rollout)
    rows = alone(rollout) if rows is None else rows
    values = model.scores(params, response_hidden(model, params, rows) if hidden is None else hidden)
    return of_answers(values, rows.start + rollout.prompt_length - 1, rollout.logprobs.shape[1])


def response_mask(rollout: Rollout):
    """float32 [B, N]: 1 at response tokens. It is computed from lengths, never from token ids."""
    _require_rollout(rollout)
    return length_mask(rollout.response_length, rollout.logprobs.shape[1])


def experience_mask(experience: Experience):
    """float32 [B, N]: 1 at the response tokens of rows with a weight above 0."""
    instance_of(experience, Experience, "experience", "an Experience")
    return response_mask(experience.rollout) * experience.weight[:, None]
