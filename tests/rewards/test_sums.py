"""Sums of rewards: the rows that they drop because a score is not finite."""

from __future__ import annotations

import logging
import types

import numpy as np
import pytest

from jaxalign.config import RewardConfig, from_config_dict
from jaxalign.errors import UserError
from jaxalign.rewards.base import Reward, Scored
from jaxalign.rewards.sums import sum_of_rewards
from jaxalign.rl.iteration import part_means

NAN, INF = float("nan"), float("inf")


class Fixed(Reward):
    """A reward with these scores."""

    name, is_checked = "fixed", True

    def __init__(self, scores, kept=None):
        self.scored = Scored(np.asarray(scores, np.float32), None if kept is None else np.asarray(kept))

    def score(self, batch):
        return self.scored


def batch(rows=4):
    length = np.full(rows, 2)
    return types.SimpleNamespace(prompts=[None] * rows, rollout=types.SimpleNamespace(response_length=length))


def test_rows_with_a_score_that_is_not_finite_are_warned_about(caplog):
    parts = {"preference": Fixed([1, NAN, 3, 4]), "callable": Fixed([1, 1, 1, 1])}
    with caplog.at_level(logging.WARNING):
        scored = sum_of_rewards(parts).score(batch())
    assert np.asarray(scored.kept).tolist() == [True, False, True, True]
    assert np.asarray(scored.scores).tolist() == [2, 0, 4, 5]
    assert caplog.messages == [
        "reward 'preference+callable' gave no score for 1 of 4 responses (scores of preference are not finite); these rows are "
        "left out, and the metric 'kept' counts the others"
    ]


@pytest.mark.parametrize(("settings", "weights"), [
    ({"max_dropped_share": 0.4, "length_coef": 0.1}, ()), ({"max_dropped_share": 0.4}, (2.0,)),
])
def test_more_rows_than_the_allowed_share_are_an_error(settings, weights):
    reward = sum_of_rewards({"preference": Fixed([1, NAN, INF, 4])}, weights, RewardConfig(**settings))
    with pytest.raises(UserError, match=r"no score for 2 of 4 responses .*, more than config.reward.max_dropped_share \(0.4\)"):
        reward.score(batch())


@pytest.mark.parametrize(("parts", "weights"), [
    ({"a": Fixed([1, NAN, 3, 4], [True, False, True, True]), "b": Fixed([1, NAN, 1, 1])}, ()),  # Part a has counted row 1.
    ({"a": Fixed([NAN] * 4), "b": Fixed([1] * 4)}, (0.0, 1.0)),  # Scores of weight 0 may be missing.
    ({"a": Fixed([1, 2, 3, 4, NAN]), "b": Fixed([1] * 5)}, ()),  # The last row only pads the batch.
])
def test_rows_that_are_counted_elsewhere_or_not_needed_cause_no_warning(caplog, parts, weights):
    with caplog.at_level(logging.WARNING):
        sum_of_rewards(parts, weights).score(batch())
    assert not caplog.messages


def test_a_response_is_dropped_if_one_of_its_tokens_has_a_score_that_is_not_finite(caplog):
    parts = {"dense": Fixed([[1, 2], [NAN, 0], [0, 0], [1, 1]]), "preference": Fixed([0, 0, INF, 0])}
    with caplog.at_level(logging.WARNING):
        scored = sum_of_rewards(parts).score(batch())
    assert np.asarray(scored.kept).tolist() == [True, False, False, True]
    assert "2 of 4 responses (scores of dense and preference are not finite)" in caplog.text


def test_the_mean_of_a_part_of_weight_0_is_over_the_rows_that_it_scored():
    """A part that is only measured lacks row 1, where it has 0 as a dropped row does, and row 3, where its score is NaN; row 0
    does not count."""
    parts = {"watched": Fixed([9, 0, 4, NAN, 2], [True, False, True, True, True]), "preference": Fixed([1, 1, 1, 1, 1])}
    scored = sum_of_rewards(parts, (0.0, 1.0)).score(batch(5))
    assert np.asarray(scored.kept).all()
    means = part_means(scored.parts, np.asarray([False, True, True, True, True]))
    assert {name: float(x) for name, x in means.items()} == {"score_watched": (4 + 2) / 2, "score_preference": 1.0}


@pytest.mark.parametrize("changes", [{"source": "preference+distilled"}, {"length_coef": 0.1}, {"weights": (2.0,)}])
def test_the_allowed_share_is_an_option_of_sums_of_models(changes):
    assert from_config_dict({"reward": changes | {"max_dropped_share": 0.1}}).reward.max_dropped_share == 0.1


def test_the_allowed_share_has_no_effect_on_the_preference_model_alone():
    with pytest.raises(UserError, match="max_dropped_share is 0.1, which has no effect when .* or to a sum"):
        from_config_dict({"reward": {"max_dropped_share": 0.1}})


def test_weights_that_are_all_0_are_refused_unless_the_length_counts():
    with pytest.raises(UserError, match=r"weights is \(0.0, 0.0\), so no part of the reward would count"):
        from_config_dict({"reward": {"source": "preference+distilled", "weights": (0.0, 0.0)}})
    for changes in ({"weights": (0.0, 1.0)}, {"weights": (0.0, 0.0), "length_coef": 0.1}):
        assert from_config_dict({"reward": {"source": "preference+distilled"} | changes}).reward
