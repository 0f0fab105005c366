"""Online DPO stops, or warns, if too few pairs of an iteration can be trained on."""

from __future__ import annotations

import dataclasses
import logging
import types

import numpy as np
import pytest

from jaxalign.config import OnlineDPOConfig, from_config_dict
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.steps.metrics import DirectMetrics
from jaxalign.trainers.online_direct import OnlineDPO, mean_metrics

STAGES = ("pretrain", "online_dpo")


def pairs(usable, total=40):
    """Labelled pairs of which the first `usable` ones are decided."""
    prompt = Prompt("p", (Message("user", "Why?"),), "own")
    return [Comparison(prompt, "Yes.", "No.", 0.9) if i < usable else
            Comparison(prompt, "Yes.", "No.", 0.5, decided=False, outcome="unreadable") for i in range(total)]


def require(usable, **fields):
    OnlineDPO.from_inputs(None, OnlineDPOConfig(**fields))._require_usable(3, pairs(usable), np.arange(40) < usable)


def test_a_smaller_share_than_required_stops_the_stage():
    message = (r"config.online_dpo.required_share is 0.5, but only 19 of 40 rows \(47.5%\) can be used: 19 of 40 pairs of "
               r"iteration 3 can be trained on; left out: 21 unreadable \(.*; choose templates for this kind of model")
    with pytest.raises(UserError, match=message):
        require(19, required_share=0.5)
    require(20, required_share=0.5)


def test_by_default_few_pairs_are_a_warning_once(caplog):
    loop = types.SimpleNamespace(stage="online_dpo, round 2")
    trainer = OnlineDPO.from_inputs(types.SimpleNamespace(loop=loop), OnlineDPOConfig())
    with caplog.at_level(logging.WARNING, "jaxalign"):
        trainer._require_usable(0, pairs(2), np.arange(40) < 2)
        assert not caplog.records
        trainer._require_usable(1, pairs(1), np.arange(40) < 1)
        trainer._require_usable(2, pairs(0), np.arange(40) < 0)
    assert [record.message[:86] for record in caplog.records] == [
        "online_dpo, round 2: only 1 of 40 pairs of iteration 1 can be trained on; left out: 39"]


def test_advice_names_the_fields_of_online_dpo():
    prompt = Prompt("p", (Message("user", "Why?"),), "own")
    equal = [Comparison(prompt, "Yes.", "Yes.", 0.5, decided=False, outcome="identical")] * 4
    trainer = OnlineDPO.from_inputs(None, OnlineDPOConfig(required_share=0.1))
    with pytest.raises(UserError, match="raise online_dpo.temperature"):
        trainer._require_usable(0, equal, np.zeros(4, bool))


def test_an_update_without_pairs_does_not_lower_the_means_of_the_pairs():
    """Of four updates the second has no pairs: its values of pairs are 0. It counts as skipped."""
    names = [field.name for field in dataclasses.fields(DirectMetrics)]
    rows = [{"accuracy": 0.75, "loss": 0.5}, {"skipped": 1.0, "undecided": 1.0}, {"accuracy": 0.25, "loss": 0.25},
            {"accuracy": 0.5, "loss": 0.75}]
    measured = [DirectMetrics(**{name: np.float32(row.get(name, 0)) for name in names}) for row in rows]
    found = mean_metrics(measured, [True, False, True, True])
    assert (found.accuracy, found.loss, found.skipped, found.undecided) == (0.5, 0.5, 0.25, 0.25)
    assert mean_metrics(measured[1:2], [False]).accuracy == 0


def test_sampling_of_only_the_likeliest_token_is_refused():
    with pytest.raises(UserError, match="config.online_dpo.top_k is 1, which makes both answers to a prompt equal"):
        from_config_dict({"stages": STAGES, "online_dpo": {"top_k": 1}})
    assert from_config_dict({"stages": STAGES, "online_dpo": {"top_k": 2}}).online_dpo.top_k == 2
