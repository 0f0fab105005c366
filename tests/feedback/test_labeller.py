"""AI labels: both orders, clamp, inversion, undecided and unparsable answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxalign.config import FeedbackConfig
from jaxalign.data.chat.formats import FIRST, OPTIONS, QUESTION, REASONING, SECOND, VERDICT
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.judge import Verdict
from jaxalign.feedback.labeller import Labeller, Pair
from jaxalign.feedback.text_generator import TextGenerator, next_logprobs
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.feedback.fakes import PRINCIPLES, ScriptedGenerator, WordTokenizer, local_judge, prompt, prompt_ids

PLAIN = FeedbackConfig(reasoning=False, undecided_margin=0.02, principles_per_comparison=1)
REASONED = dataclasses.replace(PLAIN, reasoning=True, clamp_low=0.4, clamp_high=0.6)
PAIRS = [Pair(prompt(0), "good", "bad"), Pair(prompt(1), "bad", "good"), Pair(prompt(2), "good", "good")]


def shown(segments) -> tuple[str, str]:
    """Return the last words of the first and of the second answer shown."""
    first = segments[segments.index(FIRST) + 1 : segments.index(SECOND)]
    second = segments[segments.index(SECOND) + 1 : segments.index(QUESTION)]
    return first[-1].split()[-1], second[-1].split()[-1]


@dataclasses.dataclass(frozen=True)
class FakeLabeller(Labeller):
    """A labeller and the requests that its judge received."""

    asked: list = dataclasses.field(default_factory=list)
    generator: Any = None


def reasoning_of(config):
    return Sampling(config.max_reasoning_tokens, (2,), config.reasoning_temperature) if config.reasoning else None


def judge(opinion, config=PLAIN, script=lambda segments, call: "because", max_length=10_000):
    """A labeller whose judge's P(first shown) is a function of its prompt."""
    generator = ScriptedGenerator(script, opinion)
    made = local_judge(generator, None, reasoning_of(config), max_length)
    return FakeLabeller(CheckedJudge(made), PRINCIPLES, config, 0, generator.judged, generator)


def local(generator, principles=PRINCIPLES):
    made = local_judge(generator, max_length=generator.engine.max_length)
    return Labeller(CheckedJudge(made), principles, PLAIN, seed=0)


def fair(segments, sure=0.9, bias=0.0):
    """Prefer "good" with probability `sure`, and add `bias` for the first answer."""
    first, second = shown(segments)
    base = 0.5 if first == second else sure if first == "good" else 1 - sure
    return base + bias


def label(made, invert=False, pairs=PAIRS, first_row=0):
    return made.label(pairs, jax.random.key(0), first_row, invert)


def test_each_pair_is_asked_in_both_orders_under_one_principle():
    """Except the pair of equal answers, for which nothing is asked."""
    made = judge(fair)
    out = label(made)
    assert [shown(s) for s in made.asked] == [("good", "bad"), ("bad", "good"), ("bad", "good"), ("good", "bad")]
    for i in range(2):
        assert made.asked[i][-2:] == made.asked[i + 2][-2:]
        rule = next(rule for rule in PRINCIPLES if rule.name == out[i].principles[0])
        assert made.asked[i][-2:] == [rule.comparison, VERDICT]
    same = out[2]
    assert (same.label, same.decided, same.label_ab, same.reasoning_ab) == (0.5, False, None, None)


def test_pitfall_17_a_preference_for_the_first_position_cancels():
    """Other systems asked in one order only and used the answer as a hard label."""
    out = label(judge(lambda segments: fair(segments, 0.8, 0.1)))
    np.testing.assert_allclose([c.label for c in out], [0.8, 0.2, 0.5], rtol=1e-6)
    # P(A) is .9 with A first and .7 with A second; a judge without position bias would give .8 twice.
    np.testing.assert_allclose([out[0].label_ab, out[0].label_ba], [0.9, 0.7], rtol=1e-6)
    np.testing.assert_allclose([out[1].label_ab, out[1].label_ba], [0.3, 0.1], rtol=1e-6)
    assert [c.decided for c in out] == [True, True, False]


def test_a_judge_that_looks_only_at_the_position_decides_nothing():
    out = label(judge(lambda segments: 0.95))
    assert [c.label for c in out] == [0.5] * 3 and not any(c.decided for c in out)
    np.testing.assert_allclose(out[0].label_ab + out[0].label_ba, 1, rtol=1e-6)


def test_labels_stay_soft_without_reasoning_and_are_clamped_with_it():
    assert label(judge(fair))[0].label == pytest.approx(0.9)
    out = label(judge(fair, REASONED))
    np.testing.assert_allclose([c.label for c in out], [0.6, 0.4, 0.5], rtol=1e-6)
    # The statistics of the orders do not change.
    assert out[0].label_ab == pytest.approx(0.9)
    mild = label(judge(lambda segments: fair(segments, 0.55), REASONED))
    np.testing.assert_allclose([c.label for c in mild], [0.55, 0.45, 0.5], rtol=1e-6)


@pytest.mark.parametrize("config", [PLAIN, REASONED])
def test_inversion_changes_only_the_label(config):
    straight, turned = label(judge(fair, config)), label(judge(fair, config), invert=True)
    np.testing.assert_allclose([c.label for c in turned], [1 - c.label for c in straight], rtol=1e-6)
    assert [(c.label_ab, c.label_ba, c.decided) for c in turned] == [
        (c.label_ab, c.label_ba, c.decided) for c in straight
    ]


@pytest.mark.parametrize(("sure", "decided"), [(0.515, False), (0.52, False), (0.525, True)])
def test_pitfall_16_a_label_near_one_half_is_undecided_and_set_to_one_half(sure, decided):
    """In other systems an undecided answer became a random preference."""
    out = label(judge(lambda segments: fair(segments, sure)))
    assert [c.decided for c in out] == [decided, decided, False]
    assert out[0].label == (pytest.approx(sure) if decided else 0.5)


def test_the_margin_is_measured_before_the_clamp():
    """If labels were clamped to [.4, .6] first, none could be decided at a margin of .1."""
    out = label(judge(fair, dataclasses.replace(REASONED, undecided_margin=0.1)))
    assert [c.decided for c in out] == [True, True, False]


def test_pitfall_16_reasoning_truncated_in_one_order_is_undecided():
    """Such reasoning has no verdict, and using only the other order would bring position bias back."""

    def script(segments, call):
        return None if call == 1 and shown(segments) == ("bad", "good") else "because"

    out = label(judge(fair, REASONED, script))
    assert [c.decided for c in out] == [False, True, False]
    assert (out[0].label, out[0].label_ab, out[0].label_ba) == (0.5, None, None)
    assert (out[0].reasoning_ab, out[0].reasoning_ba) == ("because", "cut")


def test_pitfall_16_a_comparison_too_long_for_the_model_is_undecided():
    pairs = [Pair(prompt(0, "why " * 40), "good", "bad"), *PAIRS[1:]]
    out = label(judge(fair, max_length=40), pairs=pairs)
    assert [c.decided for c in out] == [False, True, False]
    assert (out[0].label, out[0].label_ab, out[0].label_ba) == (0.5, None, None)


def test_a_comparison_with_non_finite_logits_is_undecided(caplog):
    """One word of one answer has a NaN embedding, in a model with an untied head; no other word shares its id."""
    model = tiny.model(tie_embeddings=False)
    weights, tokenizer = model.init(jax.random.key(0)), WordTokenizer()
    broken = weights | {"embedding": weights["embedding"].at[tokenizer.encode("x")[0]].set(np.nan)}
    pairs = [Pair(prompt(0, "a"), "x", "b"), Pair(prompt(1, "a"), "a", "b")]
    rules = tuple(dataclasses.replace(rule, comparison="a") for rule in PRINCIPLES)
    assert tokenizer.encode("x")[0] not in tokenizer.encode("a b 0 1")
    good, found = (
        label(local(TextGenerator(Engine(model, 2, 64, 8), params, tokenizer), rules), pairs=pairs)
        for params in (weights, broken)
    )
    assert (found[0].label, found[0].decided, found[0].label_ab) == (0.5, False, None)
    assert found[1] == good[1] and good[0].label_ab is not None
    message = "1 of 2 judgements are left out: the model's logits are not finite numbers"
    assert [record.getMessage() for record in caplog.records] == [message] * 2


def test_the_verdict_is_asked_after_the_reasoning():
    made = judge(fair, REASONED, lambda segments, call: f"thought-{call}")
    out = label(made)
    asked = made.generator.calls
    assert [segments[0][-1] for segments, *_ in asked] == [REASONING] * 2
    assert made.asked[0][-3:] == ["thought-0", "<end>", VERDICT]
    assert made.asked[2][-3:] == ["thought-1", "<end>", VERDICT]
    assert (out[0].reasoning_ab, out[0].reasoning_ba) == ("thought-0", "thought-1")
    keys = {jax.random.key_data(key).tobytes() for _, key, *_ in asked}
    assert len(keys) == 2  # the orders do not share noise
    assert asked[0][2].temperature == REASONED.reasoning_temperature
    assert asked[0][2].max_new_tokens == REASONED.max_reasoning_tokens


def test_several_principles_are_averaged():
    config = dataclasses.replace(PLAIN, principles_per_comparison=3, aggregate="mean")

    def opinion(segments):
        number = int(segments[-2].split()[-1].rstrip("?"))
        return fair(segments, 0.5 + number / 10)

    out = label(judge(opinion, config))
    for comparison, sign in zip(out, (1, -1, 0), strict=True):
        assert len(set(comparison.principles)) == 3
        mean = np.mean([int(name.split("-")[1]) for name in comparison.principles]) / 10
        assert comparison.label == pytest.approx(0.5 + sign * mean, rel=1e-5)


def test_a_row_gets_the_same_label_in_any_chunk():
    """Principles and global row numbers depend only on the row; with several principles a pair has a row for each. Skipping a
    pair of equal answers shifts no other row."""
    config, pairs = dataclasses.replace(REASONED, principles_per_comparison=2), [PAIRS[0], PAIRS[2], PAIRS[1]]
    first, second = judge(fair, config), judge(fair, config)
    whole = label(first, pairs=pairs, first_row=10)
    assert label(second, pairs=pairs[1:], first_row=11) == whole[1:]
    assert [numbers for *_, numbers in first.generator.calls] == [[20, 21, 24, 25]] * 2
    assert [numbers for *_, numbers in second.generator.calls] == [[24, 25]] * 2


class Scripted:
    """A judge with given verdicts by (principle, the answer shown first); it records what it is asked."""

    def __init__(self, verdicts):
        self.verdicts, self.asked = verdicts, []

    def compare(self, requests, draw):
        self.asked.append([(request.principle.name, request.first) for request in requests])
        found = [self.verdicts[request.principle.name, request.first] for request in requests]
        return [verdict(len(self.asked)) if callable(verdict) else verdict for verdict in found]


def scripted(verdicts, **config):
    made = Scripted(verdicts)
    rules = tuple(rule for rule in PRINCIPLES if any(rule.name == name for name, _ in verdicts))
    config = dataclasses.replace(PLAIN, principles_per_comparison=len(rules), **config)
    return made, Labeller(CheckedJudge(made), rules, config, 0).label(PAIRS[:1], jax.random.key(0), 0)[0]


@pytest.mark.parametrize("second_order", ["unless_tie", "always"])
def test_after_a_tie_the_judge_is_not_asked_again(second_order):
    tie = Verdict(0.5, tie=0.9)
    verdicts = {("rule-0", "good"): Verdict(0.9, tie=0.05), ("rule-0", "bad"): Verdict(0.2, tie=0.1),
                ("rule-1", "good"): tie, ("rule-1", "bad"): tie}
    made, found = scripted(verdicts, second_order=second_order)
    assert sorted(made.asked[0]) == [("rule-0", "good"), ("rule-1", "good")]
    assert sorted(made.asked[1]) == [("rule-0", "bad"), *([("rule-1", "bad")] if second_order == "always" else [])]
    # The tie does not dilute the principle that decides: (.9 + .8) / 2.
    assert (found.decided, found.principle, found.label) == (True, "rule-0", pytest.approx(0.85))
    asked_once = {label.principle for label in found.labels if label.ba is None}
    assert asked_once == ({"rule-1"} if second_order == "unless_tie" else set())


def test_each_missing_verdict_has_its_reason_also_if_another_principle_decides():
    made, found = scripted({("rule-0", "good"): Verdict(0.9), ("rule-0", "bad"): Verdict(0.2),
                            ("rule-1", "good"): Verdict(0.9), ("rule-1", "bad"): Verdict(None, problem="refused"),
                            ("rule-2", "good"): Verdict(None), ("rule-2", "bad"): Verdict(None)})
    assert len(made.asked) == 2 and found.decided and found.problem is None
    reasons = {label.principle: (label.problem_ab, label.problem_ba) for label in found.labels}
    assert reasons == {"rule-0": (None, None), "rule-1": (None, "refused"), "rule-2": ("none", "none")}
    assert {label.principle for label in found.labels if label.complete} == {"rule-0"}


def test_several_chains_of_thought_are_averaged():
    """Of the three samples in each order, one has no verdict with the good answer first."""
    def sure(call):
        return Verdict((0.9, None, 0.7)[call - 1], f"thought-{call}", None if call != 2 else "cut_off")

    made, found = scripted({("rule-0", "good"): sure, ("rule-0", "bad"): Verdict(0.4)}, reasonings=3)
    assert len(made.asked) == 6
    assert (found.label_ab, found.label_ba) == (pytest.approx(0.8), pytest.approx(0.6))
    assert found.reasoning_ab == "thought-1"


@pytest.fixture(scope="module")
def generator():
    params = tiny.place(tiny.model(), tiny.host_params(scale=1.5))
    return TextGenerator(Engine(tiny.model(), 4, 32, 16), params, WordTokenizer())


def numpy_first(generator, segments):
    """P(first shown) from all logits after the verdict prompt, in float64."""
    ids, params = prompt_ids(generator.tokenizer, segments), tiny.host_params(scale=1.5)
    logits = tiny.hidden(tiny.model(), params, ids)[-1].astype(np.float64) @ params["embedding"].T
    a, b = (np.exp(logits[generator.tokenizer.marker_id(option)]) for option in OPTIONS)
    return a / (a + b)


def test_the_label_of_a_real_model_is_its_normalised_option_probabilities(generator):
    """Ragged prompts over several batches, the longest of which does not fit."""
    pairs = [Pair(prompt(i, "why " * (i + 1)), "good", "bad word here") for i in range(5)]
    pairs.append(Pair(prompt(9, "why " * 40), "good", "bad"))
    made = judge(fair)
    label(made, pairs=pairs)
    asked, found = made.asked, label(local(generator), pairs=pairs)
    for i in range(5):
        ab, ba = numpy_first(generator, asked[i]), 1 - numpy_first(generator, asked[i + 6])
        assert found[i].label_ab == pytest.approx(ab, abs=1e-5) and found[i].label_ba == pytest.approx(ba, abs=1e-5)
        decided = abs((ab + ba) / 2 - 0.5) > 0.02 and (ab > 0.5) == (ba > 0.5)
        expected = (ab + ba) / 2 if decided else 0.5
        assert found[i].label == pytest.approx(expected, abs=1e-5)
    assert (found[5].label, found[5].label_ab, found[5].decided) == (0.5, None, False)


def test_option_log_probabilities_are_normalised_over_the_whole_vocabulary():
    model, params = tiny.model(), tiny.host_params(scale=1.5)
    tokens, length = np.array([[1, 5, 7, 0], [1, 9, 0, 0]], np.int32), np.array([3, 2], np.int32)
    found = next_logprobs(model, params, tokens, length, np.array([4, 30], np.int32))
    for row in range(2):
        logits = tiny.hidden(model, params, tokens[row, : length[row]])[-1] @ params["embedding"].T
        logp = logits - np.log(np.exp(logits.astype(np.float64)).sum())
        np.testing.assert_allclose(found[row], logp[[4, 30]], atol=1e-5)


def test_labels_do_not_depend_on_whether_an_answer_ended_which_stays_known():
    ended, cut = (judge(fair).label([PAIRS[0]._replace(incomplete=sides)], jax.random.key(0), 0)[0] for sides in ((), ("b",)))
    assert (ended.incomplete, cut.incomplete) == ((), ("b",)) and dataclasses.replace(cut, incomplete=()) == ended
