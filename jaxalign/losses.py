"""The loss functions, for custom training loops: pure functions of arrays. Each docstring cites its source.

Policy losses take log-probabilities [B, N] and advantages. Value losses take values and returns. Preference losses take
log-probabilities or scores of answers [B]. All losses aggregate over tokens with the masked-array functions exported here.
"""

from jaxalign.algorithms.direct_preference import bco_baseline, dpo, mixed_dpo, sft_loss
from jaxalign.algorithms.kl import full_kl, kl_loss, kl_penalty, update_kl_coef
from jaxalign.algorithms.kto import kto, kto_baseline
from jaxalign.algorithms.masked import aggregate, masked_mean, masked_sum, masked_variance
from jaxalign.algorithms.policy_losses import cispo, clipped_surrogate, decoupled_surrogate, gspo, policy_gradient
from jaxalign.algorithms.preference_losses import bradley_terry, score_regression
from jaxalign.algorithms.reference_free import cpo, orpo, simpo
from jaxalign.algorithms.value_losses import clipped_value_loss, explained_variance, huber_value_loss

__all__ = [
    "aggregate", "bco_baseline", "bradley_terry", "cispo", "clipped_surrogate", "clipped_value_loss", "cpo",
    "decoupled_surrogate", "dpo", "explained_variance", "full_kl", "gspo", "huber_value_loss", "kl_loss", "kl_penalty", "kto",
    "kto_baseline", "masked_mean", "masked_sum", "masked_variance", "mixed_dpo", "orpo", "policy_gradient", "score_regression",
    "sft_loss", "simpo", "update_kl_coef",
]
