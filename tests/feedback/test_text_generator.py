"""Text in, text out: the model's input, its answer, and prompts that do not fit."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxalign.config import Mesh
from jaxalign.data.chat.formats import ASSISTANT, USER
from jaxalign.errors import UserError
from jaxalign.feedback.text_generator import TextGenerator
from jaxalign.models import flops
from jaxalign.parallel.sharding import make_sharding
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.feedback.fakes import WordTokenizer, prompt_ids

SAMPLING = Sampling(8, tiny.STOPS)
ASKED = [[USER, "what is it", ASSISTANT], [USER, "so", ASSISTANT], [USER, "tell me all of it now", ASSISTANT]]


def generate(generator, asked, key, sampling, rows):
    """The continuations of prompts that are given as segments."""
    return generator.generate([prompt_ids(generator.tokenizer, segments) for segments in asked], key, sampling, rows)


@pytest.fixture(scope="module")
def generator():
    params = tiny.place(tiny.model(), tiny.host_params(scale=1.5))
    return TextGenerator(Engine(tiny.model(), 4, 24, 8), params, WordTokenizer())


@pytest.fixture(scope="module")
def completions(generator):
    return generate(generator, ASKED, jax.random.key(1), SAMPLING, [10, 11, 12])


def test_the_ids_include_the_end_token_and_the_text_does_not(completions):
    assert any(u.ended for u in completions) and not all(u.ended for u in completions)
    for utterance in completions:
        words = utterance.ids[:-1] if utterance.ended else utterance.ids
        assert utterance.text == " ".join(map(str, words))
        assert (utterance.ids[-1] in tiny.STOPS) == utterance.ended and utterance.logprob < 0


def test_an_answer_depends_on_its_row_number(generator, completions):
    """The same prompts with the same global rows, requested in two halves."""
    halves = generate(generator, ASKED[:1], jax.random.key(1), SAMPLING, [10])
    halves += generate(generator, ASKED[1:], jax.random.key(1), SAMPLING, [11, 12])
    assert [u.ids for u in halves] == [u.ids for u in completions]
    others = generate(generator, ASKED, jax.random.key(1), SAMPLING, [50, 51, 52])
    assert [u.ids for u in others] != [u.ids for u in completions]


def test_a_prompt_that_is_too_long_is_not_answered_and_affects_no_other(generator, completions):
    long = [USER, "word " * 20, ASSISTANT]
    found = generate(generator, [ASKED[0], long, *ASKED[2:]], jax.random.key(1), SAMPLING, [10, 11, 12])
    assert (found[1].text, found[1].ids, found[1].ended) == ("", (), False)
    assert [found[0].ids, found[2].ids] == [completions[0].ids, completions[2].ids]
    assert generate(generator, [long], jax.random.key(1), SAMPLING, [0])[0].ids == ()


def test_the_longest_prompt_that_fits_is_answered(generator):
    segments = [USER, "word " * 13, ASSISTANT]  # 16 with bos and markers, plus 8 new tokens: 24
    assert len(prompt_ids(generator.tokenizer, segments)) + SAMPLING.max_new_tokens == generator.engine.max_length
    assert generate(generator, [segments], jax.random.key(1), SAMPLING, [0])[0].ids
    longer = [USER, "word " * 14, ASSISTANT]
    assert not generate(generator, [longer], jax.random.key(1), SAMPLING, [0])[0].ids


def test_an_answer_with_non_finite_logits_counts_as_truncated_and_affects_no_other(caplog):
    """Token 9 has an embedding of NaN, in a model with an untied head."""
    model = tiny.model(tie_embeddings=False)
    weights = model.init(jax.random.key(0))
    spoilt = WordTokenizer().encode("boom")[0]
    broken = weights | {"embedding": weights["embedding"].at[spoilt].set(np.nan)}
    asked = [[USER, "so", ASSISTANT], [USER, "boom", ASSISTANT], [USER, "what", ASSISTANT]]
    generators = (TextGenerator(Engine(model, 2, 24, 8), params, WordTokenizer()) for params in (weights, broken))
    good, found = (generate(one, asked, jax.random.key(1), Sampling(8, (spoilt,)), [5, 6, 7]) for one in generators)
    assert (found[1].text, found[1].ids, found[1].ended) == ("", (), False)
    assert [found[0], found[2]] == [good[0], good[2]]
    message = "1 of 3 answers count as cut off: the model's logits are not finite numbers"
    assert [record.getMessage() for record in caplog.records] == [message]


def test_a_model_without_any_finite_logits_is_an_error():
    params = jax.tree.map(lambda x: x * np.nan, tiny.place(tiny.model(), tiny.host_params()))
    generator = TextGenerator(Engine(tiny.model(), 4, 24, 8), params, WordTokenizer())
    message = "the model's logits are not finite numbers for any of 3 prompts: its weights are not"
    with pytest.raises(UserError, match=message):
        generate(generator, ASKED, jax.random.key(1), SAMPLING, [10, 11, 12])
    with pytest.raises(UserError, match=message):
        generator.next_logprobs([prompt_ids(generator.tokenizer, asked) for asked in ASKED], np.asarray([4, 5], np.int32))


WINDOWED = {"layers": 2, "window": 5, "local_layers": (True, False)}
WANTED = np.array([4, 5, 30], np.int32)
ROUNDING = {"atol": 1e-5, "rtol": 1e-5}  # Of float32 log-probabilities down to -10.


def questions(pairs: int = 5, each: int = 4) -> list[list[int]]:
    """Prompts of `each` questions about one pair of texts, in any order, and one prompt by itself."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, 32, 40 + 3 * i).tolist() for i in range(pairs)]
    prompts = [[*text, k, *rng.integers(3, 32, 4 + k).tolist()] for text in texts for k in range(each)]
    rng.shuffle(prompts)
    return [*prompts, rng.integers(3, 32, 45).tolist()]


def without_sharing(generator: TextGenerator) -> TextGenerator:
    return dataclasses.replace(generator, engine=dataclasses.replace(generator.engine, share_prefix=False))


@pytest.mark.medium
@pytest.mark.variants(2)
@pytest.mark.parametrize("mesh", [None, (8, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("changes", [{}, WINDOWED], ids=["full", "window"])
def test_log_probabilities_with_shared_prefixes_are_those_of_each_prompt(changes, mesh):
    """Against all logits of each prompt alone, and against the same call without sharing."""
    model, prompts, work = tiny.model(mesh, **changes), questions(), []
    params, batch = tiny.place(model, tiny.host_params(scale=1.5, **changes)), 32 if mesh == (8, 1, 1) else 8
    shared = TextGenerator(Engine(model, batch, 64, 8, True), params, WordTokenizer(), lambda *call: work.append(call))
    found = shared.next_logprobs(prompts, WANTED)
    assert sum(tokens for _, tokens, *_ in work) < 0.6 * sum(map(len, prompts))
    np.testing.assert_array_equal(found, shared.next_logprobs(prompts, WANTED))
    alone = without_sharing(shared).next_logprobs(prompts, WANTED)
    np.testing.assert_allclose(found, alone, **ROUNDING)
    plain, weights = tiny.model(**changes), tiny.host_params(scale=1.5, **changes)
    for row, prompt in zip(found, prompts, strict=True):
        logits = tiny.hidden(plain, weights, prompt)[-1].astype(np.float64) @ weights["embedding"].T
        np.testing.assert_allclose(row, (logits - np.log(np.exp(logits).sum()))[WANTED], **ROUNDING)


def test_the_counted_work_is_that_which_is_computed():
    """Two pairs of 40 tokens with 2 questions of 5 tokens each, of which the prefix is computed once."""
    work, rng = [], np.random.default_rng(3)
    texts = [rng.integers(3, 32, 40).tolist() for _ in range(2)]
    prompts = [[*text, k, 6, 7, 8, 9] for text in texts for k in (1, 2)]
    model = tiny.model()
    engine = Engine(model, 4, 64, 8, True)
    generator = TextGenerator(engine, tiny.host_params(), WordTokenizer(), lambda *call: work.append(call))
    generator.next_logprobs(prompts, WANTED)
    assert work == [([45] * 4, 2 * 40 + 4 * 5, 4, [0, 40, 0, 40])]
    whole = flops.forward(model, [45], 1)
    assert flops.forward(model, [40]) + flops.forward(model, [45], 1, [40]) == pytest.approx(whole)
    work.clear()
    without_sharing(generator).next_logprobs(prompts, WANTED)
    assert work == [([45] * 4, 4 * 45, 4)]


def test_a_mesh_that_splits_the_length_computes_each_prompt_by_itself():
    model = dataclasses.replace(tiny.model(), sharding=make_sharding(Mesh(data=4, context=2)))
    params, work = tiny.place(model, tiny.host_params(scale=1.5)), []
    generator = TextGenerator(Engine(model, 8, 64, 8, True), params, WordTokenizer(), lambda *call: work.append(call))
    prompts = questions(2)
    found = generator.next_logprobs(prompts, WANTED)
    assert sum(tokens for _, tokens, *_ in work) == sum(map(len, prompts))
    single = TextGenerator(Engine(tiny.model(), 8, 64, 8), tiny.host_params(scale=1.5), WordTokenizer())
    np.testing.assert_allclose(found, single.next_logprobs(prompts, WANTED), **ROUNDING)


def test_non_finite_logits_of_a_prompt_do_not_affect_those_that_share_its_prefix():
    """Token 31 has an embedding of NaN, in a model with an untied head. It is in the question of one prompt."""
    model, text = tiny.model(tie_embeddings=False), np.random.default_rng(3).integers(3, 30, 40).tolist()
    weights = model.init(jax.random.key(0))
    broken = weights | {"embedding": weights["embedding"].at[31].set(np.nan)}
    prompts = [[*text, *question] for question in ([1, 5], [2, 31], [6, 6], [7, 5])]
    good, found = (
        TextGenerator(Engine(model, 4, 64, 8, True), params, WordTokenizer()).next_logprobs(prompts, WANTED)
        for params in (weights, broken)
    )
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(np.delete(found, 1, axis=0), np.delete(good, 1, axis=0))
