"""Online DPO stops, or warns, if too few pairs of an iteration can be trained on."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from jaxalign.config import OnlineDPOConfig
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.trainers.online_direct import OnlineDPO


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
    trainer = OnlineDPO.from_inputs(None, OnlineDPOConfig())
    with caplog.at_level(logging.WARNING, "jaxalign"):
        trainer._require_usable(0, pairs(2), np.arange(40) < 2)
        assert not caplog.records
        trainer._require_usable(1, pairs(1), np.arange(40) < 1)
        trainer._require_usable(2, pairs(0), np.arange(40) < 0)
    assert [record.message[:77] for record in caplog.records] == [
        "online_dpo: only 1 of 40 pairs of iteration 1 can be trained on; left out: 39"]


def test_advice_names_the_fields_of_online_dpo():
    prompt = Prompt("p", (Message("user", "Why?"),), "own")
    equal = [Comparison(prompt, "Yes.", "Yes.", 0.5, decided=False, outcome="identical")] * 4
    trainer = OnlineDPO.from_inputs(None, OnlineDPOConfig(required_share=0.1))
    with pytest.raises(UserError, match="raise online_dpo.temperature"):
        trainer._require_usable(0, equal, np.zeros(4, bool))
