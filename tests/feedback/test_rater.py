"""Direct AI feedback: expected ratings against a numpy computation with the same model, and requests without a rating."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxalign.data.chat.formats import RATINGS
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.judge import Draw, Rating, RatingRequest
from jaxalign.feedback.options import Options, option_logprobs
from jaxalign.feedback.text_generator import TextGenerator
from jaxalign.rewards.rated import Rater
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.feedback.fakes import PRINCIPLES, ScriptedGenerator, WordTokenizer, local_judge, prompt, prompt_ids, segments_of

KEY = jax.random.key(0)


class DigitTokenizer(WordTokenizer):
    """Every digit has its own id, so the ids of 1 are a prefix of those of 10."""

    def encode(self, text):
        return [20 + int(digit) for digit in text] if text.isdigit() else super().encode(text)


@pytest.fixture(scope="module")
def generator():
    model = tiny.model()
    return TextGenerator(Engine(model, 4, 64, bucket=8), tiny.place(model, tiny.host_params(scale=1.5)), DigitTokenizer())


def rater_of(generator, principles, count=1):
    return Rater(CheckedJudge(local_judge(generator, max_length=generator.engine.max_length)), principles, count, seed=0)


def next_logp(generator, ids):
    """float64 log-probabilities of the token after `ids`."""
    hidden = tiny.hidden(generator.engine.model, generator.params, ids)
    logits = hidden[-1].astype(np.float64) @ np.asarray(generator.params["embedding"], np.float64).T
    return logits - np.log(np.exp(logits).sum())


def test_the_log_prob_of_a_text_covers_all_tokens_and_the_end_if_it_is_a_prefix_of_another(generator):
    prompts, ids = [[1, 5, 7], [1, 9, 11, 12, 13]], (((21,),), ((22, 4),), ((21, 20),))
    found = option_logprobs(generator, prompts, Options(("1", "2", "10"), ids, end=2))
    for row, ids in enumerate(prompts):
        first, after_21, after_22 = (next_logp(generator, ids + more) for more in ([], [21], [22]))
        expected = [first[21] + after_21[2], first[22] + after_22[4], first[21] + after_21[20]]
        np.testing.assert_allclose(found[row], expected, atol=1e-4)


def test_a_rating_is_the_expectation_over_one_to_ten(generator):
    asked, answers = [prompt(0), prompt(1), prompt(2)], ["so", "not so", ""]
    rater = rater_of(generator, PRINCIPLES[:1])
    found = rater.rate(asked, answers, KEY, first_row=0)
    for row, (question, text) in enumerate(zip(asked, answers, strict=True)):
        ids = prompt_ids(generator.tokenizer, segments_of("rating", question.messages, PRINCIPLES[0], response=text))
        first, after = next_logp(generator, ids), next_logp(generator, [*ids, 21])
        logp = np.asarray([first[21] + after[2], *(first[20 + i] for i in range(2, 10)), first[21] + after[20]])
        weights = np.exp(logp) / np.exp(logp).sum()
        assert found[row] == pytest.approx(float(weights @ np.arange(1, 11)), abs=1e-3)
    assert found.dtype == np.float32


def test_several_principles_are_averaged(generator):
    both = rater_of(generator, PRINCIPLES[:2], 2).rate([prompt(0)], ["so"], KEY, 0)
    each = [rater_of(generator, PRINCIPLES[i : i + 1]).rate([prompt(0)], ["so"], KEY, 0) for i in range(2)]
    assert both[0] == pytest.approx(np.mean(each), abs=1e-4)


def test_reasoning_precedes_the_rating_and_truncated_reasoning_gives_no_rating():
    asked = [prompt(0), prompt(1)]

    class Scripted(ScriptedGenerator):
        def next_logprobs(self, prompts, tokens):
            self.judged += [self.tokenizer.seen.get(tuple(ids)) for ids in prompts]
            each = np.where(np.asarray(tokens) == self.tokenizer.encode("4")[0], 0.91, 0.01)
            return np.log(np.tile(each, (len(prompts), 1)))

    scripted = Scripted(lambda segments, _: None if "how so 1" in segments else "it is good")
    requests = [RatingRequest(p.messages, "yes", PRINCIPLES[0]) for p in asked]
    found = local_judge(scripted, None, Sampling(160, (2,), 0.0)).rate(requests, Draw(KEY, [7, 8]))
    thoughts = {"reasoning": True, "thoughts": "it is good"}
    assert scripted.judged == [segments_of("rating", asked[0].messages, PRINCIPLES[0], response="yes", **thoughts)]
    # .91 of 4 and .01 of every other rating.
    assert found[0].rating == pytest.approx(0.91 * 4 + 0.01 * (55 - 4), rel=1e-5) and found[0].reasoning == "it is good"
    assert found[1] == Rating(None, "cut", "cut_off")
    assert scripted.calls[0][3] == [7, 8]


def test_a_dialogue_that_is_too_long_has_no_rating_and_affects_no_other(generator):
    rater = rater_of(generator, PRINCIPLES)
    found = rater.rate([prompt(0), prompt(1)], ["word " * 70, "so"], KEY, 0)
    assert np.isnan(found[0]) and 1 <= found[1] <= 10


def test_the_request_has_the_principle_and_ratings_are_one_to_ten():
    segments = segments_of("rating", prompt(0).messages, PRINCIPLES[3], response="yes", reasoning=True)
    assert segments[-3:] == ["<question>", "critique 3 Rate it from 1 to 10.", "<reasoning>"]
    assert RATINGS == tuple("1 2 3 4 5 6 7 8 9 10".split())
