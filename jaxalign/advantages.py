"""The advantage estimators, for custom training loops: pure functions of arrays. Each docstring cites its source.

Estimators with a critic take rewards and values [B, N]; group estimators take scores [B]. `broadcast_to_tokens` copies a
response's advantage to each of its tokens, and `whiten` normalises advantages. `shape_rewards` combines scores and a KL
penalty into rewards [B, N].
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
]
