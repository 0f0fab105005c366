"""The local judge of a chat model: each problem is counted apart, and no row depends on the others of its call."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxalign.config import FeedbackConfig
from jaxalign.data.chat.requests import load_set
from jaxalign.errors import UserError
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.critique import PolicyAnswer, count_outcomes, revise
from jaxalign.feedback.judge import (
    ComparisonRequest,
    CritiqueRequest,
    Draw,
    Rating,
    RatingRequest,
    RevisionRequest,
    Text,
    Verdict,
)
from jaxalign.feedback.local import LocalJudge, make_local_judge, make_writer
from jaxalign.feedback.text_generator import Completion, TextGenerator
from jaxalign.feedback.writer import RequestWriter
from jaxalign.models.model import Model
from jaxalign.records import Message, Principle, Prompt
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from tests import tiny

KEY, SAMPLING = jax.random.key(0), Sampling(8, (0,))
PRINCIPLE = Principle("kind", "Where is it rude?", "Make it polite.", "Which is kinder?")
REFUSAL = "I'm sorry, but I can't help with that."


@dataclasses.dataclass
class Scripted:
    """A model whose texts and option probabilities depend on a word in its request.

    texts: word -> (text, ended, finite). option: word -> the probability of each option's first spelling; NaN is not finite.
    """

    tokenizer: Any
    texts: dict = dataclasses.field(default_factory=dict)
    option: dict = dataclasses.field(default_factory=dict)

    def _find(self, ids, table, default):
        text = "".join(self.tokenizer.piece(i) for i in ids)
        return next((value for word, value in table.items() if word in text), default)

    def generate(self, prompts, key, sampling, rows):
        found = [self._find(ids, self.texts, ("It is rude.", True, True)) for ids in prompts]
        return [Completion(text, (5,), ended, -1.0, finite) for text, ended, finite in found]

    def next_logprobs(self, prompts, tokens):
        options = [token for letter in "ABC" for token in self.tokenizer.encode(letter, continues=True)]
        out = np.full((len(prompts), len(tokens)), 1e-9)
        for row, ids in enumerate(prompts):
            for token, share in zip(options, self._find(ids, self.option, (0.6, 0.2)), strict=False):
                out[row][np.asarray(tokens) == token] = share
        return np.log(out).astype(np.float32)


def judge(tokenizer, max_length=10_000, reasoning=None, max_outside=0.5, ties=False, **script):
    writer = RequestWriter(load_set("chat"), tokenizer, max_length, ties=ties)
    return LocalJudge(Scripted(tokenizer, **script), writer, SAMPLING, reasoning, max_outside)


def user(text):
    return (Message("user", text),)


def compare_all(made, texts, system=()):
    requests = [ComparisonRequest((*system, *user(text)), "one", "two", PRINCIPLE) for text in texts]
    together = made.compare(requests, Draw(KEY, range(len(texts))))
    alone = [made.compare([request], Draw(KEY, [row]))[0] for row, request in enumerate(requests)]
    assert alone == together
    return together


def test_verdicts_with_problems_are_counted_apart_and_leave_the_other_rows_as_they_are(chat_tokenizers):
    made = judge(chat_tokenizers["qwen2"], 900, option={"vague": (0.2, 0.1), "sure": (0.9, 0.05), "broken": (np.nan, np.nan),
                                                       "half": (0.5, np.nan)})
    found = compare_all(made, ["usual", "vague", "long " * 300, "broken", "sure", "half"])
    assert [v.problem for v in found] == [None, "unreadable", "too_long", "not_finite", None, "not_finite"]
    assert [v.probability for v in found[1:4]] == [None] * 3 and found[5].probability is None
    assert found[0].probability == pytest.approx(0.75, rel=1e-5) and found[0].outside == pytest.approx(0.2, abs=1e-6)
    assert found[1].outside == pytest.approx(0.7, abs=1e-6) and found[4].probability == pytest.approx(0.9 / 0.95, rel=1e-5)


def test_a_tie_is_a_verdict_that_counts_one_half_for_each_answer(chat_tokenizers):
    tokenizer = next(iter(chat_tokenizers.values()))
    made = judge(tokenizer, ties=True, option={"clear": (0.8, 1e-9), "equal": (0.1, 0.1, 0.6), "leaning": (0.3, 0.1, 0.4)})
    clear, equal, leaning = compare_all(made, ("clear", "equal", "leaning"))
    # (P(A) + P(C) / 2) and P(C), divided by P(A) + P(B) + P(C).
    np.testing.assert_allclose((clear.probability, clear.tie), (1.0, 0.0), atol=1e-6)
    np.testing.assert_allclose((equal.probability, equal.tie, equal.outside), (0.5, 0.75, 0.2), atol=1e-6)
    np.testing.assert_allclose((leaning.probability, leaning.tie), (0.5 / 0.8, 0.5), atol=1e-6)


def test_without_ties_the_judge_is_not_offered_one(chat_tokenizers):
    tokenizer = next(iter(chat_tokenizers.values()))
    (verdict,) = compare_all(judge(tokenizer, option={"equal": (0.45, 0.15, 0.4)}), ("equal",))
    assert (round(verdict.probability, 5), verdict.tie) == (0.75, None)


def test_ties_need_a_tie_in_the_template_set(chat_tokenizers):
    tokenizer = next(iter(chat_tokenizers.values()))
    assert make_writer(tokenizer, FeedbackConfig(templates="chat"), 100).ties
    assert not make_writer(tokenizer, FeedbackConfig(templates="transcript"), 100).ties
    with pytest.raises(UserError, match='feedback.ties is True, but form.json of the template set .transcript. has no "tie"'):
        make_writer(tokenizer, FeedbackConfig(templates="transcript", ties=True), 100)


def test_problems_of_the_reasoning(chat_tokenizers):
    texts = {"cut": ("I think that", False, True), "refuse": (REFUSAL, True, True), "broken": ("", False, False),
             "verdict": ("One is kind.\n\nBetter answer: A and so", False, True),
             "unclosed": ("<think>One is kind. Better answer: A", True, True)}
    made = judge(chat_tokenizers["qwen3"], 2000, SAMPLING, texts=texts)
    found = compare_all(made, ["usual", "cut", "refuse", "broken", "verdict", "unclosed", "long " * 500])
    assert [v.problem for v in found] == [None, "cut_off", "refused", "not_finite", None, "cut_off", "too_long"]
    assert [v.reasoning for v in found[:3]] == ["It is rude.", "I think that", REFUSAL] and found[4].reasoning == "One is kind."
    assert found[0].probability == found[4].probability == pytest.approx(0.75, rel=1e-5)


def test_a_chat_template_that_rejects_a_dialogue(chat_tokenizers):
    """Gemma has no system turn. Its comparisons show the dialogue as text, so only critiques are affected."""
    made, system = judge(chat_tokenizers["gemma"]), (Message("system", "Be brief."),)
    requests = [CritiqueRequest(user("Why?"), "so", PRINCIPLE), CritiqueRequest((*system, *user("Why?")), "so", PRINCIPLE)]
    assert made.critique(requests, Draw(KEY, [0, 1])) == [Text("It is rude."), Text("", False, "template")]
    assert [v.problem for v in compare_all(made, ["Why?"], system)] == [None]


def test_critiques_and_revisions_with_problems(chat_tokenizers):
    texts = {"cut": ("It is", False, True), "refuse": (REFUSAL, True, True), "broken": ("", False, False),
             "polite": ("Sure! Here's my critique:\n\nIt is rude.", True, True),
             "thinker": ("<think>\nHm.\n</think>\n\nIt is rude.", True, True)}
    made = judge(chat_tokenizers["qwen2"], 900, texts=texts)
    asked = ["usual", "cut", "refuse", "broken", "polite", "thinker", "long " * 300]
    found = made.critique([CritiqueRequest(user(text), "so", PRINCIPLE) for text in asked], Draw(KEY, range(7)))
    assert found == [
        Text("It is rude."), Text("It is", False), Text(REFUSAL, True, "refused"), Text("", False, "not_finite"),
        Text("It is rude.", notes=("preamble",)), Text("It is rude.", reasoning="Hm."), Text("", False, "too_long"),
    ]
    revised = made.revise([RevisionRequest(user(text), "so", PRINCIPLE, "bad") for text in asked], Draw(KEY, range(7)))
    assert revised[2] == Text(REFUSAL)  # A harmless refusal is the best answer to some prompts.
    assert [text.problem for text in revised] == [None, None, None, "not_finite", None, None, "too_long"]


def test_pitfall_25_a_judges_refusal_is_an_outcome_of_its_own(chat_tokenizers):
    """Refusals were dropped without a word; they fell mostly on true positives. Here each row keeps its outcome, and the counts
    distinguish refusals from cut and unreadable texts."""
    words = ("usual", "refuse", "rewrite", "rewrite", "cut")
    prompts = [Prompt(f"p{i}", user(word), "red_team") for i, word in enumerate(words)]

    class Judge(Scripted):
        def generate(self, ids, key, sampling, rows):
            asked = ["".join(map(self.tokenizer.piece, request)) for request in ids]
            return [self.answer(text, "revision" if "Make it polite" in text else "critique") for text in asked]

        def answer(self, request, kind):
            word = next(word for word in words if word in request)
            special = {("refuse", "critique"): REFUSAL, ("rewrite", "revision"): "I cannot rewrite this."}
            text = special.get((word, kind), "It is rude." if kind == "critique" else "Please wait.")
            return Completion(text, (5,), (word, kind) != ("cut", "revision"), -1.0)

    made = dataclasses.replace(judge(chat_tokenizers["qwen2"]), generator=Judge(chat_tokenizers["qwen2"]))
    answers = [PolicyAnswer("Go away!", True)] * 5
    rows = revise(CheckedJudge(made), prompts, answers, [[PRINCIPLE]] * 5, KEY, 0)
    assert [row.outcome for row in rows] == [None, "critique_refused", "refused", "refused", "cut_off"]
    assert count_outcomes(row.outcome for row in rows) == {"refused": 2, "critique_refused": 1, "cut_off": 1}


@pytest.fixture(scope="module")
def real(chat_tokenizers):
    """A random tiny model with the tokenizer of Qwen3, as a judge that reasons."""
    tokenizer = chat_tokenizers["qwen3"]
    model = Model(dataclasses.replace(tiny.DECODER, vocab=tokenizer.vocab_size))
    params = jax.tree.map(lambda x: x * np.float32(2), model.init(jax.random.key(1)))
    settings = FeedbackConfig(reasoning=True, max_reasoning_tokens=8, max_outside_mass=1.0)
    return make_local_judge(model, params, tokenizer, settings, 768, 4, writing=Sampling(8, ()))


@pytest.mark.slow
def test_results_do_not_depend_on_the_other_rows_of_a_call(real):
    """Long, short and impossible requests in one call, and each by itself with the same row number."""
    asked = [user("Why? " * n) for n in (1, 9, 3, 500, 7)]
    plain = dataclasses.replace(real, reasoning=None)
    calls = {
        "critique": (real, [CritiqueRequest(messages, "so", PRINCIPLE) for messages in asked]),
        "compare": (plain, [ComparisonRequest(messages, "one", "two", PRINCIPLE) for messages in asked]),
        "rate": (plain, [RatingRequest(messages, "one", PRINCIPLE) for messages in asked]),
    }
    for method, (made, requests) in calls.items():
        together = getattr(made, method)(requests, Draw(KEY, [3, 5, 8, 9, 11]))
        assert [found.problem for found in together] == [None, None, None, "too_long", None]
        for row, request, found in zip([3, 5, 8, 9, 11], requests, together, strict=True):
            (alone,) = getattr(made, method)([request], Draw(KEY, [row]))
            if isinstance(found, Text):
                assert alone == found
            else:
                assert alone[1:3] == found[1:3]
                numbers = [(x[0], x.outside) for x in (alone, found)]
                assert numbers[0] == numbers[1] == (None, None) or numbers[0] == pytest.approx(numbers[1], abs=1e-5)


def test_reasoning_that_reaches_its_limit_gives_no_verdict(real):
    found = real.compare([ComparisonRequest(user("Why?"), "one", "two", PRINCIPLE)] * 2, Draw(KEY, [0, 1]))
    assert collections.Counter(v.problem for v in found) == {"cut_off": 2} and all(v.reasoning for v in found)


def test_most_of_a_random_models_probability_is_outside_of_the_options(real):
    """With a limit, its verdicts and ratings are unreadable; the others would be noise."""
    plain = dataclasses.replace(real, reasoning=None, max_outside=0.5)
    (verdict,) = plain.compare([ComparisonRequest(user("Why?"), "one", "two", PRINCIPLE)], Draw(KEY, [0]))
    (rating,) = plain.rate([RatingRequest(user("Why?"), "one", PRINCIPLE)], Draw(KEY, [0]))
    assert verdict == Verdict(None, problem="unreadable", outside=verdict.outside) and 0.5 < verdict.outside < 1
    assert rating == Rating(None, problem="unreadable", outside=rating.outside) and 0.5 < rating.outside < 1


@pytest.mark.medium
def test_a_prompt_with_non_finite_logits_affects_no_other_row(real):
    """One token has an embedding of NaN, in a model with an untied head."""
    tokenizer = real.generator.tokenizer
    config = dataclasses.replace(tiny.DECODER, vocab=tokenizer.vocab_size, tie_embeddings=False)
    model = Model(config)
    params = model.init(jax.random.key(1))
    (token,) = tokenizer.encode("\u00a7", continues=True)[-1:]
    broken = params | {"embedding": params["embedding"].at[token].set(np.nan)}
    requests = [ComparisonRequest(user(text), "one", "two", PRINCIPLE) for text in ("Why?", "\u00a7", "How?")]
    engine, draw = Engine(model, 4, 768), Draw(KEY, [0, 1, 2])
    generators = (TextGenerator(engine, weights, tokenizer) for weights in (params, broken))
    good, found = (LocalJudge(generator, real.writer).compare(requests, draw) for generator in generators)
    assert [v.problem for v in found] == [None, "not_finite", None] and good[1].problem is None
    assert [found[0], found[2]] == [good[0], good[2]]


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", [False, True])
def test_requests_about_a_pair_share_their_prefix_unless_the_config_forbids_it(chat_tokenizers, reasoning):
    """Three principles for each of two pairs. The verdicts are the same, and fewer tokens are computed."""
    tokenizer = chat_tokenizers["qwen3"]
    model = Model(dataclasses.replace(tiny.DECODER, vocab=tokenizer.vocab_size))
    params, found, computed = model.init(jax.random.key(1)), {}, {}
    rules = [dataclasses.replace(PRINCIPLE, comparison=f"Which is {word}?") for word in ("kinder", "shorter", "truer")]
    requests = [
        ComparisonRequest(user("Why? " * n), "one " * 90, "two " * 90, rule) for n in (9, 20) for rule in rules
    ]
    for share in (True, False):
        settings = FeedbackConfig(reasoning=reasoning, max_reasoning_tokens=8, max_outside_mass=1.0, share_prefix=share)
        work = []

        def counted(lengths, tokens, heads, before=(), work=work):
            work.append(sum(lengths) - sum(before))

        made = make_local_judge(model, params, tokenizer, settings, 1024, 8, counted=counted)
        found[share], computed[share] = made.compare(requests, Draw(KEY, range(6))), sum(work)
    assert computed[True] < 0.6 * computed[False]
    for one, other in zip(found[True], found[False], strict=True):
        assert (one.reasoning, one.problem) == (other.reasoning, other.problem)
        assert one.outside == pytest.approx(other.outside, abs=1e-5)
