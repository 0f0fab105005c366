"""Critiques and revises a model's responses, round by round, with any judge (Bai et al. 2022, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxalign.data.chat.encoding import encode_prompt
from jaxalign.data.chat.formats import render_prompt
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.judge import CritiqueRequest, Draw, RevisionRequest, Text
from jaxalign.feedback.speaker import Speaker, Utterance
from jaxalign.records import Principle, Prompt, Revision
from jaxalign.rollout.sampling import Sampling

Drawn = list[list[Principle]]


def draw_principles(
    constitution: Sequence[Principle], rows: Sequence[int], count: int, seed: int, stream: int
) -> Drawn:
    """For each global row, `count` distinct principles in random order; they repeat only if the constitution has fewer.

    The result depends only on (seed, stream, row), so chunks and restarts do not change it.
    """
    drawn = []
    for row in rows:
        rng = np.random.default_rng([seed, stream, row])
        orders = [rng.permutation(len(constitution)) for _ in range(-(-count // len(constitution)))]
        drawn.append([constitution[i] for i in np.concatenate(orders)[:count]])
    return drawn


def answer(
    speaker: Speaker, prompts: Sequence[Prompt], key: jax.Array, sampling: Sampling, first_row: int, style: str = "compact"
) -> list[Utterance]:
    """Samples one response to each prompt, encoded in `style`. Prompt i has the global row first_row + i."""
    numbers = range(first_row, first_row + len(prompts))
    if style == "chat":
        ids = [encode_prompt(speaker.tokenizer, p.messages) for p in prompts]
        return speaker.say_ids(ids, key, sampling, numbers)
    return speaker.say([render_prompt(p.messages, style) for p in prompts], key, sampling, numbers)


def revise(
    judge: CheckedJudge,
    prompts: Sequence[Prompt],
    responses: Sequence[Text],
    principles: Sequence[Sequence[Principle]],
    key: jax.Array,
    first_row: int,
) -> list[Revision]:
    """Critiques and revises each response once under each of its row's principles.

    Each round starts from the previous round's revision. Once the length limit has cut off one of a row's texts, the row is
    incomplete in that round and all later ones.

    Args:
      judge: writes the critiques and revisions.
      prompts: B prompts, whose global rows are first_row + i.
      responses: the B responses to start from.
      principles: B lists with one principle per round.
      key: a PRNG key. Round n folds in 2n - 1 and 2n; 0 is reserved for the caller's responses.

    Returns:
      The revisions of the first round in the order of the prompts, then those of the second round, and so on.
    """
    numbers = range(first_row, first_row + len(prompts))
    texts, complete = [found.text for found in responses], [found.complete for found in responses]
    out: list[Revision] = []
    with judge.loaded() as judge:
        for number in range(len(principles[0]) if principles else 0):
            rules = [row[number] for row in principles]
            asked = [CritiqueRequest(p.messages, text, rule) for p, text, rule in zip(prompts, texts, rules, strict=True)]
            critiques = judge.critique(asked, Draw(jax.random.fold_in(key, 2 * number + 1), numbers))
            better = [RevisionRequest(*request, found.text) for request, found in zip(asked, critiques, strict=True)]
            revisions = judge.revise(better, Draw(jax.random.fold_in(key, 2 * number + 2), numbers))
            for i, prompt in enumerate(prompts):
                complete[i] = complete[i] and critiques[i].complete and revisions[i].complete
                texts_of = (texts[i], critiques[i].text, revisions[i].text)
                out.append(Revision(prompt, number + 1, rules[i].name, *texts_of, complete[i]))
            texts = [found.text for found in revisions]
    return out


def answer_and_revise(
    speaker: Speaker,
    judge: CheckedJudge,
    prompts: Sequence[Prompt],
    principles: Sequence[Sequence[Principle]],
    key: jax.Array,
    sampling: Sampling,
    first_row: int,
    style: str = "compact",
) -> list[Revision]:
    """Samples responses, with 0 folded into the key, and passes them to `revise`."""
    found = answer(speaker, prompts, jax.random.fold_in(key, 0), sampling, first_row, style)
    return revise(judge, prompts, [Text(u.text, u.ended) for u in found], principles, key, first_row)
