"""The advantage estimators, for a training loop of one's own: pure functions of arrays, each with its source in its docstring.

Estimators with a critic take rewards and values [B, N]; estimators over groups of responses take scores [B].
`broadcast_to_tokens` spreads the advantage of a response over its tokens, and `whiten` normalises advantages. `shape_rewards`
makes rewards [B, N] of scores and a KL penalty.
"""

from jaxalign.algorithms.advantages import (
    discounted_returns,
    gae,
    lambda_returns,
    reinforce_baseline,
    reinforce_plus_plus,
    vtrace,
)
from jaxalign.algorithms.groups import broadcast_to_tokens, grpo, informative_groups, remax, rloo
from jaxalign.algorithms.importance import importance_weights
from jaxalign.algorithms.masked import whiten
from jaxalign.algorithms.rewards import length_penalty, overlong_penalty, shape_rewards

__all__ = [
    "broadcast_to_tokens", "discounted_returns", "gae", "grpo", "importance_weights", "informative_groups", "lambda_returns",
    "length_penalty", "overlong_penalty", "reinforce_baseline", "reinforce_plus_plus", "remax", "rloo", "shape_rewards",
    "vtrace", "whiten",
]  # fmt: skip
