"""Trains preference (reward) models, single or in an ensemble, with the Bradley-Terry loss on labelled pairs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxalign import streams
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.config import PreferenceConfig
from jaxalign.config.arguments import as_path, make_folder
from jaxalign.config.constraints import at_least
from jaxalign.config.schema import checked
from jaxalign.data.loader import EpochLoader, InOrder
from jaxalign.data.sources.base import split_by_prompt
from jaxalign.data.windows import WindowedRows
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Params
from jaxalign.parallel import hosts
from jaxalign.records import Comparison, PairBatch
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.scorer import Scorer, normalised, stack_members
from jaxalign.steps.loop import Step
from jaxalign.steps.offload import FrozenRole
from jaxalign.steps.state import TrainState
from jaxalign.tracking.tracker import Tracker
from jaxalign.trainers.base import Trainer
from jaxalign.trainers.extent import warn_of_same_rows
from jaxalign.trainers.inputs import TrainerInputs, model_inputs, named_arguments, settings_from
from jaxalign.trainers.preference_member import MemberRows, PreferenceMember, make_ensemble, with_random_head
from jaxalign.trainers.preference_quality import held_out_metrics
from jaxalign.trainers.rows import as_answered, as_pair, as_pairs
from jaxalign.trainers.scoring import EncodedPair, PairBuilder, all_scores, encode_pair, pair_arrays
from jaxalign.trainers.windows import GivenRows, closing

_STAGE_FIELDS = ("human", "human_weight", "on_failure")
"""Fields of the section that `RewardModel` does not read."""


class RewardModel(Trainer):
    """Trains a preference model on pairs of answers, and scores answers with it.

        reward = RewardModel(load_model("FOLDER"), epochs=1)
        for step in reward.fit([{"prompt": "Name a colour.", "chosen": "Red.", "rejected": "Seven."}]):
            print(step.metrics["accuracy"])
        print(reward.score(["Name a colour."], ["Blue."]))

    Args:
      model: the language model that provides the trunk under the scalar head; it is not changed.
      directory: for metrics, checkpoints and exact resume; None keeps everything in memory.
      seed: seeds the head and the order of the pairs.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.
      fields: fields of the config section `preference`, such as epochs, batch, members, early_stopping and optimizer.

    Raises:
      UserError: an argument is not a field of the section, has a value that the section does not accept, or is read only by
        stage preference.
    """

    name = "RewardModel"

    def __init__(
        self,
        model: LanguageModel,
        *,
        directory: str | Path | None = None,
        seed: int = 0,
        trackers: Mapping[str, Tracker] | Sequence[Tracker] = (),
        progress: bool = False,
        **fields: Any,
    ):
        section = settings_from(PreferenceConfig(), fields, self.name, model)
        for name in _STAGE_FIELDS:
            if getattr(section, name) != getattr(PreferenceConfig(), name):
                raise UserError(f"RewardModel({name}) is {getattr(section, name)!r}, but only stage preference reads it; leave "
                                "it out, and give the pairs of several sources to fit with a \"weight\" in each row")
        options = {"directory": directory, "seed": seed, "trackers": trackers, "progress": progress}
        inputs = model_inputs(model, section, self.name, **options)
        members = [inputs] * section.members
        if inputs.loop.directory is not None:  # The loop of each member writes to a directory of its own.
            directories = [member_directory(inputs.loop.directory, number) for number in range(section.members)]
            loops = [dataclasses.replace(inputs.loop, directory=path) for path in directories]
            members = [dataclasses.replace(inputs, loop=loop) for loop in loops]
        self._set_members(members, section)

    @classmethod
    def from_inputs(cls, inputs: Sequence[TrainerInputs], section: PreferenceConfig) -> Self:
        """A trainer whose weights are read while its programs compile.

        Args:
          inputs: those of each member of the ensemble, with the policy's model and weights.
          section: a valid config section.
        """
        trainer = cls.__new__(cls)
        trainer._set_members(inputs, section)
        return trainer

    def _set_members(self, inputs: Sequence[TrainerInputs], section: PreferenceConfig) -> None:
        super().__init__(inputs[0], section)
        self.members = [PreferenceMember(with_random_head(one, number), section) for number, one in enumerate(inputs)]
        self._current, self._raw_scorer, self.ensemble_summary = self.members[0], None, {}
        self._held_out_pairs: PairBatch | None = None

    @named_arguments
    def fit(
        self, pairs: Any, held_out: Any = None, *, eval_every: int = 0, patience: int | None = None, window: int = 0
    ) -> Iterator[Step]:
        """Trains on pairs of answers and yields each step. The members of an ensemble train one after another.

        Args:
          pairs: a list of {"prompt", "chosen", "rejected"} with optional "label" (the probability that chosen is better,
            default 1), "margin" and "weight" (of the pair's loss, default 1); or a mapping of columns. Prompts are texts or
            messages.
          held_out: pairs in the same form on which each member is measured, as "held_out_loss" and "held_out_accuracy". None:
            with early_stopping, `held_out_share` of the dialogues of `pairs`; otherwise no pairs. If they choose the weights,
            measure the accuracy on other pairs.
          eval_every: steps between these measurements, besides the one after the last step; 0: as in the argument eval_every
            of `RewardModel`.
          patience: stop after this many consecutive measurements without a lower loss, and keep the weights with the lowest;
            None: as in the arguments early_stopping and patience of `RewardModel`.
          window: 0 encodes all pairs before the first step. N reads and encodes them in windows of at most N pairs, so that
            pairs such as those of `read_rows` need not fit in memory; a malformed row raises when its window is read. The
            scores are then normalised on the first window, and early_stopping needs `held_out`.

        Raises:
          UserError: there are no rows, a row is malformed, or without a window no label prefers an answer.
        """
        if checked(window, int, "RewardModel.fit(window)", at_least(0)):
            return self._fit_windows(pairs, held_out, eval_every, patience, window)
        section, seed, measured = self.section, self.inputs.seed, None
        train = as_pairs(pairs, "RewardModel.fit(pairs)")
        if not any(pair.weight and abs(pair.label - 0.5) > 1e-6 for pair in train):
            raise UserError("RewardModel.fit(pairs): no pair with a weight above 0 has a label that prefers an answer, so "
                            "there is nothing to learn; give some pairs a label other than 0.5")
        if held_out is not None:
            kept = as_pairs(held_out, "RewardModel.fit(held_out)")
            warn_of_same_rows("RewardModel.fit", train, kept)
            measured = self._arrays(kept)
        elif section.early_stopping:
            train, chosen_by = split_by_prompt(
                train, section.held_out_share, seed, where="RewardModel.fit(pairs)", field="RewardModel(held_out_share)"
            )
            measured = self._arrays(chosen_by)
        arrays = self._arrays(train)
        self.cut = arrays.cut
        first = streams.LOADERS["preference"]
        loaders = [EpochLoader(len(arrays.label), section.batch, seed, first + number) for number in range(section.members)]
        for member in self.members:
            member.evaluates(measured, eval_every, patience, loaders[0].steps(1))
        self._held_out_pairs = measured
        self._claim(arrays if measured is None else (arrays, measured), eval_every=eval_every, patience=patience)
        return self.fit_arrays(arrays, loaders)

    def _fit_windows(
        self, pairs: Any, held_out: Any, eval_every: int, patience: int | None, window: int
    ) -> Iterator[Step]:
        """`fit` with windows of rows."""
        section, style, measured = self.section, self.inputs.language_model.style, None
        if held_out is not None:
            measured = self._arrays(as_pairs(held_out, "RewardModel.fit(held_out)"))
        elif section.early_stopping:
            raise UserError(f"RewardModel.fit(window) is {window} and early_stopping is True, but no pairs measure the loss; "
                            "give the argument held_out, or set early_stopping to False")

        def encode(row: Any, where: str) -> EncodedPair:
            return encode_pair(self.tokenizer, as_pair(row, where), style)

        builder = PairBuilder(section.max_length, section.margin_weight)
        given = GivenRows(self, "pairs", pairs, window, encode, builder, "max_length")
        data = given.identity if measured is None else (given.identity, measured)
        self._claim(data, eval_every=eval_every, patience=patience, window=window)
        directories, stream = [member.inputs.loop.directory for member in self.members], streams.LOADERS["preference"]
        first = given.open(stream, directories[0])
        for member in self.members:
            member.evaluates(measured, eval_every, patience, first.steps(1, section.batch))
        self._held_out_pairs = measured
        return self.fit_windows(
            lambda number: given.open(stream + number, directories[number], counts=False) if number else first,
            first.first().arrays,
        )

    def measure_held_out(self) -> dict[str, float]:
        """held_out_loss and held_out_accuracy of the trained model, or of the whole ensemble, by its raw scores.

        Raises:
          UserError: `fit` was given no held-out pairs, or training has not ended.
        """
        scorer, pairs = self.raw_scorer, self._held_out_pairs
        if pairs is None:
            raise UserError("RewardModel has no held-out pairs to measure; give RewardModel.fit the argument held_out")
        return held_out_metrics(all_scores(*scorer, pairs, self.section.batch), pairs)

    def fit_arrays(
        self, train: PairBatch, loaders: Sequence[EpochLoader], choosing: PairBatch | None = None,
        samples: PairBatch | None = None, held_out: PairBatch | None = None,
    ) -> Iterator[Step]:
        """Trains the members one after another, measures the normalisation, and yields each step.

        Args:
          train: the pairs, numpy arrays.
          loaders: select the pairs of each batch, for each member.
          choosing: the pairs on which early stopping measures the loss; not read without early stopping.
          samples: the pairs on whose answers the normalisation is measured; None for `train`.
          held_out: the pairs on which `ensemble_summary` measures an ensemble; None for no summary.
        """

        def member_rows(number: int) -> MemberRows:
            loader = loaders[number]
            steps = self.section.steps or loader.steps(self.section.epochs)
            return MemberRows(train, loader, steps, loader.steps(1))

        return self._fit(member_rows, choosing, train if samples is None else samples, held_out)

    def fit_windows(
        self, rows: Callable[[int], WindowedRows], samples: PairBatch, choosing: PairBatch | None = None,
        held_out: PairBatch | None = None,
    ) -> Iterator[Step]:
        """Trains the members on pairs in windows, measures the normalisation, and yields each step.

        All members take the steps that the first window of the first one estimates.

        Args:
          rows: opens the pairs of a member, by its number. They are closed after its last step.
          samples, choosing, held_out: as in `fit_arrays`.
        """
        section, batch, estimate = self.section, self.section.batch, []

        def member_rows(number: int) -> MemberRows:
            own = rows(number)
            if not estimate:
                estimate.extend((section.steps or own.steps(section.epochs, batch), own.steps(1, batch)))
            return MemberRows(own, InOrder(batch), *estimate)

        return self._fit(member_rows, choosing, samples, held_out)

    def _fit(
        self, member_rows: Callable[[int], MemberRows], choosing: PairBatch | None, samples: PairBatch,
        held_out: PairBatch | None,
    ) -> Iterator[Step]:
        section, done = self.section, 0
        for number, member in enumerate(self.members):
            self._current, directory = member, member.inputs.loop.directory
            if directory is not None:
                hosts.once(functools.partial(make_folder, directory, "RewardModel(directory)"))
            pairs = member_rows(number)
            if choosing is not None and section.early_stopping:
                member.evaluates(choosing, 0, None, pairs.epoch)
            steps = member.fit(pairs)
            for step in closing(pairs.rows, steps) if isinstance(pairs.rows, WindowedRows) else steps:
                yield Step(done + step.number, step.metrics)
            done += member.training.completed
        weights = [member.weights for member in self.members]
        scorer, params = Scorer(self.members[0].inputs.model), weights[0]
        if len(weights) > 1:
            scorer, self.ensemble_summary = make_ensemble(section, scorer.model, weights, samples, held_out)
            params = stack_members(weights)
        scores = all_scores(scorer, params, samples, section.batch)
        self.statistics = tuple(float(x) for x in score_statistics(scores.reshape(-1)))
        self._raw_scorer = scorer, params

    def score(self, prompts: Any, responses: Any) -> np.ndarray:
        """float32 [B]: the normalised score of each response to its prompt.

        Args:
          prompts: texts, messages or `Prompt` records.
          responses: one text for each prompt.

        Raises:
          UserError: the lists differ in length or are empty, or training has not ended.
        """
        asked, (answers,) = as_answered(prompts, "RewardModel.score", responses=responses)
        pairs = self._arrays([Comparison(prompt, text, text, 0.5) for prompt, text in zip(asked, answers, strict=True)])
        scorer, params = self.scorer
        return np.asarray(normalised(scorer, all_scores(scorer, params, pairs, self.section.batch)[:, 0]))

    @property
    def state(self) -> TrainState:
        """The newest training state. Raises UserError before the first step."""
        return self._current.state

    @property
    def raw_scorer(self) -> tuple[Scorer, Params]:
        """(the scorer without normalisation, its weights); an ensemble's weights are stacked.

        Raises:
          UserError: training has not ended.
        """
        if self._raw_scorer is None:
            raise UserError("RewardModel has not been trained to the end; iterate over RewardModel.fit(...) first")
        return self._raw_scorer

    @property
    def scorer(self) -> tuple[Scorer, Params]:
        """(the scorer, its weights); an ensemble's weights are stacked. Raises UserError if training has not ended."""
        scorer, params = self.raw_scorer
        if self.section.normalise:
            shift, scale = self.statistics
            scorer = dataclasses.replace(scorer, shift=shift, scale=scale)
        return scorer, params

    def as_reward(self) -> LearntReward:
        """The trained model as a reward for RL. Raises UserError if training has not ended."""
        scorer, params = self.scorer
        return LearntReward(scorer, FrozenRole(params), "preference")

    def save(self, folder: str | Path, **options: Any) -> None:
        """Writes the model in Hugging Face's layout, as a sequence classifier with one label, which gives the raw score.

        Args:
          folder: must be empty or not exist. The members of an ensemble go to its subfolders member-0, member-1 and so on.
          options: as in `LanguageModel.save`.
        """
        model, folder = self.scorer[0].model, as_path(folder, "folder", written=True)
        for number, member in enumerate(self.members):
            target = folder if len(self.members) == 1 else folder / f"member-{number}"
            dataclasses.replace(self.inputs.language_model, model=model, params=member.params).save(target, **options)

    def _arrays(self, pairs: Sequence[Comparison]) -> PairBatch:
        section, style = self.section, self.inputs.language_model.style
        return pair_arrays(self.tokenizer, pairs, style, section.max_length, section.margin_weight)


def member_directory(directory: Path, number: int) -> Path:
    """The directory of a member of an ensemble. The first member uses the directory of a single model."""
    return directory if number == 0 else directory / f"member-{number}"
