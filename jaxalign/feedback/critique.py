"""Critique and revision of a model's own answers, round by round (Bai et al. 2022, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxalign.data.chat.formats import render_critique, render_prompt, render_revision
from jaxalign.feedback.speaker import Speaker
from jaxalign.records import Principle, Prompt, Revision
from jaxalign.rollout.sampling import Sampling


def draw_principles(constitution: Sequence[Principle], rows: Sequence[int], count: int, seed: int, stream: int):
    """For each global row, `count` distinct principles (repeating only when the constitution has fewer), in random order.

    A pure function of (seed, stream, row), so that chunks and restarts change nothing.
    """
    drawn = []
    for row in rows:
        rng = np.random.default_rng([seed, stream, row])
        orders = [rng.permutation(len(constitution)) for _ in range(-(-count // len(constitution)))]
        drawn.append([constitution[i] for i in np.concatenate(orders)[:count]])
    return drawn


def answer(speaker: Speaker, prompts: Sequence[Prompt], key: jax.Array, sampling: Sampling, first_row: int, style="compact"):
    """One plain answer a prompt."""
    numbers = range(first_row, first_row + len(prompts))
    return speaker.say([render_prompt(p.messages, style) for p in prompts], key, sampling, numbers)


def revise(
    speaker: Speaker,
    prompts: Sequence[Prompt],
    principles: Sequence[Sequence[Principle]],
    key: jax.Array,
    sampling: Sampling,
    first_row: int,
) -> list[Revision]:
    """Answers each prompt, then criticises and revises the answer once for each of the row's principles.

    Each round starts from the revision of the round before. A row any of whose pieces was cut by the length limit is
    marked incomplete, in that round and every later one. Rows come back round by round.
    """
    piece = lambda number: jax.random.fold_in(key, number)  # noqa: E731
    numbers = range(first_row, first_row + len(prompts))
    first = answer(speaker, prompts, piece(0), sampling, first_row)
    responses, complete = [u.text for u in first], [u.ended for u in first]
    out: list[Revision] = []
    for number in range(len(principles[0])):
        rules = [row[number] for row in principles]
        asked = [render_critique(p.messages, r, rule) for p, r, rule in zip(prompts, responses, rules, strict=True)]
        critiques = speaker.say(asked, piece(2 * number + 1), sampling, numbers)
        asked = [
            render_revision(p.messages, r, rule, c.text)
            for p, r, rule, c in zip(prompts, responses, rules, critiques, strict=True)
        ]
        revisions = speaker.say(asked, piece(2 * number + 2), sampling, numbers)
        for i, prompt in enumerate(prompts):
            complete[i] = complete[i] and critiques[i].ended and revisions[i].ended
            out.append(
                Revision(prompt, number + 1, rules[i].name, responses[i], critiques[i].text, revisions[i].text, complete[i])
            )
        responses = [u.text for u in revisions]
    return out
