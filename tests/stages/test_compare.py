"""Statistics of the labelled pairs, and the selection of training pairs."""

from __future__ import annotations

import types

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.feedback.critique import PolicyAnswer
from jaxalign.feedback.decisions import Calibration
from jaxalign.reasons import incomplete_answers, missing_verdicts_sentence
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.stages import compare as stage
from jaxalign.stages.compare import summarise
from jaxalign.stages.shared.labelled import comparison_row, read_comparisons, row_comparison
from jaxalign.stages.shared.shards import Shards


def row(number, label_ab, label_ba, decided=True, principles=("p",), same=False):
    label = 0.5 if label_ab is None or not decided else (label_ab + label_ba) / 2
    orders = {} if label_ab is None else {"ab": label_ab, "ba": label_ba}
    labels = [{"principle": name} | orders for name in principles]
    return {
        "prompt_id": f"c-{number}", "messages": [{"role": "user", "content": "q"}], "source": "compare",
        "response_a": "x", "response_b": "x" if same else "y", "principles": list(principles), "label": label,
        "label_ab": label_ab, "label_ba": label_ba, "decided": decided, "reasoning_ab": None, "reasoning_ba": "r",
        "labels": [] if same else labels, **({"problem": "none"} if label_ab is None and not same else {}),
        **({"principle": principles[0]} if decided else {"outcome": "identical" if same else "undecided"}),
    }


@pytest.fixture
def shards(tmp_path):
    made = Shards(tmp_path)
    made.write(0, [row(0, 0.9, 0.7), row(1, 0.2, 0.2, principles=("p", "q"))])
    unread, same = row(3, None, None, decided=False), row(4, None, None, decided=False, same=True)
    made.write(1, [row(2, 0.75, 0.25, decided=False), unread, same])
    return made


def test_the_summary_by_hand(shards):
    """The pair of equal answers is counted as such and nowhere else."""
    found = summarise(list(shards.read()), Calibration(0.1, {"": 0.25}, 0.05, 4))
    assert (found["pairs"], found["identical_pairs"], found["undecided"], found["unparsable"]) == (5, 1, 2, 1)
    # P(first shown) is ab in one order and 1 - ba in the other: .9 .3, twice .2 .8, .75 .75.
    assert found["position_bias"] == pytest.approx((0.9 + 0.3 + 2 * (0.2 + 0.8) + 0.75 + 0.75) / 8 - 0.5)
    assert found["order_agreement"] == pytest.approx(3 / 4)
    assert found["calibration"] == {"margin": 0.1, "position": {"": 0.25}, "chance_share": 0.05, "labels": 4}
    # Confidences .8, .8 and .5 in ten bins of [.5, 1]; .8 is on an edge, up to rounding.
    counts = found["confidence_histogram"]["counts"]
    assert sum(counts) == 3 and counts[0] == 1 and counts[5] + counts[6] == 2
    assert found["confidence_histogram"]["edges"][::5] == pytest.approx([0.5, 0.75, 1.0])
    assert found["principles"]["q"] == {"pairs": 1, "decides": 0, "mean_confidence": pytest.approx(0.8), "ties": None,
                                        "position_bias": pytest.approx(0), "order_agreement": 1.0}
    principle = found["principles"]["p"]
    assert (principle["pairs"], principle["decides"], principle["ties"]) == (3, 2, None)  # The unread pair has no verdict.
    assert principle["mean_confidence"] == pytest.approx((0.8 + 0.8 + 0.5) / 3)


def test_a_summary_without_readable_answers(tmp_path):
    Shards(tmp_path).write(0, [row(0, None, None, decided=False)])
    found = summarise(list(Shards(tmp_path).read()), Calibration(0.1))
    assert found["unparsable"] == 1 and found["principles"]["p"]["decides"] == 0
    assert found["position_bias"] is None and found["order_agreement"] is None


def test_missing_verdicts_are_counted_also_if_their_pair_has_a_label():
    """Three pairs under two principles in both orders: 11 requests, since the last pair was not asked again after a tie under
    "q". The first pair lacks one verdict under "q", the second both."""
    def labels(**q):
        return [{"principle": "p", "ab": 0.9, "ba": 0.7}, {"principle": "q", **q}]

    given = [{"ab": 0.9, "problem_ba": "none"}, {"problem_ab": "none", "problem_ba": "refused"}, {"ab": 0.5, "tie": 0.9}]
    rows = [row(i, 0.9, 0.7) | {"labels": labels(**q)} for i, q in enumerate(given)]
    found = summarise(rows, Calibration(0.1))
    assert found["requests"] == 11 and found["problems"] == {"none": 2, "refused": 1}
    assert found["principles"]["p"]["pairs"] == 3 and found["principles"]["q"]["pairs"] == 1
    assert found["outcomes"] == {} and found["unparsable"] == 0
    assert missing_verdicts_sentence(found) == (
        "3 of 11 verdicts are missing: 2 none (the judge returned None), 1 refused (the judge declined to answer)")
    read = [comparison_row(row_comparison(made))["labels"] for made in rows]
    assert read == [made["labels"] for made in rows]


def test_a_summary_without_missing_verdicts_has_no_sentence_on_them():
    assert missing_verdicts_sentence(summarise([row(0, 0.9, 0.7)], Calibration(0.1))) is None
    assert missing_verdicts_sentence({"pairs": 1}) is None  # The summary of an older work directory.


def test_the_stage_stops_if_no_pair_has_a_verdict():
    stage._check_verdicts({"unreadable": 63})  # Too few to tell.
    stage._check_verdicts({"unreadable": 500, None: 1})
    with pytest.raises(UserError, match="any of the first 64 pairs: 60 unreadable .*, 4 refused .*choose templates"):
        stage._check_verdicts({"unreadable": 60, "refused": 4})


def test_pitfall_16_undecided_pairs_get_label_one_half_or_are_dropped(shards):
    """Identical answers carry no information and are always dropped."""
    half = read_comparisons(shards, "half")
    assert [(c.prompt.id, c.label) for c in half] == [("c-0", 0.8), ("c-1", 0.2), ("c-2", 0.5), ("c-3", 0.5)]
    assert [c.prompt.id for c in read_comparisons(shards, "drop")] == ["c-0", "c-1"]
    assert isinstance(half[0], Comparison)
    assert half[0].principles == ("p",) and half[0].prompt.messages == (Message("user", "q"),)


def test_a_pair_with_a_missing_answer_is_not_trained_on(monkeypatch):
    """For example, an answer with non-finite logits, against which any answer would win."""
    said, ended, missing = PolicyAnswer("yes", True), PolicyAnswer("", True), PolicyAnswer("", False, sampled=False)
    about = Prompt("test-000", (Message("user", "how"),), "red_team")

    config = from_config_dict({"compare": {"samples": 2, "choose": "different"}})
    context = types.SimpleNamespace(config=config, key=lambda *names: None)

    def texts(*answers):
        monkeypatch.setattr(stage, "answer", lambda *arguments: answers)
        (pair,) = stage._pairs(context, None, [about], None, 0)
        return pair.response_a, pair.response_b

    assert texts(said, ended) == ("yes", "") and texts(ended, said) == ("", "yes")
    assert texts(said, missing) == texts(missing, said) == texts(missing, missing) == ("", "")


def test_answers_that_did_not_end_are_recorded_in_the_row_and_counted(monkeypatch, tmp_path):
    """Of the pairs with different answers, the first has one answer that did not end and the second has two: 3 of 4. The third
    pair has equal answers, which are not compared, and the last one has no answers."""
    cut, ended, missing = PolicyAnswer("yes, bec", False), PolicyAnswer("no.", True), PolicyAnswer("", False, sampled=False)
    sampled = [ended, cut, cut, cut._replace(text="no, s"), cut, cut, ended, missing]
    monkeypatch.setattr(stage, "answer", lambda *arguments: sampled)
    prompts = [Prompt(f"test-{i}", (Message("user", "how"),), "red_team") for i in range(4)]
    config = from_config_dict({"compare": {"samples": 2}})
    context = types.SimpleNamespace(config=config, key=lambda *names: None)
    pairs = stage._pairs(context, None, prompts, None, 0)
    assert [pair.incomplete for pair in pairs] == [("b",), ("a", "b"), ("a", "b"), ()]
    rows = [comparison_row(Comparison(pair.prompt, *pair[1:3], 0.9, incomplete=pair.incomplete)) for pair in pairs]
    assert [made.get("incomplete") for made in rows] == [("b",), ("a", "b"), ("a", "b"), None] and "incomplete" not in rows[3]
    Shards(tmp_path).write(0, rows)
    read = list(Shards(tmp_path).read())
    assert [row_comparison(made).incomplete for made in read] == [pair.incomplete for pair in pairs]
    summary = summarise(read, Calibration(0.1))
    assert summary["incomplete"] == 3 and incomplete_answers(summary) == (3, 4)
    assert summarise([row(0, 0.9, 0.7)], Calibration(0.1))["incomplete"] == 0  # Rows of an older work directory.
