"""`Sampler.generate(stop=...)`: where an answer ends, and which tokens it keeps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rollout.generation import Sampler
from tests.trainers.small import language_model


def generate(stop=(), **options):
    return list(Sampler(language_model(), temperature=1.0, seed=3, **options).generate(["It is", "No"], 24, 8, stop))


@pytest.fixture(scope="module")
def free():
    return generate()


def test_the_text_ends_before_the_first_stop_text_and_the_tokens_complete_it(free):
    """The stop texts are the fourth character of the first answer, and two characters of the last one."""
    stops = [free[0].text[3], free[-1].text[4:6]]
    ended = generate(stops)
    for own, whole in zip(ended, free, strict=True):
        found = [whole.text.index(stop) for stop in stops if stop in whole.text]
        if not found:
            assert (own.text, own.ids, own.ended) == (whole.text, whole.ids, whole.ended)
            continue
        assert own.text == whole.text[: min(found)] and own.ended
        assert own.ids == whole.ids[: len(own.ids)] and len(own.logprobs) == len(own.ids)
        np.testing.assert_array_equal(own.logprobs, whole.logprobs[: len(own.ids)])
        policy, prompt = language_model(), language_model().prompt_ids("It is" if whole in free[:8] else "No")
        assert any(stop in policy.text(own.ids, prompt) for stop in stops)
        assert not any(stop in policy.text(own.ids[:-1], prompt) for stop in stops)
    assert ended[0].text == free[0].text[: len(ended[0].text)] != free[0].text


def test_a_stop_text_that_no_answer_has_changes_nothing(free):
    for own, whole in zip(generate(["never in an answer"]), free, strict=True):
        assert (own.text, own.ids, own.ended) == (whole.text, whole.ids, whole.ended)


@pytest.mark.parametrize(("stop", "message"), (
    (".", "stop is '.' of type str; a list of texts is expected"),
    ([""], "stop has an empty text, which would end every answer at once"),
    ([3], r"stop\[0\] is 3 of type int; a string is expected"),
))
def test_other_values_are_refused(stop, message):
    with pytest.raises(UserError, match=message):
        generate(stop)
