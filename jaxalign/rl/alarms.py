"""Measures a policy's answers to held-out helpful prompts during RL, and ends RL when an alarm requires it."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxalign.algorithms.texts import repeated_share
from jaxalign.config import AlarmsConfig
from jaxalign.data.chat import styles
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Params
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import Prompt, Rollout
from jaxalign.rl.iteration import Iteration
from jaxalign.rl.state import PPOState, without_value_head
from jaxalign.rollout.sampler import sample_rollout
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps import work
from jaxalign.tracking.alarms import Measurement, Outcome, outcome, read_measurements

_CANNOT = r"(?:can(?:not|['’]t| not)|won['’]t|will not|must decline|am (?:unable|not able)|don['’]t feel comfortable)"
_I_CANNOT = rf"i(?: {_CANNOT}|['’]m (?:unable|not able|not comfortable|not going))"
REFUSALS = (
    r"(?:(?:i['’]m|i am) (?:\w+ )?sorry|sorry|i apologi[sz]e|my apologies|apologies|unfortunately)\W+(?:but )?"
    rf"(?:{_I_CANNOT}|as an ai)",
    r"i (?:can(?:not|['’]t| not)|won['’]t|will not|am (?:unable|not able) to|['’]m (?:unable|not able) to) "
    r"(?:\w+ )?(?:assist|help|provide|comply|fulfil|fulfill|answer|do that|create|write|generate|discuss|engage|support|offer|"
    r"give|share|respond|participate)",
    r"i['’]m (?:unable|not able|not comfortable|not going) ",
    r"i must (?:decline|refuse)",
    rf"as an ai(?: \w+)*,? {_I_CANNOT}",
)
"""Regular expressions of the beginning of a refusal by an English chat model, in any case."""


@dataclasses.dataclass(frozen=True)
class Questions:
    """The held-out helpful prompts and how they are answered: the same rows and the same key for every policy.

    Attributes:
      prompts: the prompts.
      ids: the token ids of each.
      sampling: the sampling settings.
      key: the PRNG key of the samples.
      style: the text format of dialogues.
    """

    prompts: Sequence[Prompt]
    ids: Sequence[Sequence[int]]
    sampling: Sampling
    key: jax.Array
    style: str


@dataclasses.dataclass(frozen=True)
class Records:
    """What a resumed run reads back.

    Attributes:
      rows: `rows() -> the rows of the metric file`.
      save_answers: `save_answers(iteration, answers)`: saves the measured answers.
      first_answers: `first_answers() -> the texts of the answers of the policy before RL`, as saved.
      save_policy: `save_policy(iteration, trained parameters)`: saves the best policy so far.
    """

    rows: Callable[[], Sequence[Mapping[str, Any]]]
    save_answers: Callable[[int, Sequence[Mapping[str, Any]]], None]
    first_answers: Callable[[], Sequence[str]]
    save_policy: Callable[[int, Params], None]


WinRate = Callable[[Sequence[Prompt], Sequence[str], Sequence[str]], float]
"""`(prompts, answers, answers of the policy before RL) -> the win rate of the answers`."""


class AlarmRun:
    """The alarms of one RL run.

    Measurements depend only on the policy and on fixed keys, and the decisions only on the measurements, which a resumed run
    reads from the metric file. A run that is interrupted and resumed therefore measures and decides the same.

    Args:
      section: `config.ppo.alarms`, with `every` above 0.
      questions: the prompts.
      records: the files of the run.
      iterations: the number of iterations of the run.
      win_rate: asks the judge; None without one.
      title: the name of the stage in messages.
    """

    def __init__(
        self, section: AlarmsConfig, questions: Questions, records: Records, iterations: int, win_rate: WinRate | None = None,
        title: str = "ppo",
    ):
        self.section, self._questions, self._records, self._iterations = section, questions, records, iterations
        self._win_rate, self._measured, self._title = win_rate, None, title
        self._refusals = tuple(re.compile(pattern, re.IGNORECASE) for pattern in section.refusals or REFUSALS)

    @property
    def outcome(self) -> Outcome:
        """The alarms that have fired, and the best policy."""
        return outcome(self.section, self._measured)

    def ended(self, completed: int) -> bool:
        """Whether an alarm ends RL after `completed` iterations."""
        if self._measured is None:  # The first call of a resumed run; rows of later iterations will be computed again.
            rows = self._records.rows() if completed else ()
            self._measured = read_measurements(row for row in rows if row["step"] < completed)
        return bool(self.section.action != "warn" and self._measured and self.outcome.fired)

    def settle(self) -> None:
        """Raises UserError if an alarm stops the run. Call it after the last iteration, whose checkpoint is then saved."""
        self.ended(self._iterations)  # Reads the measurements if no step has run.
        fired = self.outcome.fired
        if fired and self.section.action == "stop":
            raise UserError(f"{self._title}: {' '.join(one.sentence() for one in fired)} The run ends because "
                            "config.ppo.alarms.action is 'stop'; raise kl_coef or lower the learning rate, or set "
                            "the action to 'best', and start the stage again with --overwrite")

    def step(self, iteration: Iteration, state: PPOState, number: int) -> tuple[PPOState, dict[str, Any]]:
        """Runs iteration `number`: (state, metrics with those of the measurements, if any). The state is donated."""
        metrics: dict[str, Any] = {}
        if number == 0:
            metrics |= self._measure(iteration, state, 0)
        state, metrics["iteration"] = iteration(state, number)
        done = number + 1
        if done % self.section.every == 0 or done == self._iterations:
            metrics |= self._measure(iteration, state, done)
        return state, metrics

    def _measure(self, iteration: Iteration, state: PPOState, done: int) -> dict[str, float]:
        """Measures the policy after `done` iterations, saves it if it is the best one, and reports alarms."""
        measured = Measurement(done, self._values(iteration, state, done))
        known = set() if not self._measured else {fired.alarm for fired in self.outcome.fired}
        self._measured = [*(self._measured or ()), measured]
        outcome = self.outcome
        if self.section.action == "best" and outcome.best == done:
            self._records.save_policy(done, without_value_head(state.policy.params))
        for fired in outcome.fired:
            if fired.alarm not in known:
                logging.getLogger("jaxalign").warning(f"{self._title}: alarm '{fired.alarm}': {fired.sentence()}")
        return measured.metrics()

    def _values(self, iteration: Iteration, state: PPOState, done: int) -> dict[str, float]:
        asked, params = self._questions, join(iteration.frozen, state.policy.params)
        with iteration.timeline.phase("alarms") as phase:
            iteration.update_sampler(params, done)
            rows = range(len(asked.ids))
            rollout = sample_rollout(iteration.sampler, iteration.padding, asked.ids, asked.key, rows, asked.sampling)
            rollout = dataclasses.replace(rollout, versions=None)
            phase.tokens, phase.flops = work.sampled(iteration.setup.reference, rollout)
            scores = self._scores(iteration, rollout)
            answers = styles.answers_of(iteration.tokenizer, rollout, asked.style)[: len(asked.ids)]
            texts = [text for text, _ in answers]
            scored = scores[~np.isnan(scores)]
            values = {"score": float(scored.mean()) if len(scored) else float("nan")} | self.measures(rollout, answers)
            self._records.save_answers(done, [
                {"prompt_id": prompt.id, "messages": [dataclasses.asdict(message) for message in prompt.messages],
                 "response": text, "complete": bool(ended), "score": None if np.isnan(score) else float(score)}
                for prompt, (text, ended), score in zip(asked.prompts, answers, scores, strict=True)
            ])
            if self._win_rate is not None and done:
                values["win_rate"] = self._win_rate(asked.prompts, texts, self._records.first_answers())
        return values

    def measures(self, rollout: Rollout, answers: Sequence[tuple[str, bool]]) -> dict[str, float]:
        """The measures of answers that need no model. rollout: numpy; answers: (text, whether it ended) of its first rows."""
        ids = []  # The tokens of each response, including the stop token.
        for row in range(len(answers)):
            begin = int(rollout.prompt_length[row])
            ids.append(rollout.tokens[row, begin : begin + int(rollout.response_length[row])].tolist())
        return {
            "repetition": float(np.mean([repeated_share(row) for row in ids])),
            "length": float(np.mean([len(row) for row in ids])),
            "unfinished": float(np.mean([not ended for _, ended in answers])),
            "refused": float(np.mean([self.is_refusal(text) for text, _ in answers])),
        }

    def is_refusal(self, text: str) -> bool:
        """Whether a text begins like a refusal."""
        return any(pattern.match(text.lstrip(" \n\t*\"")) for pattern in self._refusals)

    def _scores(self, iteration: Iteration, rollout: Rollout) -> np.ndarray:
        """float64 [B]: the reward's score of each answer; NaN where it has none."""
        prompts, batch, scores_of_parts = self._questions.prompts, iteration.padding.batch, []
        for begin in range(0, len(prompts), batch):
            own = prompts[begin : begin + batch]
            part = place_rows(iteration.setup.policy.sharding, rollout.part(begin, batch))
            scored = iteration.reward.score(iteration.reward_batch(part, own, begin))
            scores = np.asarray(fetch(scored.scores), np.float64)[: len(own)]
            scores = scores if scores.ndim == 1 else scores.sum(axis=1)
            kept = None if scored.kept is None else np.asarray(fetch(scored.kept), bool)[: len(own)]
            scores_of_parts.append(scores if kept is None else np.where(kept, scores, np.nan))
        return np.concatenate(scores_of_parts)
