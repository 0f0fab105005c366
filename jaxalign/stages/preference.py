"""preference: trains the preference model on soft labels and measures its accuracy and calibration on held-out pairs.

Reads compare (world) or the preference file, and the weights that RL starts from. Writes checkpoints, params and a summary with
the shift and scale that normalise its scores to mean 0 and standard deviation 1 on the training pairs. With `members` above 1
it trains an ensemble: the first member is written where a single model would be, the others to member-1, member-2, and so on.

With early stopping, one half of the held-out dialogues chooses the weights that are written and the other half measures them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.data.loader import take
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.windows import WindowedRows
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.records import Comparison, PairBatch
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.stages.shared import reads, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import pair_loader, print_report
from jaxalign.stages.shared.preference_pairs import PreferencePairs, held_out_parts, is_human, preference_pairs
from jaxalign.stages.shared.training import policy_inputs, read_part
from jaxalign.stages.shared.windows import Windows, WindowUse
from jaxalign.steps.checkpoint import save_params
from jaxalign.steps.loop import Step
from jaxalign.tracking.accuracy import accuracy_sentence, human_sentence, uninformative
from jaxalign.trainers.inputs import TrainerInputs
from jaxalign.trainers.preference_quality import accuracy, length_baseline, measure, noise_ceiling
from jaxalign.trainers.reward_model import RewardModel, member_directory
from jaxalign.trainers.scoring import EncodedPair, PairBuilder, all_scores, encode_pair, pair_arrays


@STAGES.declare(
    "preference", trains=True, learns_from=("comparisons",), windows=True, batches=(Batch("preference.batch"),),
    programs="jaxalign.planner.stage_programs:preference",
    report="jaxalign.tracking.report.reward_models:preference", preview="jaxalign.stages.shared.preview:preference_rows",
)
class PreferenceStage(BuiltinStage):
    name = "preference"
    config_fields = (*reads.MODEL_FIELDS, "data", "world", "preference", "feedback.undecided", "feedback.undecided_weight")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*reads.policy_stages(config, self.name), *sources.made_in(config, "compare"))

    def files(self, config: Config):
        return super().files(config) | {Path(path).expanduser(): "preference.human" for path in config.preference.human}

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.preference
        tokenizer = run_models.load_tokenizer(context)
        policy = run_models.make_model(config, tokenizer.vocab_size)
        data = (_InWindows if sources.in_windows(config, "compare") else _InMemory)(context, tokenizer)
        pairs, choosing, held_out = data.pairs, data.arrays(data.pairs.choosing), data.arrays(data.pairs.held_out)
        inputs = [self._inputs(context, policy, number) for number in range(section.members)]
        trainer = RewardModel.from_inputs(inputs, section)
        for _ in data.train(trainer, choosing, held_out):
            pass
        for member in trainer.members:
            save_params(member.inputs.loop.directory / "params", member.params)
        summary, extra = data.summary()
        extra |= trainer.ensemble_summary
        shift, scale = trainer.statistics
        if section.early_stopping:
            stopped = [member.stopped() for member in trainer.members]
            summary["steps"] = stopped[0]["steps"]
            summary["early_stopping"] = {"choosing_pairs": len(choosing.label), "members": stopped}
        summary |= {"reward_mean_before": shift, "reward_std_before": scale}
        summary |= {"shift": shift, "scale": scale} if section.normalise else {"shift": 0.0, "scale": 1.0}
        scores = all_scores(*trainer.raw_scorer, held_out, section.batch)
        summary |= measure(scores, held_out, section.temperature_fit)
        summary["baselines"] = {
            "chance": 0.5, "length": length_baseline(data.measured, held_out), "ceiling": noise_ceiling(pairs.held_out)
        }
        if section.human:
            summary |= _parts(pairs, scores, held_out, section.human_weight)
        write_json(context.directory / "summary.json", summary | extra)
        _report(context.title, summary, section.on_failure)

    def _inputs(self, context: StageContext, policy: Model, number: int) -> TrainerInputs:
        """The inputs of member `number`. Its loop writes to a directory of its own, except for its timing."""
        title, members = context.title, context.config.preference.members
        return policy_inputs(
            context, policy, shared=False,
            stage=title if members == 1 else f"{title} {number + 1}/{members}",
            directory=member_directory(context.directory, number),
            timing=context.directory,
            began=None if number else context.began,
        )


class _InMemory:
    """Training pairs that are all in memory.

    Attributes:
      pairs: the pairs.
      measured: the training pairs on which the baseline of the lengths chooses its rule.
    """

    def __init__(self, context: StageContext, tokenizer: Tokenizer):
        self._context, self._tokenizer, section = context, tokenizer, context.config.preference
        self.pairs = preference_pairs(context, tokenizer)
        self._extra = print_report(context.title, self.pairs.report)
        self.measured = self.arrays(self.pairs.train)
        first = streams.LOADERS["preference"]
        self._loaders = [
            pair_loader(context, self.pairs.train, section.batch, first + number) for number in range(section.members)
        ]

    def arrays(self, pairs: Sequence[Comparison]) -> PairBatch:
        """Pairs as arrays."""
        section, style = self._context.config.preference, self._context.config.data.style
        return pair_arrays(self._tokenizer, pairs, style, section.max_length, section.margin_weight)

    def train(self, trainer: RewardModel, choosing: PairBatch, held_out: PairBatch) -> Iterator[Step]:
        """Trains and yields each step."""
        # The scores are normalised on answers of the policy, which did not write those of human files.
        human = self._context.config.preference.human
        samples = take(self.measured, _index(self.pairs.train, human=False)) if human else self.measured
        return trainer.fit_arrays(self.measured, self._loaders, choosing, samples, held_out)

    def summary(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parts of the summary about training and about the data."""
        section = self._context.config.preference
        steps = section.steps or self._loaders[0].steps(section.epochs)
        pairs = len(self.measured.label)
        extra = self._extra | read_part(pairs, section.batch, steps)
        return {"steps": steps, "train_pairs": pairs, "cut": self.measured.cut}, extra


class _InWindows(_InMemory):
    """Training pairs in windows. Those of the first window are measured, and the scores are normalised on them."""

    def __init__(self, context: StageContext, tokenizer: Tokenizer):
        self._context, self._tokenizer, section = context, tokenizer, context.config.preference

        def encode(pair: Comparison) -> EncodedPair:
            return encode_pair(tokenizer, pair, context.config.data.style)

        builder, margins = PairBuilder(section.max_length, section.margin_weight), section.margin_weight > 0
        self._windows = Windows(
            context, tokenizer, WindowUse("comparisons", encode, builder, "pairs", "preference.max_length", margins)
        )
        try:
            self.measured, self.pairs = self._first(margins)
        except BaseException:
            self._windows.rows.close()
            raise
        self._steps = self._windows.steps(section, section.batch)

    def _first(self, margins: bool) -> tuple[PairBatch, PreferencePairs]:
        """(the training pairs of the first window, its held-out pairs)."""
        measured = self._windows.rows.first().arrays
        if margins and not measured.margin.any():
            raise UserError('no pair of the first window has a "margin" above 0, and config.preference.margin_weight requires '
                            "margins; set it to 0, or raise config.data.window")
        choosing, held_out = held_out_parts(self._context, self._windows.held_out)
        return measured, PreferencePairs([], choosing, held_out, None, ())

    def train(self, trainer: RewardModel, choosing: PairBatch, held_out: PairBatch) -> Iterator[Step]:
        def rows(number: int) -> WindowedRows:
            directory = member_directory(self._context.directory, number)
            return self._windows.open(number, directory) if number else self._windows.rows

        with contextlib.closing(self._windows.rows):
            yield from trainer.fit_windows(rows, self.measured, choosing, held_out)

    def summary(self) -> tuple[dict[str, Any], dict[str, Any]]:
        report, extra = self._windows.report, self._windows.finish()
        return {"steps": self._steps, "train_pairs": report.answers, "cut": report.cut_rows}, extra


def _parts(pairs: PreferencePairs, scores: np.ndarray, held_out: PairBatch, weight: float) -> dict[str, Any]:
    """The numbers of pairs of stage compare ("ai") and of human files ("human"), and the accuracy on each part."""
    measured: dict[str, Any] = {}
    for name, human in (("ai", False), ("human", True)):
        index = _index(pairs.held_out, human)
        counts = {"train_pairs": len(_index(pairs.train, human)), "held_out_pairs": len(index)}
        measured[name] = counts | {"held_out": accuracy(scores[index], held_out.label[index])}
    measured["human"] |= {"weight": weight, "files": [report.to_dict() for report in pairs.human]}
    return measured


def _index(pairs: Sequence[Comparison], human: bool) -> np.ndarray:
    return np.asarray([i for i, pair in enumerate(pairs) if is_human(pair) == human], np.int64)


def _report(title: str, summary: Mapping[str, Any], on_failure: str) -> None:
    """Prints the accuracy and its baselines. Raises UserError if the model is no better and `on_failure` is "stop"."""
    for sentence in filter(None, (accuracy_sentence(summary), human_sentence(summary))):
        print(f"[{title}] {sentence}", flush=True)
    failure = uninformative(summary)
    if failure and on_failure == "stop":
        raise UserError(f"{failure}; or set config.preference.on_failure to 'warn', which continues with this model")
    if failure:
        print(f"[{title}] warning: {failure}", flush=True)
