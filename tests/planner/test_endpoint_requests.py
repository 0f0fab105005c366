"""The number of requests to a server, by hand."""

from __future__ import annotations

import pytest

from jaxalign.config import from_config_dict
from jaxalign.planner.requests import planned_requests


def planned(prompt=None, **sections):
    """The requests of each stage, by name."""
    values = {"feedback": {"judge": "endpoint"}, "endpoint": {"url": ("http://localhost:8000/v1",)}}
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return {each.stage: each for each in planned_requests(from_config_dict(values), prompt)}


def test_revise_asks_for_a_critique_and_a_revision_in_each_round():
    settings = {"red_team_prompts": 100, "rounds": 3, "max_new_tokens": 16}
    found = planned(stages=("pretrain", "revise"), revise=settings)["revise"]
    assert found.requests == 100 * 3 * 2 and found.verdicts == 0
    assert found.completion_tokens == 600 * 16 and found.prompt_tokens is None


def test_requests_contain_the_prompt_the_answer_and_the_critique():
    settings = {"red_team_prompts": 10, "rounds": 1, "max_new_tokens": 16}
    short, long = (planned(prompt, stages=("pretrain", "revise"), revise=settings)["revise"] for prompt in (50, 60))
    assert long.prompt_tokens - short.prompt_tokens == 20 * 10
    assert short.prompt_tokens > 10 * (50 + 16) + 10 * (50 + 32)  # The rest is the templates.


def test_compare_asks_in_both_orders_under_each_principle_with_each_reasoning():
    feedback = {"principles_per_comparison": 3, "reasoning": True, "reasonings": 5, "max_reasoning_tokens": 100,
                "reasoning_temperature": 1.0}
    found = planned(stages=("pretrain", "compare"), compare={"prompts": 20}, feedback=feedback)["compare"]
    assert found.requests == found.verdicts == 20 * 3 * 2 * 5
    assert found.completion_tokens == found.requests * (100 + 8)


def test_ppo_asks_for_ratings():
    found = planned(
        stages=("pretrain", "ppo"), reward={"source": "ai_feedback", "principles": 2}, ppo={"iterations": 7, "batch": 32}
    )["ppo"]
    assert found.requests == 7 * 32 * 2


def test_evaluate_compares_each_pair_of_models():
    found = planned(stages=("pretrain", "revise", "sft", "compare", "preference", "ppo", "evaluate"),
                    evaluate={"prompts": 64, "win_rate_prompts": 10}, feedback={"principles_per_comparison": 2})["evaluate"]
    assert found.requests == 3 * 10 * 2 * 2  # 3 pairs of base, sft and ppo; 10 prompts; 2 principles; 2 orders.


def test_evaluate_rates_each_answer_by_each_rubric_at_most():
    found = planned(stages=("pretrain", "revise", "sft", "evaluate"),
                    evaluate={"prompts": 64, "win_rate_prompts": 0, "rubrics": "default"})["evaluate"]
    assert found.requests == found.verdicts == 2 * 64 * 3  # Answers of base and sft; three rubrics.


def test_a_stage_with_another_judge_asks_nothing():
    assert planned(stages=("pretrain", "revise", "compare"), judge={"compare": "local"}).keys() == {"revise"}


def test_the_price_follows_from_the_tokens():
    prices = {"url": ("http://localhost:8000/v1",), "input_price": 2.0, "output_price": 3.0}
    found = planned(30, stages=("pretrain", "revise"), endpoint=prices)["revise"]
    assert found.price == pytest.approx((2 * found.prompt_tokens + 3 * found.completion_tokens) / 1e6)
