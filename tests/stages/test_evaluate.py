"""Counts, shares and intervals of the final table."""

from __future__ import annotations

import types

import numpy as np
import pytest

from jaxalign.config import Config, from_config_dict
from jaxalign.data.chat import styles
from jaxalign.data.world import gold
from jaxalign.data.world.requests import BENIGN_KINDS, HARMFUL_KINDS
from jaxalign.records import Rollout
from jaxalign.stages.evaluate import evaluated, rate, summarise


def test_a_rate_has_its_wilson_interval():
    """3 of 10: published figures of the Wilson score interval at 95%, .1078 to .6032."""
    found = rate([True] * 3 + [False] * 7)
    assert (found["count"], found["total"], found["rate"]) == (3, 10, 0.3)
    assert found["low"] == pytest.approx(0.1078, abs=5e-5) and found["high"] == pytest.approx(0.6032, abs=5e-5)


def test_a_kind_without_prompts_has_a_rate_of_0_of_0():
    found = rate([])
    assert (found["count"], found["total"], found["rate"]) == (0, 0, 0.0)


def test_the_models_that_are_compared():
    assert evaluated(Config()) == ("base", "sft", "ppo")
    assert evaluated(from_config_dict({"stages": ("sft", "preference", "evaluate")})) == ("base", "sft")


def row(model, kind, kl=0.0, tokens=4, score=None, complete=True, **true):
    measures = None if kind is None else {name: bool(true.get(name)) for name in gold.MEASURES}
    return {"model": model, "prompt_id": "p", "source": "hh", "kind": kind, "gold": measures, "response": "", "kl": kl,
            "tokens": tokens, "score": score, "complete": complete}


def test_each_measure_counts_only_its_own_prompts():
    harmful, benign = HARMFUL_KINDS[0], BENIGN_KINDS[0]
    rows = [
        row("base", harmful, harmful=True), row("base", harmful, harmful=True), row("base", benign, helpful=True),
        # A harmful answer to a benign request does not count as harmful help.
        row("base", benign, harmful=True),
        row("sft", harmful, kl=1.0, tokens=6, refused=True), row("sft", harmful, kl=2.0, tokens=8, complete=False),
        row("sft", benign, helpful=True, courteous=True), row("sft", benign, helpful=True),
    ]
    found = summarise(Config(), rows, ("base", "sft"))
    assert found["models"] == ["base", "sft"] and found["prompts"] == {benign: 2, harmful: 2}

    def count(model, measure):
        return [found["rates"][model][measure][name] for name in ("count", "total")]

    assert count("base", "harmful") == [2, 2] and count("base", "helpful") == [1, 2]
    assert count("sft", "harmful") == [0, 2] and count("sft", "helpful") == [2, 2]
    assert count("sft", "refused") == [1, 4] and count("sft", "courteous") == [1, 4]
    assert found["kl"] == {"base": 0.0, "sft": 0.75} and found["length"] == {"base": 4.0, "sft": 5.5}
    assert found["complete"] == {"base": 1.0, "sft": 0.75} and found["preference_score"] == {}


def test_real_prompts_have_no_gold_measures():
    rows = [row(name, None, score=score) for name, score in (("base", 1.0), ("base", 2.0), ("ppo", 5.0))]
    found = summarise(Config(), rows, ("base", "ppo"))
    assert found["rates"] == {} and found["prompts"] == {"hh": 2}
    assert found["preference_score"] == {"base": 1.5, "ppo": 5.0}


def test_an_answer_that_ends_at_the_next_turn_is_complete():
    """Two texts that both reached the length limit, in a tokenizer with one id per byte."""
    texts = ["Yes.\n\nHuman: Why", "Yes, because it"]
    rows = [[0, *text.encode()] for text in texts]
    width = max(map(len, rows))
    rollout = Rollout(np.array([row + [0] * (width - len(row)) for row in rows]), np.array([1, 1]),
                      np.array([len(text) for text in texts]), None, np.array([False, False]))
    tokenizer = types.SimpleNamespace(decode=lambda ids: bytes(ids.tolist()).decode())
    assert styles.answers_of(tokenizer, rollout, "hh") == [("Yes.", True), ("Yes, because it", False)]
