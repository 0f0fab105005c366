"""Trains preference (reward) models, single or in an ensemble, with the Bradley-Terry loss on labelled pairs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.config import PreferenceConfig
from jaxalign.config.arguments import as_path, make_folder
from jaxalign.data.loader import EpochLoader
from jaxalign.data.sources.base import split_by_prompt
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model, Params, scalar_from_lm
from jaxalign.parallel import hosts
from jaxalign.parallel.rows import fetch
from jaxalign.records import Comparison, PairBatch
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.scorer import Ensemble, Scorer, normalised, stack_members
from jaxalign.steps.arguments import PreferenceArguments
from jaxalign.steps.early_stopping import EarlyStopping
from jaxalign.steps.loop import Step
from jaxalign.steps.offload import FrozenRole
from jaxalign.steps.preference_step import preference_step
from jaxalign.steps.state import TrainState
from jaxalign.tracking.tracker import Tracker
from jaxalign.trainers.base import Trainer, TrainerInputs, model_inputs, section_from
from jaxalign.trainers.preference_quality import accuracy, held_out_metrics
from jaxalign.trainers.rows import as_answered, as_pairs
from jaxalign.trainers.scoring import all_scores, packed, pair_arrays

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
        section = section_from(PreferenceConfig(), fields, self.name)
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
        self.members = [PreferenceMember(_with_random_head(one, number), section) for number, one in enumerate(inputs)]
        self._current, self._raw_scorer, self.ensemble_summary = self.members[0], None, {}

    def fit(self, pairs: Any, held_out: Any = None) -> Iterator[Step]:
        """Trains on pairs of answers and yields each step. The members of an ensemble train one after another.

        Args:
          pairs: a list of {"prompt", "chosen", "rejected"} with optional "label" (the probability that chosen is better,
            default 1), "margin" and "weight" (of the pair's loss, default 1); or a mapping of columns. Prompts are texts or
            messages.
          held_out: the pairs on which early stopping measures the loss, in the same form; None holds out `held_out_share` of
            the dialogues of `pairs`. Since they choose the weights, measure the accuracy on other pairs.

        Raises:
          UserError: there are no rows, a row is malformed, or `held_out` is given without early_stopping.
        """
        section, seed = self.section, self.inputs.seed
        train, choosing = as_pairs(pairs, "RewardModel.fit(pairs)"), None
        if not section.early_stopping and held_out is not None:
            raise UserError("RewardModel.fit(held_out) is given, but early_stopping is False, so nothing reads it; set "
                            "early_stopping=True, or leave held_out out")
        if held_out is not None:
            choosing = self._arrays(as_pairs(held_out, "RewardModel.fit(held_out)"))
        elif section.early_stopping:
            train, chosen_by = split_by_prompt(train, section.held_out_share, seed)
            choosing = self._arrays(chosen_by)
        arrays = self._arrays(train)
        self.cut = arrays.cut
        self._claim(arrays if choosing is None else (arrays, choosing))
        first = streams.LOADERS["preference"]
        loaders = [EpochLoader(len(arrays.label), section.batch, seed, first + number) for number in range(section.members)]
        return self.fit_arrays(arrays, loaders, choosing)

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
        section, done = self.section, 0
        samples = train if samples is None else samples
        for member, loader in zip(self.members, loaders, strict=True):
            self._current, directory = member, member.inputs.loop.directory
            if directory is not None:
                hosts.once(functools.partial(make_folder, directory, "RewardModel(directory)"))
            for step in member.fit(train, loader, choosing):
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


class PreferenceMember(Trainer):
    """Trains one preference model on arrays of pairs: a `RewardModel`, or a member of its ensemble."""

    name = "RewardModel"

    def fit(self, train: PairBatch, loader: EpochLoader, held_out: PairBatch | None = None) -> Iterator[Step]:
        """Trains and yields each step.

        Args:
          train: the pairs, numpy arrays.
          loader: selects the pairs of each batch.
          held_out: the pairs on which early stopping measures the loss; not read without early stopping.

        Raises:
          UserError: early stopping has no pair to measure the loss on.
        """
        model, section = self.inputs.model, self.section

        def arguments(frozen: Params | None, index: np.ndarray) -> PreferenceArguments:
            batch, parts = packed(model, train, index, section.micro_batch_tokens)
            return PreferenceArguments(
                model=model,
                optimizer=self.optimizer,
                centering_coef=section.centering_coef,
                batch=batch,
                frozen=frozen,
                packed=parts,
            )

        stopping = self._stopping(held_out, loader.steps(1)) if section.early_stopping else None
        return self._train(
            preference_step, arguments, train, loader, shown=("loss", "accuracy"), stopping=stopping
        )

    def stopped(self) -> dict[str, Any]:
        """The result of early stopping, after training: the number of steps trained, and the best step with its loss."""
        state = self.training.state
        step, loss = fetch((state.best_step, state.best_loss))
        return {"steps": self.training.completed, "best_step": int(step), "held_out_loss": float(loss)}

    def _stopping(self, held_out: PairBatch | None, epoch: int) -> EarlyStopping:
        """Early stopping on held-out pairs. epoch: the number of steps of an epoch."""
        if held_out is None or not np.any((np.abs(held_out.label - 0.5) > 1e-6) & (held_out.weight > 0)):
            raise UserError("early_stopping is True, but none of the held-out pairs that would measure the loss has a label "
                            "that prefers an answer; give more pairs, raise held_out_share, or set early_stopping to False")
        section, scorer = self.section, Scorer(self.inputs.model)

        def measure(params: Params) -> dict[str, float]:
            scores = all_scores(scorer, join(self.frozen, params), held_out, section.batch)
            return held_out_metrics(scores, held_out)

        return EarlyStopping(section.eval_every or epoch, section.patience, measure)


def _with_random_head(inputs: TrainerInputs, number: int) -> TrainerInputs:
    """The inputs of a policy's trunk, or of its adapters, with the random scalar head of ensemble member `number`."""
    model = inputs.model.with_head("scalar")

    def trained(weights: Params) -> Params:
        key = jax.random.fold_in(inputs.root_key, streams.member_head(number))
        if model.lora is None:
            return scalar_from_lm(inputs.trained(weights), model.init(key))
        return {**inputs.trained(weights), "score": model.random_score(key)}

    return dataclasses.replace(inputs, model=model, trained=trained)


def member_directory(directory: Path, number: int) -> Path:
    """The directory of a member of an ensemble. The first member uses the directory of a single model."""
    return directory if number == 0 else directory / f"member-{number}"


def make_ensemble(
    section: PreferenceConfig, model: Model, members: Sequence[Params], train: PairBatch, held_out: PairBatch | None = None
) -> tuple[Scorer, dict]:
    """(the scorer of an ensemble, its part of the summary).

    With `normalise`, each member's scores are shifted and scaled on the answers of the training pairs to mean 0 and to the
    standard deviation that the members have on average, so that score differences stay in nats. `disagreement` is the standard
    deviation across members of a held-out answer's score, averaged over answers and divided by that same average standard
    deviation; None without held-out pairs.
    """
    single = Scorer(model)
    statistics = [score_statistics(all_scores(single, params, train, section.batch).reshape(-1)) for params in members]
    shift, scale = (np.asarray(column, np.float64) for column in zip(*statistics, strict=True))
    unit = float(scale.mean())
    if not section.normalise:
        shift, scale = np.zeros_like(shift), np.full_like(scale, unit)
    ensemble = Ensemble(
        tuple(float(x) for x in shift), tuple(float(x) for x in scale / unit), section.combine, section.std_weight
    )
    if held_out is None:
        return Scorer(model, ensemble=ensemble), {}
    scores = np.stack([all_scores(single, params, held_out, section.batch) for params in members])
    apart = np.asarray(ensemble.normalised(scores.reshape(len(members), -1))).std(axis=0)
    rows = [
        {"shift": a, "scale": b, "held_out": accuracy(row, held_out.label)}
        for a, b, row in zip(ensemble.shift, ensemble.scale, scores, strict=True)
    ]
    summary = {"members": rows, "combine": section.combine, "std_weight": section.std_weight}
    summary["disagreement"] = float(apart.mean() / unit) if apart.size else None
    return Scorer(model, ensemble=ensemble), summary
