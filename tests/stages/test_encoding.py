"""Encoding of text into the arrays that train sft and preference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxalign.config import Config, ReviseConfig, SFTConfig
from jaxalign.data.chat import styles
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.rewards.scorer import Scorer
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import answered, labelled_split
from jaxalign.stages.shared.shards import Shards
from jaxalign.trainers.preference_quality import measure
from jaxalign.trainers.scoring import all_scores, pair_arrays
from tests import tiny
from tests.feedback.fakes import WordTokenizer

TOKENIZER = WordTokenizer()
USER, ASSISTANT = TOKENIZER.marker_id("<user>"), TOKENIZER.marker_id("<assistant>")
MESSAGES = (Message("user", "why so"),)


def words(text):
    return TOKENIZER.encode(text)


def test_the_loss_of_a_completion_covers_its_answer_and_its_end():
    ids, weights = styles.encode_completion(TOKENIZER, MESSAGES, "it is", "compact")
    assert ids == [1, USER, *words("why so"), ASSISTANT, *words("it is"), 2]
    assert weights == [0.0] * 5 + [1.0] * 3


def test_an_earlier_answer_is_only_context():
    messages = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    ids, weights = styles.encode_completion(TOKENIZER, messages, "d", "compact")
    expected = [1, USER, *words("a"), ASSISTANT, *words("b"), 2, USER, *words("c"), ASSISTANT, *words("d"), 2]
    assert ids == expected and weights == [0.0] * (len(expected) - 2) + [1.0] * 2


def test_an_empty_answer_is_one_end_token():
    ids, weights = styles.encode_completion(TOKENIZER, MESSAGES, "", "compact")
    assert (ids[-1], weights[-1], sum(weights)) == (2, 1.0, 1.0)


def pair(a, b, label):
    return Comparison(Prompt("p", MESSAGES, "compare"), a, b, label)


def test_pairs_are_padded_to_one_length_and_keep_their_own_lengths():
    batch = pair_arrays(TOKENIZER, [pair("x", "y z", 0.7), pair("u v w", "x", 0.0)], "compact", 64)
    assert batch.tokens.shape == (2, 2, 32) and batch.tokens.dtype == np.int32
    np.testing.assert_array_equal(batch.length, [[7, 8], [9, 7]])
    np.testing.assert_allclose(batch.label, [0.7, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(batch.weight, [1, 1])
    start = [1, USER, *words("why so"), ASSISTANT]
    np.testing.assert_array_equal(batch.tokens[0, 1, :8], [*start, *words("y z"), 2])
    assert not batch.tokens[0, 1, 8:].any()


def test_a_pair_that_is_too_long_keeps_its_end():
    batch = pair_arrays(TOKENIZER, [pair("x", "y z u v", 1.0)], "compact", 8)
    assert batch.tokens.shape == (1, 2, 8)
    np.testing.assert_array_equal(batch.length, [[7, 8]])
    np.testing.assert_array_equal(batch.tokens[0, 1], [USER, *words("why so"), ASSISTANT, *words("y z u v"), 2][-8:])


@pytest.mark.medium
def test_measures_of_held_out_pairs():
    """Accuracy counts pairs whose label is not even. Both orders are used, so that the calibration plot is symmetric."""
    model, params = tiny.model(head="scalar"), tiny.host_params("scalar")
    pairs = [pair("x", "y z", 0.9), pair("u v", "w", 0.2), pair("x w", "z", 0.5), pair("v", "u u u", 0.6)]
    batch = pair_arrays(TOKENIZER, pairs, "compact", 64)
    scores = np.zeros((4, 2))
    for i, side in np.ndindex(4, 2):
        ids = batch.tokens[i, side, : batch.length[i, side]]
        scores[i, side] = tiny.hidden(model, params, ids)[-1] @ params["score"]
    found = measure(all_scores(Scorer(model), params, batch, 2), batch)
    margin, label = (scores[:, 0] - scores[:, 1])[[0, 1, 3]], np.array([0.9, 0.2, 0.6])
    assert found["held_out"]["pairs"] == 3
    assert found["held_out"]["accuracy"] == pytest.approx(((margin > 0) == (label > 0.5)).mean())
    loss = label * np.log1p(np.exp(-margin)) + (1 - label) * np.log1p(np.exp(margin))
    assert found["held_out"]["loss"] == pytest.approx(loss.mean(), rel=1e-5)
    counts = found["calibration"]["count"]
    assert sum(counts) == 6 and counts == counts[::-1]
    assert measure(scores[2:3], pair_arrays(TOKENIZER, pairs[2:3], "compact", 64))["held_out"] is None


def revision_rows():
    """30 prompts with two rounds, the second of which is cut off for every third prompt, and 10 helpful samples."""
    message = [{"role": "user", "content": "q"}]
    common = {"messages": message, "source": "red_team"}
    for i in range(30):
        for number in (1, 2):
            yield {"prompt_id": f"r-{i}", **common, "round": number, "response": f"r{i}.{number - 1}",
                   "revision": f"r{i}.{number}", **_cut_off(number == 2 and i % 3 == 0)}
    for i in range(10):
        yield {"prompt_id": f"h-{i}", **common, "round": 0, "response": f"h{i}", "revision": None, **_cut_off(i == 0)}


def _cut_off(cut):
    return {"complete": False, "outcome": "cut_off"} if cut else {"complete": True}


@pytest.mark.parametrize(("used", "revised", "held"), [("all", 50, 8), ("last", 20, 5)])
def test_sft_learns_from_complete_revisions_and_helpful_samples(tmp_path, used, revised, held):
    (tmp_path / "revise").mkdir()
    Shards(tmp_path / "revise").write(0, list(revision_rows()))
    config = dataclasses.replace(Config(), revise=ReviseConfig(rounds=2), sft=SFTConfig(rounds_used=used))
    train, held_out, report = answered(StageContext(config, tmp_path, tmp_path / "sft", False), None)
    texts = [text for _, text in train + held_out]
    assert len(texts) == len(set(texts)) == revised + 9
    assert sum(text.startswith("h") for text in texts) == 9
    assert all(text.endswith(".2") or used == "all" for text in texts if text.startswith("r"))
    assert not {"r0.2", "r3.2", "h0"} & set(texts)
    assert len(held_out) == held  # data.min_held_out, but at most a fifth
    assert train[0][0] == (Message("user", "q"),)
    assert (report.total, report.usable) == (len(list(revision_rows())) - (30 if used == "last" else 0), len(texts))


def test_a_base_that_never_ends_an_answer_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "revise").mkdir()
    Shards(tmp_path / "revise").write(0, [row | {"complete": False, "outcome": "cut_off"} for row in revision_rows()])
    with pytest.raises(UserError, match="but 0 of 70 answers and revisions can be trained on; left out: 70 cut_off"):
        answered(StageContext(Config(), tmp_path, tmp_path / "sft", False), None)


def test_a_policy_with_only_one_answer_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "compare").mkdir()
    same = {"prompt_id": "c", "messages": [{"role": "user", "content": "q"}], "source": "compare", "response_a": "x",
            "response_b": "x", "principles": [], "label": 0.5, "label_ab": None, "label_ba": None, "decided": False,
            "reasoning_ab": None, "reasoning_ba": None, "outcome": "identical"}
    Shards(tmp_path / "compare").write(0, [same])
    with pytest.raises(UserError, match="0 of 1 pairs of stage compare can be trained on; left out: 1 identical"):
        context = StageContext(Config(), tmp_path, tmp_path / "preference", False)
        labelled_split(context, TOKENIZER, context.config.preference)
