"""Lists of rewards, reward sources, and records given to trainers in place of names."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxalign.config import Checks
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.registry.advantages import ADVANTAGES, AdvantageEstimator
from jaxalign.registry.objectives import Objective
from jaxalign.registry.policy_losses import PolicyLoss
from jaxalign.registry.rewards import REWARDS, RewardSource
from jaxalign.rewards.base import Reward, Scored
from jaxalign.trainers.direct import DPO
from jaxalign.trainers.ppo import PPO
from jaxalign.trainers.reward_model import RewardModel
from tests.extending.plugins import advantage, objective, policy_loss
from tests.trainers.small import PAIRS, language_model

FIELDS = {"iterations": 1, "batch": 4, "max_new_tokens": 4, "advantages": "rloo", "group_size": 2,
          "checks": Checks(step_zero=False)}


class Constant(Reward):
    """A reward with its name as a class attribute."""

    name = "constant"

    def score(self, batch):
        return Scored([3.0] * len(batch.responses))


def tokens(prompts, responses, token_ids, **columns):
    return [[1.0] * len(ids) for ids in token_ids]


def zero(prompts, responses, **columns):
    return [0.0] * len(responses)


def metrics_of(trainer, rows=("It", "is")) -> dict:
    *_, step = trainer.fit(list(rows))
    return step.metrics


@pytest.mark.slow
def test_a_list_of_rewards_is_their_weighted_sum_and_each_mean_is_a_metric():
    """One score is constant, one counts tokens, and one is a reward model whose scores have mean s."""
    reward = RewardModel(language_model(), members=1, epochs=1, batch=3)
    list(reward.fit(PAIRS))
    rewards, weights = [Constant, tokens, Constant(), reward], [2, 0.5, -1, 10]
    metrics = metrics_of(PPO(language_model(), rewards, reward_weights=weights, **FIELDS))
    assert metrics["score_constant"] == metrics["score_constant-2"] == 3
    parts = 2 * 3 + 0.5 * metrics["score_tokens"] - 3 + 10 * metrics["score_reward model"]
    assert metrics["score_tokens"] >= 1 and metrics["score"] == pytest.approx(parts, rel=1e-5)


@pytest.mark.medium
def test_a_reward_model_with_another_tokenizer_of_the_same_size_is_refused(tmp_path):
    policy, pairs = language_model(), [{"prompt": "Warum?", "chosen": "Weil es so ist.", "rejected": "Nein, nie im Leben!"}] * 2
    train_tokenizer([text for row in pairs for text in row.values()] * 4, 120, tmp_path / "tokenizer.model")
    other = load_tokenizer(tmp_path / "tokenizer.model")
    assert other.vocab_size == policy.tokenizer.vocab_size
    reward = RewardModel(LanguageModel(policy.model, policy.weights, other, "plain", 64), members=1, epochs=1, batch=1)
    list(reward.fit(pairs))
    with pytest.raises(UserError, match=r"PPO\(reward\) has another tokenizer than the policy, although both have 120 ids"):
        PPO(policy, reward, **FIELDS)


@pytest.mark.slow
def test_a_reward_source_and_its_registered_name_are_rewards():
    source = RewardSource("own_constant", lambda inputs: Constant() if inputs.policy and inputs.tokenizer else None)
    REWARDS.register(source)
    try:
        for reward in (source, "own_constant", [source, zero]):
            assert metrics_of(PPO(language_model(), reward, **FIELDS))["score"] == 3
    finally:
        REWARDS.unregister("own_constant")


@pytest.mark.parametrize(("reward", "options", "message"), (
    (zero, {"reward_weights": [1.0]}, r"PPO\(reward_weights\) is \[1.0\], but reward is not a list"),
    ([zero], {"reward_weights": [1, 2]}, "is a list of 1 rewards with 2 weights"),
    ([], {}, "is a list of 0 rewards"),
    ([zero], {"reward_weights": ["1"]}, r"PPO\(reward_weights\)\[0\] is '1'"),
    ([zero, zero], {"reward_weights": [1, float("nan")]}, "a finite number is expected"),
    ([zero, 3], {}, "the reward is 3 of type int"),
    ("preference", {}, "the reward is the source 'preference', which reads the config or the stages of a run"),
    (RewardSource("bad", lambda inputs: inputs.nothing), {}, r"reward source 'bad' raised AttributeError at .*_parts\.py:"),
))
def test_rewards_that_cannot_be_used_are_refused(reward, options, message):
    with pytest.raises(UserError, match=message):
        PPO(language_model(), reward, **FIELDS, **options)


@pytest.mark.slow
def test_an_estimator_a_policy_loss_and_an_objective_are_accepted_as_records():
    """Zero advantages leave a score of 3 and a policy loss of 0.1, the offset of the loss."""
    nothing = AdvantageEstimator("nothing", lambda inputs: (jnp.zeros_like(inputs.rewards), jnp.zeros_like(inputs.rewards)))
    fields = {"iterations": 1, "batch": 4, "max_new_tokens": 4, "kl_coef": 0.0, "checks": Checks(step_zero=False)}
    metrics = metrics_of(PPO(language_model(), Constant(), advantages=nothing, policy_loss=policy_loss.OFFSET, **fields))
    assert metrics["policy_loss"] == pytest.approx(0.1, abs=1e-5)
    own = DPO(language_model(), objective.SQUARED, epochs=1, batch=6)
    assert next(own.fit(PAIRS)).metrics["loss"] == pytest.approx(1.0, abs=1e-5)  # (beta 0 - 1)^2.
    fourfold = Objective("squared", lambda inputs: 4 * objective.squared(inputs), reads=())
    again = DPO(language_model(), fourfold, epochs=1, batch=6)
    assert next(again.fit(PAIRS)).metrics["loss"] == pytest.approx(4.0, abs=1e-5)


def test_a_record_defined_again_gets_a_number():
    first, second = (AdvantageEstimator("again", lambda inputs, n=n: n) for n in range(2))
    names = [ADVANTAGES.name_of(record) for record in (first, second, first, advantage.CENTRED)]
    assert names[:3] == ["again", "again-2", "again"] and ADVANTAGES.get("again-2").load()(None) == 1
    assert ADVANTAGES.name_of("gae") == "gae"


def test_a_record_of_another_kind_is_refused():
    with pytest.raises(UserError, match="advantages is PolicyLoss"):
        PPO(language_model(), zero, advantages=PolicyLoss("loss", lambda inputs: None))
