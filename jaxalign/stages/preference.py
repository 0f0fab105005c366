"""preference: the preference model, trained on soft labels; how right and how calibrated it is on held-out pairs.

Reads compare (world) or the preference file, and the weights RL starts from. Writes checkpoints, params and a summary with
the shift and scale that bring its scores to mean 0 and deviation 1 on the policy's samples. With `members` above 1 it is an
ensemble: the first member is written as if it were alone, the others into member-1, member-2 and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms.calibration import expected_calibration_error, fit_temperature, reliability_bins
from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.config import Config
from jaxalign.config import Preference as Section
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader, take
from jaxalign.data.sources.base import SourceReport
from jaxalign.data.sources.splits import split_by_prompt
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.models.adapters.lora import join
from jaxalign.models.attention.dispatch import reads_branches
from jaxalign.models.model import Model, Params, scalar_from_lm
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.rows import fetch
from jaxalign.records import Comparison, PackedParts, PairBatch
from jaxalign.rewards.scorer import Ensemble, Scorer, raw_pair_scores, stack_members
from jaxalign.stages.compare import labelled_pairs
from jaxalign.stages.shared import common, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.lm import place
from jaxalign.stages.shared.scorers import member_directory
from jaxalign.training.checkpoint import save_params
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.packed import pack_pairs
from jaxalign.training.preference_step import preference_step
from jaxalign.training.state import abstract_state, init_state
from jaxalign.training.work import learning_pairs

BUCKET = 32


class Preference(Stage):
    name = "preference"
    config_fields = (*common.MODEL_FIELDS, "data", "world", "preference", "feedback.undecided")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*common.policy_stages(config, self.name), *sources.made_in(config, "compare"))

    def files(self, config: Config):
        return common.base_files(config) | sources.data_files(config)

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.preference
        tokenizer = common.load_tokenizer(context)
        policy = common.make_model(config, tokenizer.vocab_size)
        pairs, held_out, report = labelled_split(context, tokenizer)
        for sentence in report.sentences() if report else ():
            print(f"[{self.name}] {sentence}", flush=True)
        train, held_out = (
            pair_arrays(tokenizer, part, config.data.style, section.max_length, section.margin_weight)
            for part in (pairs, held_out)
        )
        first = streams.LOADERS[self.name]
        loaders = [sources.pair_loader(config, pairs, section.batch, first + number) for number in range(section.members)]
        steps = loaders[0].steps(section.epochs)
        members = [self._train(context, policy, train, loader, number) for number, loader in enumerate(loaders)]
        scorer, params, extra = Scorer(policy.with_head("scalar")), members[0], {"data": report.to_dict()} if report else {}
        if len(members) > 1:
            scorer, found = make_ensemble(section, scorer.model, members, train, held_out)
            params, extra = stack_members(members), extra | found
        samples = all_scores(scorer, params, train, section.batch)
        shift, scale = (float(x) for x in score_statistics(samples.reshape(-1)))
        summary = {"steps": steps, "train_pairs": len(train.label), "reward_mean_before": shift, "reward_std_before": scale}
        summary |= {"shift": shift, "scale": scale} if section.normalise else {"shift": 0.0, "scale": 1.0}
        summary |= measure(all_scores(scorer, params, held_out, section.batch), held_out, section.temperature_fit)
        write_json(context.directory / "summary.json", summary | extra)

    def _train(self, context: StageContext, policy: Model, train: PairBatch, loader: EpochLoader, number: int) -> Params:
        """The weights of one member. It differs from the others by its head and by the order of the pairs."""
        config, section, model = context.config, context.config.preference, policy.with_head("scalar")
        directory = member_directory(context.directory, number)
        hosts.once(lambda: directory.mkdir(exist_ok=True))
        steps = loader.steps(section.epochs)
        optimizer = make_optimizer(section.optimizer, steps)

        def init():
            params = self._start(context, policy, model, number)
            return init_state(model, optimizer, params, common.stage_key(config, self.name))

        def arguments(state, frozen, step: int):
            batch, parts = packed(model, train, loader.indices(step), section.micro_batch_tokens)
            return model, optimizer, section.centering_coef, state, batch, frozen, parts

        def step_fn(state, step: int):
            state, metrics = preference_step(*arguments(state, frozen, step))
            return state, {**metrics, "tokens": int(train.length[loader.indices(step)].sum())}

        shown = self.name if section.members == 1 else f"{self.name} {number + 1}/{section.members}"
        loop = common.loop(
            context, model, steps, section.checkpoint_every, stage=shown, directory=directory, timing=context.directory,
            shown=("loss", "accuracy"), flops=lambda step: learning_pairs(model, take(train, loader.indices(step))),
            began=None if number else context.began,
        )  # fmt: skip
        with Ahead() as ahead:
            ahead.add(preference_step, lambda: arguments(*common.abstract_training(config, model, optimizer), 0))
            frozen = common.frozen_params(context, model)
            state = loop.run(init, abstract_state(model, optimizer), step_fn)
        save_params(directory / "params", state.params)
        return join(frozen, state.params)

    def _start(self, context: StageContext, policy: Model, model: Model, number: int) -> Params:
        """The policy's trunk, or its adapters, under a random head."""
        key = common.stage_key(context.config, self.name, streams.member_head(number))
        start = common.policy_params(context, policy, self.name)
        if model.lora is None:
            return scalar_from_lm(start, model.init(key))
        adapters = common.trained_params(context, policy, start, self.name)
        return {**adapters, "score": model.random_score(key)}


def make_ensemble(section: Section, model: Model, members: Sequence[Params], train: PairBatch, held_out: PairBatch):
    """(its Scorer, its part of the summary).

    With `normalise` each member's scores get mean 0, and as deviation the mean of the members' deviations, on the answers
    of the training pairs: so a difference is still in nats. `disagreement` is the mean deviation of the members' scores of
    a held-out answer, over the mean of the members' own deviations.
    """
    alone = Scorer(model)
    found = [score_statistics(all_scores(alone, params, train, section.batch).reshape(-1)) for params in members]
    shift, scale = (np.asarray(column, np.float64) for column in zip(*found, strict=True))
    unit = float(scale.mean())
    if not section.normalise:
        shift, scale = np.zeros_like(shift), np.full_like(scale, unit)
    ensemble = Ensemble(
        tuple(float(x) for x in shift), tuple(float(x) for x in scale / unit), section.combine, section.std_weight
    )
    scores = np.stack([all_scores(alone, params, held_out, section.batch) for params in members])
    apart = np.asarray(ensemble.normalised(scores.reshape(len(members), -1))).std(axis=0)
    rows = [
        {"shift": a, "scale": b, "held_out": accuracy(row, held_out.label)}
        for a, b, row in zip(ensemble.shift, ensemble.scale, scores, strict=True)
    ]
    summary = {"members": rows, "combine": section.combine, "std_weight": section.std_weight}
    summary["disagreement"] = float(apart.mean() / unit) if apart.size else None
    return Scorer(model, ensemble=ensemble), summary


def labelled_split(
    context: StageContext, tokenizer: Tokenizer
) -> tuple[list[Comparison], list[Comparison], SourceReport | None]:
    """(train, held out, report of the file) of the pairs that the preference model learns from; no report for the world."""
    config = context.config
    if not sources.made_in(config, "compare"):
        return sources.human_comparisons(context, tokenizer, margins=config.preference.margin_weight > 0)
    return *split_by_prompt(labelled_pairs(context), config.preference.held_out_share, config.seed), None


def pair_arrays(
    tokenizer: Tokenizer, pairs: Sequence[Comparison], style: str, max_length: int, margin_weight: float = 0.0
) -> PairBatch:
    """All pairs as one PairBatch of numpy arrays, padded to one length. A sequence too long keeps its end. The margins are
    margin_weight times the pairs' own; None where that is 0."""
    rows = []
    for pair in pairs:
        sides = (pair.response_a, pair.response_b)
        rows.append([styles.encode_completion(tokenizer, pair.prompt.messages, s, style)[0][-max_length:] for s in sides])
    longest = max((len(ids) for row in rows for ids in row), default=1)
    width = min(max_length, -(-longest // BUCKET) * BUCKET)
    tokens, length = np.zeros((len(rows), 2, width), np.int32), np.ones((len(rows), 2), np.int32)
    for i, row in enumerate(rows):
        for side, ids in enumerate(row):
            tokens[i, side, : len(ids)], length[i, side] = ids, len(ids)
    label = np.asarray([pair.label for pair in pairs], np.float32)
    margin = np.asarray([margin_weight * (pair.margin or 0.0) for pair in pairs], np.float32) if margin_weight else None
    return PairBatch(tokens, length, label, np.ones(len(rows), np.float32), margin)


def packed(model: Model, pairs: PairBatch, index: np.ndarray, tokens: int = 0) -> tuple[PairBatch, PackedParts]:
    """The pairs `index` on the devices, without their tokens, and these packed: at most so many at once on one; 0 chooses."""
    own = jax.tree.map(lambda x: x[index], pairs)
    parts = pack_pairs(own, tokens, model.sharding, branches=reads_branches(model.config, model.sharding))
    return place(model, dataclasses.replace(own, tokens=None)), parts


def all_scores(scorer: Scorer, params, pairs: PairBatch, batch: int) -> np.ndarray:
    """float32 [B, 2]: the raw scores of every pair."""
    out = []
    for start in range(0, len(pairs.label), batch):
        index = np.minimum(np.arange(start, start + batch), len(pairs.label) - 1)
        out.append(fetch(raw_pair_scores(scorer, params, *packed(scorer.model, pairs, index))))
    return np.concatenate(out)[: len(pairs.label)] if out else np.zeros((0, 2), np.float32)


def accuracy(scores: np.ndarray, label: np.ndarray) -> dict | None:
    """How often the higher of two scores [B, 2] is the one that the label leans to, over the pairs whose label leans."""
    decided = np.abs(label - 0.5) > 1e-6
    total = int(decided.sum())
    if not total:
        return None
    right = int(np.sum((scores[:, 0] > scores[:, 1])[decided] == (label > 0.5)[decided]))
    low, high = wilson_interval(right, total)
    return {"pairs": total, "accuracy": right / total, "low": low, "high": high}


def measure(scores: np.ndarray, pairs: PairBatch, temperature_fit: bool = False, bins: int = 10) -> dict:
    """Accuracy, calibration and loss of raw scores [B, 2] on held-out pairs whose label leans one way.

    With `temperature_fit` the calibration is that under a temperature, and the summary has it with what it was before.
    """
    decided = np.abs(pairs.label - 0.5) > 1e-6
    if not decided.any():
        return {"held_out": None, "calibration": None}
    held_out = accuracy(scores, pairs.label)
    scores, label = scores[decided], pairs.label[decided]
    loss = float(np.mean(bradley_terry(scores[:, 0], scores[:, 1], label)))
    # Each pair counts in both orders, so that the plot does not depend on which answer happened to be written first.
    both = np.concatenate([label, 1 - label])

    def ece(margin: np.ndarray):
        prob = np.asarray(jax.nn.sigmoid(np.concatenate([margin, -margin])))
        return float(expected_calibration_error(prob, both, bins)), reliability_bins(prob, both, bins)

    margin, extra = scores[:, 0] - scores[:, 1], {}
    if temperature_fit:
        before, _ = ece(margin)
        margin, fitted = cross_fitted(margin, label)
        extra = {"temperature": fitted | {"ece_before": before, "ece_after": ece(margin)[0]}}
    error, plot = ece(margin)
    held_out |= {"loss": loss, "ece": error}
    named = {name: [float(x) for x in getattr(plot, name)] for name in ("edges", "confidence", "accuracy", "count")}
    return {"held_out": held_out, "calibration": named} | extra


def cross_fitted(margin: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, dict]:
    """(margins over their temperature, the temperatures), float32 [B].

    Every second pair is divided by the temperature that the others are likeliest under, and the others by theirs: no pair is
    judged by what was fitted on it. `value` is fitted on all. What is made likely is the answer that the label leans to,
    since the calibration counts that one.
    """
    outcome = (label > 0.5).astype(np.float32)
    odd = np.arange(len(label)) % 2 == 1
    folds = [float(fit_temperature(margin[rest], outcome[rest])) for rest in (odd, ~odd)]
    temperature = np.where(odd, folds[1], folds[0]).astype(np.float32)
    return margin / temperature, {"value": float(fit_temperature(margin, outcome)), "folds": folds}


STAGE = Preference()
