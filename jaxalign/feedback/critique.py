"""Critiques and revises a model's responses, round by round, with any judge (Bai et al. 2022, section 3).

Answers and revisions have an outcome, one of the names in `jaxalign.reasons.REVISION`, which says whether they can be trained
on.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxalign.data.chat.styles import encode_prompt, finish_answer
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.judge import CritiqueRequest, Draw, RevisionRequest, Text
from jaxalign.feedback.text_generator import TextGenerator
from jaxalign.records import Principle, Prompt, Revision
from jaxalign.rollout.sampling import Sampling


def draw_principles(
    constitution: Sequence[Principle], rows: Sequence[int], count: int, seed: int, stream: int
) -> list[list[Principle]]:
    """For each global row, `count` distinct principles in random order; they repeat only if the constitution has fewer.

    The result depends only on (seed, stream, row), so chunks and restarts do not change it.
    """
    drawn = []
    for row in rows:
        rng = np.random.default_rng([seed, stream, row])
        orders = [rng.permutation(len(constitution)) for _ in range(-(-count // len(constitution)))]
        drawn.append([constitution[i] for i in np.concatenate(orders)[:count]])
    return drawn


STARTS = (None, "unchanged", "grown")
"""The outcomes after which the next round starts from the revision; after the others, it starts from the previous text."""


def answer_outcome(text: str, complete: bool) -> str | None:
    """The outcome of a policy's answer."""
    return "cut_off" if not complete else "empty" if not text.strip() else None


def revision_outcome(response: str, critique: Text, revision: Text | None, max_growth: float) -> str | None:
    """The outcome of a revision; None if it is an ordinary one.

    Args:
      response: the answer that was revised.
      critique: its critique.
      revision: the revision; None if it was not requested, because the critique has a problem.
      max_growth: the largest ratio of the lengths in characters; 0: no limit.
    """
    if revision is None:
        return critique.problem
    if revision.problem is not None:
        return revision.problem
    outcome = answer_outcome(revision.text, revision.complete)
    if outcome is not None:
        return outcome
    if critique.problem == "refused":
        return "critique_refused"
    # Case and the number of spaces do not count.
    if revision.text.lower().split() == response.lower().split():
        return "unchanged"
    return "grown" if max_growth and len(revision.text) > max_growth * max(1, len(response)) else None


def is_usable(outcome: str | None, keep: Sequence[str]) -> bool:
    """Whether a row with this outcome is trained on. keep: `sft.keep`."""
    return outcome is None or outcome in keep


def count_outcomes(outcomes: Iterable[str | None]) -> dict[str, int]:
    """The number of rows by outcome, without ordinary rows, the most frequent first."""
    return dict(collections.Counter(outcome for outcome in outcomes if outcome is not None).most_common())


class PolicyAnswer(NamedTuple):
    """A policy's answer.

    reasoning: its thoughts, if it is a reasoning model. notes: names in `reasons.NOTES`. sampled: whether there is an answer,
    which needs space after the prompt and finite logits. mean_logprob: the mean log-probability of its tokens, nats.
    """

    text: str
    complete: bool
    reasoning: str | None = None
    notes: tuple[str, ...] = ()
    sampled: bool = True
    mean_logprob: float = 0.0


def answer(
    generator: TextGenerator, prompts: Sequence[Prompt], key: jax.Array, sampling: Sampling, first_row: int,
    style: str = "compact",
) -> list[PolicyAnswer]:
    """Samples one response to each prompt, encoded in `style`. Prompt i has the global row first_row + i."""
    row_ids = range(first_row, first_row + len(prompts))
    ids = [encode_prompt(generator.tokenizer, prompt.messages, style) for prompt in prompts]
    answers = []
    for completion in generator.generate(ids, key, sampling, row_ids):
        text, ended, reasoning = finish_answer(completion.text, completion.ended, style)
        notes = ("next_turn",) if ended and not completion.ended else ()
        mean = completion.logprob / max(1, len(completion.ids))
        answers.append(PolicyAnswer(text, ended, reasoning, notes, bool(completion.ids), mean))
    return answers


def revise(
    judge: CheckedJudge,
    prompts: Sequence[Prompt],
    responses: Sequence[PolicyAnswer],
    principles: Sequence[Sequence[Principle]],
    key: jax.Array,
    first_row: int,
    max_growth: float = 0.0,
) -> list[Revision]:
    """Critiques and revises each response once under each of its row's principles.

    Each round starts from the previous round's revision if its outcome is in `STARTS`, else from the text before it.

    Args:
      judge: writes the critiques and revisions.
      prompts: B prompts, whose global rows are first_row + i.
      responses: the B responses to start from.
      principles: B lists with one principle per round.
      key: a PRNG key. Round n folds in 2n - 1 and 2n; 0 is reserved for the caller's responses.
      max_growth: see `revision_outcome`.

    Returns:
      The revisions of the first round in the order of the prompts, then those of the second round, and so on.
    """
    rows, texts = range(first_row, first_row + len(prompts)), [response.text for response in responses]
    out: list[Revision] = []
    with judge.loaded() as judge:
        for number in range(len(principles[0]) if principles else 0):
            rules = [row[number] for row in principles]
            asked = [CritiqueRequest(p.messages, text, rule) for p, text, rule in zip(prompts, texts, rules, strict=True)]
            critiques = judge.critique(asked, Draw(jax.random.fold_in(key, 2 * number + 1), rows))
            left = [i for i, critique in enumerate(critiques) if critique.problem in (None, "refused")]
            better = [RevisionRequest(*asked[i], critiques[i].text) for i in left]
            draw = Draw(jax.random.fold_in(key, 2 * number + 2), [rows[i] for i in left])
            revisions = dict(zip(left, judge.revise(better, draw), strict=True))
            for i, prompt in enumerate(prompts):
                revision = _revision(prompt, number + 1, rules[i].name, texts[i], critiques[i], revisions.get(i), max_growth)
                out.append(revision)
                texts[i] = revision.revision if revision.outcome in STARTS else texts[i]
    return out


def _revision(
    prompt: Prompt, number: int, principle: str, response: str, critique: Text, revision: Text | None, max_growth: float
) -> Revision:
    outcome = revision_outcome(response, critique, revision, max_growth)
    revision = Text("", False) if revision is None else revision
    texts = (response, critique.text, revision.text)
    notes = tuple(dict.fromkeys((*critique.notes, *revision.notes)))
    return Revision(prompt, number, principle, *texts, revision.complete, outcome, notes, revision.reasoning)


def answer_and_revise(
    generator: TextGenerator,
    judge: CheckedJudge,
    prompts: Sequence[Prompt],
    principles: Sequence[Sequence[Principle]],
    key: jax.Array,
    sampling: Sampling,
    first_row: int,
    style: str = "compact",
    max_growth: float = 0.0,
) -> list[Revision]:
    """Samples responses, with 0 folded into the key, and passes them to `revise`."""
    answers = answer(generator, prompts, jax.random.fold_in(key, 0), sampling, first_row, style)
    return revise(judge, prompts, answers, principles, key, first_row, max_growth)
