"""DPO.fit and RewardModel.fit with windows of rows: exact resume, the rows of an epoch, and refusals."""

from __future__ import annotations

import itertools
import threading

import chex
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.trainers.answers import AnswerPairBuilder, encode_judged, encode_pair
from jaxalign.trainers.direct import DPO
from jaxalign.trainers.reward_model import RewardModel
from jaxalign.trainers.rows import as_judgements, as_pairs
from jaxalign.trainers.scoring import EncodedPair, PairBuilder
from tests import tiny
from tests.trainers.small import JUDGED, PAIRS, language_model, tokenizer

pytestmark = pytest.mark.slow

FIELDS = {
    "batch": 2, "max_length": 48, "checkpoint_every": 2,
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_steps": 0},
}


def dpo(**options):
    return DPO(language_model(), **(FIELDS | {"epochs": 2} | options))


def reward(**options):
    return RewardModel(language_model(), **(FIELDS | {"epochs": 1, "members": 2} | options))


@pytest.mark.parametrize("make", [dpo, reward])
def test_a_resumed_run_in_windows_equals_an_uninterrupted_one(tmp_path, make):
    trainer = make(directory=tmp_path / "whole")
    steps = list(trainer.fit(PAIRS, PAIRS[:2], window=4))
    assert len(steps) == 6 and "held_out_loss" in steps[-1].metrics
    list(itertools.islice(make(directory=tmp_path / "cut").fit(PAIRS, PAIRS[:2], window=4), 5))
    again = make(directory=tmp_path / "cut")
    rest = list(again.fit(PAIRS, PAIRS[:2], window=4))
    assert rest == steps[rest[0].number :] and rest[0].number > 0
    chex.assert_trees_all_equal(tiny.to_host(again.params), tiny.to_host(trainer.params))
    for path in (tmp_path / "whole").rglob("windows.jsonl"):
        assert path.read_text() == (tmp_path / "cut" / path.relative_to(tmp_path / "whole")).read_text()
    assert not any(thread.name.startswith("window") for thread in threading.enumerate())


def test_a_window_of_all_pairs_starts_at_the_reference():
    steps = list(dpo(epochs=1, batch=6).fit(PAIRS, window=100))
    memory = list(dpo(epochs=1, batch=6).fit(PAIRS))
    assert len(steps) == 1 and steps[0].metrics["loss"] == pytest.approx(memory[0].metrics["loss"], abs=1e-5)
    assert steps[0].metrics["tokens"] == memory[0].metrics["tokens"]


def test_kto_trains_on_judged_answers_in_windows():
    (step,) = dpo(objective="kto", epochs=1, batch=12).fit(JUDGED, window=12)
    (memory,) = dpo(objective="kto", epochs=1, batch=12).fit(JUDGED)
    assert np.isfinite(step.metrics["loss"]) and step.metrics["loss"] == pytest.approx(memory.metrics["loss"], abs=0.05)


def test_single_answers_of_one_prompt_make_no_rows():
    builder = AnswerPairBuilder(48, True)
    judged = [encode_judged(tokenizer(), row, "plain") for row in as_judgements(JUDGED, "rows")]
    assert len(builder.build(judged[:2])[0].label) == 0
    made, cut = builder.build(judged[:4])
    assert made.label.tolist() == [1, 0, 1, 0] and cut == 0
    both = builder.build([encode_pair(tokenizer(), row, "plain") for row in as_pairs(PAIRS[:2], "rows")])[0]
    np.testing.assert_array_equal(both.label, made.label)
    np.testing.assert_array_equal(both.length, made.length)


def test_batches_of_all_windows_have_one_shape_and_pairs_that_are_equal_when_cut_are_dropped():
    builder = PairBuilder(40)
    short, long = EncodedPair(([1, 2], [1, 3]), 1.0, 1.0, 0.0), EncodedPair(([5] * 60, [5] * 61), 1.0, 1.0, 0.0)
    assert builder.fault(short) is None and builder.fault(long) == "equal_when_cut"
    made, cut = builder.build([short, EncodedPair(([5] * 60, [6] * 60), 1.0, 1.0, 0.0)])
    assert cut == 2 and made.length.tolist() == [[2, 2], [40, 40]]
    joined = builder.join([builder.build([short])[0], made])
    assert joined.tokens.shape == (3, 2, 40) and joined.tokens[0, 1, :3].tolist() == [1, 3, 0]


def test_what_cannot_be_trained_on_in_windows_is_refused():
    with pytest.raises(UserError, match="early_stopping is True, but no pairs measure the loss; give the argument held_out"):
        reward(early_stopping=True).fit(PAIRS, window=4)
    with pytest.raises(UserError, match=r"DPO.fit\(window\) is 4, but DPO.fit\(pairs\) is of type generator; rows"):
        dpo().fit((row for row in PAIRS), window=4)
    with pytest.raises(UserError, match="has judged single answers, but objective 'sigmoid' learns from pairs"):
        dpo().fit(JUDGED, window=4)
    with pytest.raises(UserError, match=r"RewardModel.fit\(pairs\)\[3\] has the keys 'prompt'"):
        reward().fit([*PAIRS[:3], {"prompt": "?"}], window=4)
