"""The probabilities of options equal those of a walk over the whole vocabulary with the full logits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxalign.data.chat.requests import load_set
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.options import make_options, option_logprobs, outside_mass
from jaxalign.feedback.text_generator import TextGenerator
from jaxalign.feedback.writer import RequestWriter
from jaxalign.rollout.sampler import Engine
from tests import tiny
from tests.feedback.fakes import WordTokenizer

REAL = ("pegasus_sp_test", "test_model", "tinystories_tok4096")
CHAT = ("llama3", "qwen2", "gemma", "mistral")  # Qwen3 has the tokenizer of Qwen2.
PROMPTS = [[1, 7, 9, 11], [1, 5, 8]]


def generator_of(vocab, tokenizer=None, scale=1.5):
    model = tiny.model(vocab=vocab)
    params = jax.tree.map(lambda x: x * np.float32(scale), model.init(jax.random.key(3)))
    return TextGenerator(Engine(model, 2, 32, 16), params, tokenizer or WordTokenizer())


@functools.partial(jax.jit, static_argnames="model")
def all_hidden(model, params, tokens):
    return model.hidden(params, tokens)


def next_probabilities(generator, ids):
    """float64 [V]: the probabilities of every next token, from the full logits."""
    padded = np.zeros((1, 16), np.int32)  # One program for all lengths: attention is causal.
    padded[0, : len(ids)] = ids
    hidden = np.asarray(all_hidden(generator.engine.model, generator.params, padded), np.float64)[0, len(ids) - 1]
    logits = hidden @ np.asarray(generator.params["embedding"], np.float64).T
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def walk(generator, prompt, spellings, end):
    """(the probability of each option, the probability of none): every next token is counted once.

    A text belongs to the longest spelling with which it begins; if `end` is set, it must follow a spelling that is the
    beginning of another one.
    """
    whole = {ids: i for i, own in enumerate(spellings) for ids in own}
    begun = {ids[:n] for ids in whole for n in range(len(ids))}
    found = np.zeros(len(spellings) + 1)

    def visit(path, mass):
        for token, share in enumerate(next_probabilities(generator, [*prompt, *path])):
            longer = (*path, token)
            if longer in begun:
                visit(longer, mass * share)
            elif longer in whole:
                found[whole[longer]] += mass * share
            else:
                found[whole[path] if path in whole and (end is None or token == end) else -1] += mass * share

    visit((), 1.0)
    return found[:-1], found[-1]


def assert_agrees(generator, options, prompts=PROMPTS):
    logprobs = option_logprobs(generator, prompts, options)
    assert logprobs.shape == (len(prompts), len(options.names)) and logprobs.dtype == np.float32
    for row, prompt in enumerate(prompts):
        expected, outside = walk(generator, prompt, options.ids, options.end)
        assert expected.sum() + outside == pytest.approx(1, abs=1e-9) and (expected > 0).all()
        np.testing.assert_allclose(np.exp(logprobs[row]), expected, atol=1e-5)
        np.testing.assert_allclose(logprobs[row], np.log(expected), atol=1e-4)
        assert outside_mass(logprobs)[row] == pytest.approx(outside, abs=1e-5)


def options_of(spellings, end=None):
    """Options named by their number, whose spellings are given as ids."""
    texts = {str(i): [" ".join(map(str, ids)) for ids in own] for i, own in enumerate(spellings)}
    return make_options(tuple(texts), texts.get, lambda text: [int(i) for i in text.split()], "the test", end)


@pytest.fixture(scope="module")
def generator():
    return generator_of(32)


@pytest.mark.parametrize("spellings", [
    [[(20,)], [(21,)]],
    [[(20,), (22,), (23, 4)], [(21,), (24, 4, 6)]],  # Several spellings, some of several tokens.
    [[(20,)], [(20, 25)]],  # "1" and "10".
    [[(20,), (20, 9)], [(20, 25), (21,)], [(20, 25, 26)]],  # Each is the beginning of the next one.
    [[(5, 20, 6)], [(5, 21, 6)]],  # "(A)" and "(B)" begin with the same token.
    [[(5, 20), (20,)], [(5, 21), (21,)]],
    [[(20,), (20, 25)], [(21,)]],  # Two spellings of one option.
])
@pytest.mark.parametrize("end", [None, 2])
def test_probabilities_agree_with_the_full_logits(generator, spellings, end):
    assert_agrees(generator, options_of(spellings, end))


def test_an_option_that_a_confident_model_always_continues_keeps_a_finite_log_probability():
    """At 30 times the weights, nearly all mass is on one token."""
    confident = generator_of(32, scale=30)
    first = int(next_probabilities(confident, PROMPTS[0]).argmax())
    after = int(next_probabilities(confident, [*PROMPTS[0], first]).argmax())
    found = option_logprobs(confident, PROMPTS[:1], options_of([[(first,)], [(first, after)]]))
    assert np.isfinite(found).all() and np.exp(found).sum() <= 1 + 1e-6


@pytest.mark.parametrize("kind", ["comparison", "rating"])
@pytest.mark.parametrize("name", REAL)
def test_the_options_of_a_transcript_with_real_tokenizers(real_data, name, kind):
    tokenizer = load_tokenizer(real_data / "tokenizers" / f"{name}.model")
    writer = RequestWriter(load_set("transcript"), tokenizer, 100)
    if (name, kind) == ("test_model", "rating"):  # This tokenizer knows 1, 2, 5, 8 and 0, but no other digit.
        with pytest.raises(UserError, match="the options '3' and '4' of the template set transcript with the tokenizer of "
                                            ".*tokenizers have the same tokens, so a verdict cannot be read; write the"):
            writer.options(kind)
        return
    assert_agrees(generator_of(tokenizer.vocab_size, tokenizer), writer.options(kind))


@pytest.mark.parametrize("kind", ["comparison", "rating"])
@pytest.mark.parametrize("name", CHAT)
def test_the_options_of_chat_models(chat_tokenizers, name, kind):
    tokenizer = chat_tokenizers[name]
    options = RequestWriter(load_set("chat"), tokenizer, 100).options(kind)
    assert {len(own) for own in options.ids} <= {1, 2, 3, 4}
    assert_agrees(generator_of(tokenizer.vocab_size, tokenizer), options)


def test_pitfall_22_options_are_matched_by_token_ids_and_none_is_missing(generator):
    """Options were looked up as strings among the top log-probabilities: one that was not listed, or was spelled with a space,
    counted as probability 0, and one of several tokens was never found."""
    probabilities = next_probabilities(generator, PROMPTS[0])
    rare = int(probabilities.argmin())
    found = option_logprobs(generator, PROMPTS[:1], options_of([[(rare,)], [(int(probabilities.argmax()),)]]))
    assert np.isfinite(found).all() and np.exp(found[0, 0]) == pytest.approx(probabilities[rare], rel=1e-4)
    assert_agrees(generator, options_of([[(20,), (18, 20)], [(21,), (18, 21)]]), PROMPTS[:1])


def test_pitfall_22_options_with_equal_tokens_are_refused(chat_tokenizers):
    """Both options became the unknown token, so every verdict was one half."""
    tokenizer = chat_tokenizers["gemma"]
    encode = functools.partial(tokenizer.encode, continues=True)
    assert encode("\u03b1") == encode("\u03b2")
    with pytest.raises(UserError, match="the options '\u03b1' and '\u03b2' of here have the same tokens, so a verdict cannot "
                                        "be read; write the options of form.json differently"):
        make_options(("\u03b1", "\u03b2"), lambda text: [text], encode, "here")
    with pytest.raises(UserError, match="the options 'A' and 'B' of here have the same tokens"):  # By one spelling only.
        make_options(("A", "B"), {"A": ["A", "x"], "B": ["B", "x"]}.get, encode, "here")
    with pytest.raises(UserError, match="the option '' of here has no tokens; write the options"):
        make_options(("", "B"), lambda text: [text], encode, "here")
