"""AI feedback for Python callers: `jaxalign.Judge` and `jaxalign.revise`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import FeedbackConfig, JudgeConfig
from jaxalign.config.arguments import SEED, instance_of, section_from
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import checked
from jaxalign.errors import UserError
from jaxalign.feedback import critique as rounds_of
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.constitution import Constitution
from jaxalign.feedback.judge import CritiqueRequest, Draw, JudgeInputs, Text
from jaxalign.feedback.labeller import Labeller, Pair
from jaxalign.feedback.local import LocalJudge, make_local_judge
from jaxalign.feedback.writer import choose_set
from jaxalign.models.language_model import LanguageModel
from jaxalign.records import Comparison, Exemplar, Prompt, Revision
from jaxalign.registry.custom import new_instance
from jaxalign.registry.judges import judge_record
from jaxalign.rewards.rated import Rater
from jaxalign.rollout.generation import Sampler
from jaxalign.rollout.sampling import Sampling
from jaxalign.trainers.rows import as_answered, as_prompts

_MOST_DRAWN = 1000
"""The maximum number of principles that a call draws for a response."""


class Judge:
    """AI feedback under a constitution.

        judge = Judge(load_model("FOLDER"), ["Be brief.", "Be kind."], reasoning=False)
        judge.compare(["Hello"], ["Hi."], ["Good day to you, dear reader."])[0].label    # P(the first is better)

    With any judge, principles are drawn for each row, the labels of both orders of a pair are averaged, and undecided labels
    are 0.5.

    A judge of the user's own is called on the first process only, unless it is a `JudgeRecord` with `on_devices`.

    Args:
      judge: a language model; an object with some of the methods of `jaxalign.feedback.judge.JudgeProtocol`; or the name of a
        registered judge, "package.module:name" or "FILE.py:name".
      constitution: a `Constitution`, or an argument from which to construct one.
      temperature, max_new_tokens: sampling settings of a language model's critiques and revisions.
      batch: the maximum number of rows that a language model processes together.
      seed: seeds the drawn principles and all samples.
      retries, max_failed_share: fields of the config section `judge`, for a judge of the user's own.
      fields: fields of the config section `feedback`, such as reasoning, principles_per_comparison and undecided_margin.

    Raises:
      UserError: an argument has the wrong type, or is not a field of the section.
    """

    def __init__(
        self, judge: Any, constitution: Any = "default", *, temperature: float = 0.7, max_new_tokens: int = 60, batch: int = 32,
        seed: int = 0, retries: int = 2, max_failed_share: float = 0.05, **fields: Any,
    ):
        settings = section_from(FeedbackConfig(), fields, "Judge")
        if settings.reasoning is None:
            usual = not isinstance(judge, LanguageModel) or choose_set(settings.templates, judge.tokenizer).layout == "markers"
            settings = dataclasses.replace(settings, reasoning=usual)
        self.settings = settings
        self.constitution = constitution if isinstance(constitution, Constitution) else Constitution(constitution)
        seed = checked(seed, int, "Judge(seed)", SEED)
        self._seed, self._key = seed, jax.random.key(seed)
        sampling, batch = Sampling(max_new_tokens, (), temperature), checked(batch, int, "Judge(batch)", at_least(1))
        calls = section_from(JudgeConfig(), {"retries": retries, "max_failed_share": max_failed_share}, "Judge")
        on_all_processes = isinstance(judge, LanguageModel)
        if isinstance(judge, LanguageModel):
            judge = _local(judge, self.settings, self.constitution.exemplars, sampling, batch)
        elif isinstance(judge, str):
            record = judge_record(judge, "Judge(judge)")
            if record.runs_base:
                raise UserError(f"Judge(judge) is {judge!r}, which needs the base model of a pipeline run; pass a language "
                                "model from load_model")
            judge, on_all_processes = record.load()(JudgeInputs(None, None, None, batch)), record.on_devices
        elif isinstance(judge, type):
            judge = new_instance(judge, f"the judge {judge.__name__}", "give an instance")
        self.judge = CheckedJudge(judge, settings=calls, on_all_processes=on_all_processes, in_run=False)

    def compare(self, prompts: Any, first: Sequence[str], second: Sequence[str]) -> list[Comparison]:
        """Compares two responses to each prompt.

        Args:
          prompts: B texts, dialogues or `Prompt`s.
          first, second: B texts each.

        Returns:
          B comparisons; `label` is the probability that the first response is better.
        """
        asked, (first, second) = as_answered(prompts, "Judge.compare", first=first, second=second)
        pairs = [Pair(*row) for row in zip(asked, first, second, strict=True)]
        labeller = Labeller(self.judge, self.constitution, self.settings, self._seed)
        return labeller.label(pairs, jax.random.fold_in(self._key, 1), 0, self.settings.invert)

    def rate(self, prompts: Any, responses: Sequence[str], principles: int = 1) -> np.ndarray:
        """Rates one response to each prompt.

        Args:
          prompts: B texts, dialogues or `Prompt`s.
          responses: B texts.
          principles: the number of principles drawn for each response; their ratings are averaged.

        Returns:
          float32 [B], from 1 to 10; NaN for a response without a rating.
        """
        asked, (responses,) = as_answered(prompts, "Judge.rate", responses=responses)
        principles = checked(principles, int, "Judge.rate(principles)", between(1, _MOST_DRAWN))
        rater = Rater(self.judge, self.constitution, principles, self._seed)
        return rater.rate(asked, responses, jax.random.fold_in(self._key, 2), 0)

    def critique(self, prompts: Any, responses: Sequence[str]) -> list[str]:
        """Critiques one response to each prompt under a drawn principle. Returns B texts."""
        asked, (responses,) = as_answered(prompts, "Judge.critique", responses=responses)
        stream = streams.PRINCIPLES["revise"]
        rules = rounds_of.draw_principles(self.constitution, range(len(asked)), 1, self._seed, stream)
        requests = [CritiqueRequest(p.messages, r, rule) for p, r, (rule,) in zip(asked, responses, rules, strict=True)]
        draw = Draw(jax.random.fold_in(self._key, 3), range(len(asked)))
        with self.judge.loaded() as judge:
            return [critique.text for critique in judge.critique(requests, draw)]

    def revise(self, prompts: Any, responses: Sequence[str], rounds: int = 1) -> list[Revision]:
        """Critiques and revises one response to each prompt. Returns the revisions of round 1, then of round 2, and so on."""
        asked, (responses,) = as_answered(prompts, "Judge.revise", responses=responses)
        rounds = checked(rounds, int, "Judge.revise(rounds)", between(1, _MOST_DRAWN))
        return self._revise(asked, [Text(text) for text in responses], rounds)

    def _revise(self, prompts: Sequence[Prompt], responses: Sequence[Text], rounds: int) -> list[Revision]:
        rows, stream = range(len(prompts)), streams.PRINCIPLES["revise"]
        rules = rounds_of.draw_principles(self.constitution, rows, rounds, self._seed, stream)
        return rounds_of.revise(self.judge, prompts, responses, rules, self._key, 0)


def revise(
    model: LanguageModel, prompts: Any, constitution: Any = "default", *, rounds: int = 1, judge: Any = None,
    temperature: float = 0.7, max_new_tokens: int = 60, batch: int = 32, seed: int = 0,
) -> list[Revision]:
    """Answers prompts, then critiques and revises the answers (Bai et al. 2022, section 3).

    Args:
      model: answers the prompts, and critiques and revises unless there is a judge.
      prompts: B texts, dialogues or `Prompt`s.
      constitution: a `Constitution`, or an argument from which to construct one.
      rounds: the number of critiques and revisions of each answer, each under a different principle.
      judge: a `Judge`, or an argument from which to construct one; None for the model itself.
      temperature, max_new_tokens, batch, seed: sampling settings of the model.

    Returns:
      rounds * B revisions: round 1 in the order of the prompts, then round 2, and so on.
    """
    asked = as_prompts(prompts, "revise(prompts)")
    instance_of(model, LanguageModel, "revise(model)", "a language model from load_model")
    rounds = checked(rounds, int, "revise(rounds)", between(1, _MOST_DRAWN))
    if not isinstance(judge, Judge):
        options = {"temperature": temperature, "max_new_tokens": max_new_tokens, "batch": batch, "seed": seed}
        try:
            judge = Judge(model if judge is None else judge, constitution, **options)
        except UserError as error:
            argument = "model" if judge is None else "judge"
            call = f"call revise with judge=Judge({argument}, constitution, templates='transcript')"
            raise UserError(str(error).replace("set Judge(templates) to 'transcript'", call)) from None
    samples = Sampler(model, temperature=temperature, batch=batch, seed=seed).generate(asked, max_new_tokens)
    return judge._revise(asked, [Text(sample.text, sample.ended) for sample in samples], rounds)


def _local(
    model: LanguageModel, settings: FeedbackConfig, exemplars: Sequence[Exemplar], sampling: Sampling, batch: int
) -> LocalJudge:
    """A local judge that uses a language model. Raises UserError if the template set does not suit its tokenizer."""
    parts = model.model.sharding.generation.batch_size
    try:
        judge = make_local_judge(
            model.model, model.weights, model.tokenizer, settings, model.max_length, -(-batch // parts) * parts, exemplars,
            sampling,
        )
        judge.writer.check(tuple(judge.writer.templates.sources), settings.reasoning)
    except UserError as error:  # The code of the stages names config fields.
        length = "judge.max_length, or model.max_length if the run's own model judges"
        named = str(error).replace(length, "load_model(max_length)")
        named = named.replace("set config.data.style to 'hh'", "set feedback.templates to 'transcript'")
        raise UserError(re.sub(r"\b(?:config\.)?feedback\.(\w+)", r"Judge(\1)", named)) from None
    return judge
