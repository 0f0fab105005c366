"""Direct preference optimisation on labelled pairs or judged answers."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxalign import streams
from jaxalign.config import DPOConfig
from jaxalign.config.constraints import at_least
from jaxalign.config.schema import checked
from jaxalign.data.loader import EpochLoader, InOrder
from jaxalign.data.windows import WindowedRows
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Params
from jaxalign.parallel import hosts
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import AnswerPairs, Comparison, Judgement, PackedParts
from jaxalign.registry.objectives import is_custom, objectives_of
from jaxalign.steps import work
from jaxalign.steps.arguments import DirectArguments, LogprobArguments
from jaxalign.steps.direct_step import answer_logprobs, direct_step
from jaxalign.steps.early_stopping import EarlyStopping
from jaxalign.steps.loop import Step
from jaxalign.storage import write_bytes_atomically
from jaxalign.tracking.timing import Timeline, Timing
from jaxalign.tracking.tracker import Tracker
from jaxalign.trainers.answers import (
    AnswerPairBuilder,
    EncodedAnswers,
    all_logprobs,
    encode_judged,
    encode_pair,
    held_out_metrics,
    judged_arrays,
    packed,
    pair_arrays,
)
from jaxalign.trainers.base import PolicyTrainer
from jaxalign.trainers.extent import check_length, warn_of_same_rows
from jaxalign.trainers.inputs import model_inputs, named_arguments, settings_from
from jaxalign.trainers.rows import PAIR_FORM, as_judgement, as_judgements, as_pair, as_pairs, as_rows, is_judged, without_frame
from jaxalign.trainers.windows import GivenRows, closing, every_epoch


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
        self, pairs: Any, held_out: Any = None, *, eval_every: int = 0, patience: int | None = None, window: int = 0
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
          window: 0 encodes all rows before the first step. N reads and encodes them in windows of at most N rows, so that rows
            such as those of `read_rows` need not fit in memory; a malformed row raises when its window is read.

        Raises:
          UserError: there are no rows, a row is malformed, or the objective needs the other kind of rows.
        """
        section, steps_per_epoch = self.section, 1
        kept = () if held_out is None else self._records(held_out, "DPO.fit(held_out)")
        if checked(window, int, "DPO.fit(window)", at_least(0)):
            given = self._given(pairs, window)
            claimed = given.identity
        else:
            records = self._records(pairs, "DPO.fit(pairs)")
            claimed = self._arrays(records, "DPO.fit(pairs)")
            self.cut = claimed.cut
            loader = EpochLoader(len(claimed.label), section.batch, self.inputs.seed, streams.LOADERS["dpo"])
            steps_per_epoch = loader.steps(1)
            warn_of_same_rows("DPO.fit", records, kept)
        measured = self._arrays(kept, "DPO.fit(held_out)") if kept else None

        def measure(params: Params, completed: int) -> dict[str, float]:
            del completed
            return held_out_metrics(section, self.inputs.model, join(self.frozen, params), self.held_out)

        stopping = self._held_out(held_out, eval_every, patience, measure, steps_per_epoch)
        data = claimed if measured is None else (claimed, measured)
        self._claim(data, eval_every=eval_every, patience=patience, window=window)
        if not window:
            return self.fit_arrays(claimed, loader, measured, stopping)
        train = given.open(streams.LOADERS["dpo"], self.inputs.loop.directory)
        stopping = every_epoch(stopping, eval_every, train.steps(1, section.batch))
        return self.fit_windows(train, section.steps or train.steps(section.epochs, section.batch), measured, stopping)

    def _given(self, pairs: Any, window: int) -> GivenRows:
        """The rows of `fit` in windows. All rows are of the kind of the first one."""
        section, model, style = self.section, self.inputs.language_model, self.inputs.language_model.style
        pairs = without_frame(pairs)
        judged = is_judged(pairs)
        single = self._learns_from_single("DPO.fit(pairs)", judged)

        def encode(row: Any, where: str) -> EncodedAnswers:
            if judged:
                one = encode_judged(model.tokenizer, as_judgement(row, where), style)
            else:
                one = encode_pair(model.tokenizer, as_pair(row, where), style)
            longest = max(len(prompt) + len(answer) for prompt, answer in one.sides)
            check_length(where, min(longest, section.max_length), "max_length", model)
            return one

        return GivenRows(self, "pairs", pairs, window, encode, AnswerPairBuilder(section.max_length, single), "max_length")

    def _learns_from_single(self, where: str, judged: bool) -> bool:
        """Whether the objective learns from single answers. Raises UserError if it cannot learn from judged ones, but must."""
        single = not objectives_of(self.section.objective)[0].pairs
        if judged and not single:
            raise UserError(f"{where} has judged single answers, but objective {self.section.objective!r} learns from "
                            "pairs; set objective to 'kto', or give rows with chosen and rejected")
        return single

    def _records(self, pairs: Any, where: str) -> list[Comparison] | list[Judgement]:
        """The pairs or the judged answers of an argument of `fit`."""
        rows = as_rows(pairs, where, PAIR_FORM)
        return as_judgements(rows, where) if is_judged(rows) else as_pairs(rows, where)

    def _arrays(self, records: list[Comparison] | list[Judgement], where: str) -> AnswerPairs:
        """Pairs or judged answers as arrays. where: the argument of `fit` with their rows."""
        section, model, judged = self.section, self.inputs.language_model, isinstance(records[0], Judgement)
        make = judged_arrays if judged else pair_arrays
        arrays = make(model.tokenizer, records, model.style, section, self._learns_from_single(where, judged))
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
        self.train = train

        def prepare() -> Params:
            weights = self.inputs.weights()
            self.train = self._with_reference(weights, train, "train")
            return weights

        def batch(index: np.ndarray) -> tuple[AnswerPairs, PackedParts]:
            return packed(self.section, self.inputs.model, self.train, index)

        steps = self.section.steps or loader.steps(self.section.epochs)
        return self._fit(train, loader, batch, prepare, held_out, stopping, steps)

    def fit_windows(
        self, train: WindowedRows, steps: int, held_out: AnswerPairs | None = None, stopping: EarlyStopping | None = None
    ) -> Iterator[Step]:
        """Trains on rows in windows, and yields each step. Closes the rows at the end.

        The reference's log-probabilities of a batch are computed before its step, so the weights of the reference stay in the
        memory of the devices.

        Args:
          train: the rows of windows, which have an order of their own.
          steps: the number of steps.
          held_out, stopping: as in `fit_arrays`.
        """
        model, section, reference = self.inputs.model, self.section, []

        def prepare() -> Params:
            weights = self.inputs.weights()
            reference[:] = [weights] if section.reference != "none" else []
            return weights

        def batch(index: np.ndarray) -> tuple[AnswerPairs, PackedParts]:
            own, parts = packed(section, model, train, index)
            for weights in reference:  # None while the step compiles.
                arguments = LogprobArguments(model=model, params=weights, pairs=own, packed=parts)
                logprobs = place_rows(model.sharding, fetch(answer_logprobs(arguments).logprobs))
                own = dataclasses.replace(own, reference=logprobs)
            return own, parts

        return closing(train, self._fit(train, InOrder(section.batch), batch, prepare, held_out, stopping, steps))

    def _fit(
        self, train: AnswerPairs | WindowedRows, loader: EpochLoader | InOrder, batch: Callable, prepare: Callable[[], Params],
        held_out: AnswerPairs | None, stopping: EarlyStopping | None, steps: int,
    ) -> Iterator[Step]:
        """Trains and yields each step. batch: `batch(index) -> (the rows on the devices, their packed tokens)`."""
        self.held_out = held_out

        def prepare_all() -> Params:
            weights = prepare()
            if held_out is not None:
                self.held_out = self._with_reference(weights, held_out, "held_out")
            return weights

        def arguments(frozen: Params | None, index: np.ndarray) -> DirectArguments:
            own, parts = batch(index)
            return DirectArguments(
                model=self.inputs.model, optimizer=self.optimizer, section=self.section, batch=own, frozen=frozen, packed=parts
            )

        trained = self._train(
            direct_step, arguments, train, loader, total_steps=steps, shown=("loss", "accuracy"), prepare=prepare_all,
            stopping=stopping, custom=is_custom(self.section.objective),
        )
        return _finite_first(trained, self.section.objective) if is_custom(self.section.objective) else trained

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


def _finite_first(steps: Iterator[Step], objective: str) -> Iterator[Step]:
    """Yields the steps. Raises UserError if the loss of a custom objective is not finite in the first step."""
    for number, step in enumerate(steps):
        if number == 0 and not math.isfinite(step.metrics["loss"]):
            raise UserError(f"objective {objective!r} returned a loss of {step.metrics['loss']} on the first batch; a finite "
                            "number for each row is expected")
        yield step

