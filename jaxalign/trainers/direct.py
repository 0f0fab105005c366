"""Direct preference optimisation on labelled pairs or judged answers."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxalign import streams
from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.config import DPOConfig
from jaxalign.data.loader import EpochLoader
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model, Params
from jaxalign.parallel import hosts
from jaxalign.parallel.rows import fetch
from jaxalign.records import AnswerPairs
from jaxalign.registry.core import names_in
from jaxalign.registry.objectives import OBJECTIVES, objectives_of
from jaxalign.steps import work
from jaxalign.steps.arguments import DirectArguments, LogprobArguments
from jaxalign.steps.direct_step import answer_logprobs, direct_step
from jaxalign.steps.early_stopping import LOSS, EarlyStopping
from jaxalign.steps.loop import Step
from jaxalign.steps.objectives import DirectInputs, anchors, objective_loss
from jaxalign.storage import write_bytes_atomically
from jaxalign.tracking.timing import Timeline, Timing
from jaxalign.tracking.tracker import Tracker
from jaxalign.trainers.answers import judged_arrays, packed, pair_arrays
from jaxalign.trainers.base import PolicyTrainer
from jaxalign.trainers.fit_arguments import named_arguments
from jaxalign.trainers.inputs import model_inputs, settings_from
from jaxalign.trainers.lengths import check_length
from jaxalign.trainers.rows import as_judgements, as_pairs, is_judged


class DPO(PolicyTrainer):
    """Direct preference optimisation of a language model, with any of the direct objectives.

        pairs = [{"prompt": "Name a colour.", "chosen": "Red.", "rejected": "Seven."}]
        trainer = DPO(load_model("FOLDER"), objective="ipo", beta=0.1, epochs=1, batch=1)
        for step in trainer.fit(pairs):
            print(step.metrics["loss"], step.metrics["accuracy"])
        trainer.policy.save("OUT")

    The reference is the model that training starts from.

    Args:
      model: the language model to start from; it is not changed.
      objective: a name in `jaxalign.registry.objectives.OBJECTIVES`, a sum such as "sigmoid+bco_pair", or "module:name".
      directory: for metrics, checkpoints and exact resume; None keeps everything in memory.
      seed: seeds the order of the pairs.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.
      fields: fields of the config section `dpo`, such as beta, epochs, batch and optimizer.

    Raises:
      UserError: an argument is not a field of the section, or has a value that the section does not accept.
    """

    name = "DPO"

    def __init__(
        self,
        model: LanguageModel,
        objective: str = "sigmoid",
        *,
        directory: str | Path | None = None,
        seed: int = 0,
        trackers: Mapping[str, Tracker] | Sequence[Tracker] = (),
        progress: bool = False,
        **fields: Any,
    ):
        section = settings_from(DPOConfig(), {"objective": objective, **fields}, self.name, model)
        try:
            section.check_terms()
        except UserError as error:
            raise UserError(str(error).replace("config.dpo.", "DPO.")) from None
        options = {"directory": directory, "seed": seed, "trackers": trackers, "progress": progress}
        super().__init__(model_inputs(model, section, self.name, **options), section)

    @named_arguments
    def fit(
        self, pairs: Any, held_out: Any = None, *, eval_every: int = 0, patience: int | None = None
    ) -> Iterator[Step]:
        """Trains on pairs of answers or, for an objective on single answers, on judged answers, and yields each step.

        Args:
          pairs: a list of {"prompt", "chosen", "rejected"} with optional "label" (the probability that chosen is better,
            default 1); or of {"prompt", "completion", "label": true or false}; or a mapping of columns. Prompts are texts or
            messages.
          held_out: rows in the same form on which the objective is measured, as "held_out_loss" and "held_out_accuracy"; None:
            no rows.
          eval_every: steps between these measurements, besides the one after the last step; 0: an epoch.
          patience: stop after this many consecutive measurements without a lower loss, and keep the weights with the lowest;
            None: train all steps and keep the newest weights.

        Raises:
          UserError: there are no rows, a row is malformed, or the objective needs the other kind of rows.
        """
        section, arrays = self.section, self._arrays(pairs, "pairs")
        self.cut = arrays.cut
        measured = None if held_out is None else self._arrays(held_out, "held_out")
        loader = EpochLoader(len(arrays.label), section.batch, self.inputs.seed, streams.LOADERS["dpo"])

        def measure(params: Params, completed: int) -> dict[str, float]:
            del completed
            return held_out_metrics(section, self.inputs.model, join(self.frozen, params), self.held_out)

        stopping = self._held_out(held_out, eval_every, patience, measure, loader.steps(1))
        self._claim(arrays if measured is None else (arrays, measured), eval_every=eval_every, patience=patience)
        return self.fit_arrays(arrays, loader, measured, stopping)

    def _arrays(self, pairs: Any, argument: str) -> AnswerPairs:
        """The rows of an argument of `fit` as arrays."""
        section, model, where = self.section, self.inputs.language_model, f"DPO.fit({argument})"
        single = not objectives_of(section.objective)[0].pairs
        if is_judged(pairs):
            if not single:
                raise UserError(f"{where} has judged single answers, but objective {section.objective!r} learns from "
                                "pairs; set objective to 'kto', or give rows with chosen and rejected")
            arrays = judged_arrays(model.tokenizer, as_judgements(pairs, where), model.style, section, single)
        else:
            arrays = pair_arrays(model.tokenizer, as_pairs(pairs, where), model.style, section, single)
        check_length(where, int(arrays.length.max()), "max_length", model)
        return arrays

    def fit_arrays(
        self, train: AnswerPairs, loader: EpochLoader, held_out: AnswerPairs | None = None,
        stopping: EarlyStopping | None = None,
    ) -> Iterator[Step]:
        """Computes the reference's log-probabilities, trains, and yields each step.

        Once training has begun, the attributes `train` and `held_out` are the pairs with these log-probabilities.

        Args:
          train: the pairs or judged answers, numpy arrays.
          loader: selects the rows of each batch.
          held_out: more rows for which to compute the reference's log-probabilities, or None.
          stopping: measures held-out rows, and may end training early; None trains all steps.
        """
        model, section, self.train, self.held_out = self.inputs.model, self.section, train, held_out

        def prepare() -> Params:
            weights = self.inputs.weights()
            self.train = self._with_reference(weights, train, "train")
            if held_out is not None:
                self.held_out = self._with_reference(weights, held_out, "held_out")
            return weights

        def arguments(frozen: Params | None, index: np.ndarray) -> DirectArguments:
            batch, parts = packed(section, model, self.train, index)
            return DirectArguments(
                model=model, optimizer=self.optimizer, section=section, batch=batch, frozen=frozen, packed=parts
            )

        steps = self._train(
            direct_step, arguments, train, loader, shown=("loss", "accuracy"), prepare=prepare, stopping=stopping
        )
        is_builtin = all(name in OBJECTIVES.builtin for name in names_in(section.objective))
        return steps if is_builtin else _finite_first(steps, section.objective)

    def _with_reference(self, params: Params, pairs: AnswerPairs, name: str) -> AnswerPairs:
        """The pairs with the log-probabilities of their answers under the reference.

        With a directory, they are stored in reference-NAME-HASH.npy (HASH is that of the pairs), which a resumed run reads.
        """
        section, model, loop = self.section, self.inputs.model, self.inputs.loop
        if section.reference == "none" or not len(pairs.label):
            return pairs
        path, timing = None, Timeline()
        if loop.directory is not None:
            digest = hashlib.sha256()
            for array in (pairs.tokens, pairs.prompt_length, pairs.length):
                digest.update(np.ascontiguousarray(array).tobytes())
            path = loop.directory / f"reference-{name}-{digest.hexdigest()[:16]}.npy"
            timing = Timing(loop.directory / "timing.jsonl", loop.peak)
        if path is None or not hosts.once(path.exists):
            with timing.phase("score") as phase:
                logprobs = all_logprobs(section, model, params, pairs)
                phase.tokens, phase.flops = int(pairs.length.sum()), work.reading_pairs(model, pairs)
            if path is None:
                return dataclasses.replace(pairs, reference=logprobs)
            content = io.BytesIO()
            np.save(content, logprobs)
            hosts.once(lambda: write_bytes_atomically(path, content.getvalue()))
        return dataclasses.replace(pairs, reference=np.load(path))


def all_logprobs(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> np.ndarray:
    """float32 [B, 2]: the log-probability of every answer."""
    out, batch = [], section.batch
    for start in range(0, len(pairs.label), batch):
        index = np.minimum(np.arange(start, start + batch), len(pairs.label) - 1)
        own, parts = packed(section, model, pairs, index)
        arguments = LogprobArguments(model=model, params=params, pairs=own, packed=parts)
        out.append(fetch(answer_logprobs(arguments).logprobs))
    return np.concatenate(out)[: len(pairs.label)] if out else np.zeros((0, 2), np.float32)


def held_out_metrics(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> dict[str, float]:
    """held_out_loss and held_out_accuracy: the means of the objective's loss and accuracy over the rows, by their weights.

    An objective with an anchor computes it over all rows.
    """
    columns = *all_logprobs(section, model, params, pairs).T, *pairs.reference.T, *(pairs.length - pairs.prompt_length).T
    inputs = DirectInputs(*(np.asarray(x, np.float32) for x in columns), pairs.label, pairs.weight, np.float32(0), section)
    loss, reported = objective_loss(inputs, anchors(inputs))
    means = (float(np.average(np.asarray(x, np.float64), weights=pairs.weight)) for x in (loss, reported["accuracy"]))
    return dict(zip((LOSS, "held_out_accuracy"), means, strict=True))


def accuracy(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> dict | None:
    """How often the implicit reward prefers the answer that the label prefers; None if no label prefers one.

    The implicit reward is the log-probability minus the reference's, per token for objectives with mean rewards.
    """
    leaning = pairs.label > 0.5
    if not leaning.any():
        return None
    reward = all_logprobs(section, model, params, pairs) - pairs.reference
    objectives = objectives_of(section.objective)
    if len(objectives) == 1 and objectives[0].mean_rewards:
        reward = reward / (pairs.length - pairs.prompt_length)
    reward = reward[leaning]
    right, total = int(np.sum(reward[:, 0] > reward[:, 1])), len(reward)
    low, high = wilson_interval(right, total)
    margin = float(np.mean(reward[:, 0] - reward[:, 1]) * section.beta)
    return {"pairs": total, "accuracy": right / total, "low": low, "high": high, "margin": margin}


def separation(section: DPOConfig, model: Model, params: Params, judged: AnswerPairs) -> dict | None:
    """Over all pairs of a good and a bad answer: how often the good one has the higher implicit reward (ties count one half),
    and the mean difference. None unless there are answers of both kinds."""
    good = judged.label > 0.5
    if not good.any() or good.all():
        return None
    reward = (all_logprobs(section, model, params, judged) - judged.reference)[:, 0]
    bad = np.sort(reward[~good])
    below = (np.searchsorted(bad, reward[good], "left") + np.searchsorted(bad, reward[good], "right")) / 2
    margin = float((np.mean(reward[good]) - np.mean(bad)) * section.beta)
    counts = {"desirable": int(good.sum()), "undesirable": len(bad)}
    return counts | {"accuracy": float(np.mean(below) / len(bad)), "margin": margin}


def _finite_first(steps: Iterator[Step], objective: str) -> Iterator[Step]:
    """Yields the steps. Raises UserError if the loss of a custom objective is not finite in the first step."""
    for number, step in enumerate(steps):
        if number == 0 and not math.isfinite(step.metrics["loss"]):
            raise UserError(f"objective {objective!r} returned a loss of {step.metrics['loss']} on the first batch; a finite "
                            "number for each row is expected")
        yield step

