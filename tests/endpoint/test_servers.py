"""Verdicts read from a real server, against the logits of the model that it serves."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxalign.endpoint.options import read_options, spell
from jaxalign.endpoint.records import CHAT, EndpointRequest
from jaxalign.models.language_model import load_model

QUESTION = "Which answer is better, A or B? Reply with the letter."
SPELLINGS = spell(("A", "B"), lambda name: (name, f" {name}"))
ALL = 1000
"""More than the size of the vocabulary: llama.cpp then shows every token."""


def comparison(top: int) -> EndpointRequest:
    messages = [{"role": "user", "content": QUESTION}]
    return EndpointRequest(CHAT, {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0, "logprobs": True,
                          "top_logprobs": top})


def probabilities(folder) -> np.ndarray:
    """float64 [V]: the probability of each token after the question, from the model's logits."""
    language = load_model(folder)
    ids = language.prompt_ids(QUESTION)
    hidden = language.model.hidden(language.weights, jnp.asarray([ids]))[0, -1]
    logits = np.asarray(hidden @ language.model.unembedding(language.weights), np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_options_have_the_probabilities_of_the_model(tiny_server):
    expected = probabilities(tiny_server.model)
    vocab = tokenizers.Tokenizer.from_file(str(tiny_server.model / "tokenizer.json"))
    (reply,) = tiny_server.server.ask([comparison(ALL)])
    reading = read_options(reply.tokens, SPELLINGS)
    # The tokenizer writes a space as U+0120.
    shares = [sum(expected[vocab.token_to_id(name)] for name in (letter, f"\u0120{letter}")) for letter in "AB"]
    np.testing.assert_allclose(np.exp(reading.logprobs), shares, rtol=1e-3)
    assert reading.outside == pytest.approx(1 - sum(shares), abs=1e-4) and reading.missing == ()
    # A bare space begins " A" and " B", and the server does not show the tokens after it.
    assert reading.undecided == pytest.approx(expected[vocab.token_to_id("\u0120")], rel=1e-3)


def test_the_error_of_a_reading_of_fewer_tokens_is_within_its_bound(tiny_server):
    whole, *readings = (
        read_options(reply.tokens, SPELLINGS)
        for reply in tiny_server.server.ask([comparison(top) for top in (ALL, 5, 20, 80, 160)])
    )
    share = 1 / (1 + np.exp(whole.logprobs[1] - whole.logprobs[0]))
    seen = [reading for reading in readings if reading is not None]
    assert seen
    for reading in seen:
        assert abs(1 / (1 + np.exp(reading.logprobs[1] - reading.logprobs[0])) - share) <= reading.bound + 1e-6
