"""Critique and revision: the choice of principles, the requests, and truncated answers."""

from __future__ import annotations

import collections

import jax
import numpy as np

from jaxalign.data.chat.formats import CRITIQUE, CRITIQUE_REQUEST, END, REVISION, REVISION_REQUEST, render_prompt
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.critique import answer, answer_and_revise, draw_principles
from jaxalign.rollout.sampling import Sampling
from tests.feedback.fakes import PRINCIPLES, ScriptedGenerator, local_judge, prompt

SAMPLING = Sampling(8, (2,))


def names(drawn):
    return [[rule.name for rule in rules] for rules in drawn]


def test_the_principles_of_a_row_depend_only_on_the_row():
    """They do not depend on how rows are cut into chunks, or on earlier draws."""
    whole = names(draw_principles(PRINCIPLES, range(20), 2, seed=3, stream=0))
    chunks = [names(draw_principles(PRINCIPLES, rows, 2, seed=3, stream=0)) for rows in (range(7), range(7, 20))]
    assert whole == chunks[0] + chunks[1]
    assert names(draw_principles(PRINCIPLES, [13], 2, seed=3, stream=0)) == [whole[13]]


def test_other_seeds_and_streams_draw_other_principles():
    def draw(seed, stream):
        return names(draw_principles(PRINCIPLES, range(20), 1, seed, stream))

    assert draw(3, 0) != draw(4, 0) and draw(3, 0) != draw(3, 1) and draw(3, 0) == draw(3, 0)


def test_all_principles_are_equally_frequent():
    drawn = names(draw_principles(PRINCIPLES, range(1000), 1, 0, 0))
    counts = collections.Counter(name for row in drawn for name in row)
    # Five standard deviations of a binomial count of 1000 at 1/5.
    assert len(counts) == 5 and all(abs(count - 200) < 5 * np.sqrt(160) for count in counts.values())


def test_a_row_repeats_a_principle_only_when_there_are_too_few():
    for rules in names(draw_principles(PRINCIPLES, range(50), 5, 0, 0)):
        assert len(set(rules)) == 5
    for rules in names(draw_principles(PRINCIPLES[:2], range(50), 5, 0, 0)):
        assert len(rules) == 5 and set(rules[:2]) == set(rules[2:4]) == {"rule-0", "rule-1"}


def run(script, rounds=2, rows=3):
    generator = ScriptedGenerator(script)
    prompts = [prompt(i) for i in range(rows)]
    rules = [[PRINCIPLES[(row + number) % 5] for number in range(rounds)] for row in range(rows)]
    judge = CheckedJudge(local_judge(generator, SAMPLING))
    revisions = answer_and_revise(generator, judge, prompts, rules, jax.random.key(0), SAMPLING, first_row=40)
    return generator, prompts, rules, revisions


def test_each_round_starts_from_the_previous_revision():
    generator, prompts, rules, out = run(lambda segments, call: f"text-{call}")
    assert [(r.round, r.prompt.id) for r in out] == [(n, p.id) for n in (1, 2) for p in prompts]
    assert {(r.response, r.critique, r.revision) for r in out[:3]} == {("text-0", "text-1", "text-2")}
    assert {(r.response, r.critique, r.revision) for r in out[3:]} == {("text-2", "text-3", "text-4")}
    assert [r.principle for r in out] == [rules[row][number].name for number in range(2) for row in range(3)]
    assert all(r.complete for r in out)


def test_the_requests_to_the_model():
    """Each request has the whole transcript and the principle of its row."""
    generator, prompts, rules, _ = run(lambda segments, call: f"text-{call}")
    asked = [segments for segments, *_ in generator.calls]
    for row, p in enumerate(prompts):
        first, second = rules[row]
        start = render_prompt(p.messages)
        assert asked[0][row] == start
        criticise = [*start, "text-0", END, CRITIQUE_REQUEST, first.critique_request, CRITIQUE]
        assert asked[1][row] == criticise
        assert asked[2][row] == [*criticise, "text-1", END, REVISION_REQUEST, first.revision_request, REVISION]
        assert asked[3][row] == [*start, "text-2", END, CRITIQUE_REQUEST, second.critique_request, CRITIQUE]


def test_every_piece_has_its_own_key_and_the_global_row_numbers():
    generator, *_ = run(lambda segments, call: "text")
    keys = {jax.random.key_data(key).tobytes() for _, key, _, _ in generator.calls}
    assert len(generator.calls) == len(keys) == 5
    assert [numbers for *_, numbers in generator.calls] == [[40, 41, 42]] * 5


def test_a_revision_counts_by_its_own_completeness():
    """A whole revision counts although the first answer was cut off; after a truncated one, the next round starts from the text
    before it."""

    def script(segments, call):
        cut = {(0, "how so 0"), (2, "how so 1"), (3, "how so 2")}
        return None if any((call, word) in cut for word in segments) else f"text-{call}"

    *_, out = run(script)
    assert [r.complete for r in out[:3]] == [True, False, True]  # cut: the answer of row 0 and the first revision of row 1
    assert [r.outcome for r in out[:3]] == [None, "cut_off", None]
    assert [r.complete for r in out[3:]] == [True] * 3  # the second critique of row 2 was cut, its revision was not
    assert [r.response for r in out[3:]] == ["text-2", "text-0", "text-2"]


def test_a_plain_answer_is_one_piece():
    generator = ScriptedGenerator(lambda segments, call: "yes")
    said = answer(generator, [prompt(1)], jax.random.key(0), SAMPLING, 7)
    assert [(found.text, found.complete) for found in said] == [("yes", True)]
    assert generator.calls[0][0] == [render_prompt(prompt(1).messages)] and generator.calls[0][3] == [7]
