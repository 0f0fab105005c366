"""Supervised fine-tuning on packed rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import SFTConfig
from jaxalign.config.constraints import at_least
from jaxalign.config.schema import checked
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader, InOrder, take
from jaxalign.data.packing import pack
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.windows import Document, PackedRowBuilder, WindowedRows
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import place_rows
from jaxalign.records import Message, PackedBatch
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.early_stopping import LOSS, EarlyStopping
from jaxalign.steps.lm_step import lm_evaluate, lm_step
from jaxalign.steps.loop import Step
from jaxalign.steps.microbatch import chosen
from jaxalign.tracking.tracker import Tracker
from jaxalign.trainers.base import PolicyTrainer
from jaxalign.trainers.extent import check_length, warn_of_cut, warn_of_same_rows
from jaxalign.trainers.inputs import model_inputs, named_arguments, settings_from
from jaxalign.trainers.rows import Example, as_example, as_examples
from jaxalign.trainers.windows import GivenRows, closing, every_epoch

Answered = tuple[Sequence[Message], str]


class SFT(PolicyTrainer):
    """Supervised fine-tuning of a language model.

        trainer = SFT(load_model("FOLDER"), epochs=2)
        for step in trainer.fit([{"prompt": "Hi", "response": "Hello."}]):
            print(step.metrics["loss"])
        trainer.policy.save("OUT")

    Args:
      model: the language model to start from; it is not changed.
      directory: for metrics, checkpoints and exact resume; None keeps everything in memory.
      seed: seeds the order of the rows.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.
      fields: fields of the config section `sft`, such as epochs, batch_rows and optimizer.

    Raises:
      UserError: an argument is not a field of the section, or has a value that the section does not accept.
    """

    name = "SFT"

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
        section = settings_from(SFTConfig(), fields, self.name, model)
        options = {"directory": directory, "seed": seed, "trackers": trackers, "progress": progress}
        super().__init__(model_inputs(model, section, self.name, **options), section)

    @named_arguments
    def fit(
        self, rows: Any, held_out: Any = None, *, eval_every: int = 0, patience: int | None = None, window: int = 0
    ) -> Iterator[Step]:
        """Trains on answered prompts and texts, and yields each step.

        Args:
          rows: a list of {"prompt", "response"}, {"messages"} (the loss covers the last answer) or texts (the loss covers every
            token), or a mapping of columns. Prompts are texts or messages.
          held_out: rows in the same form on which the loss is measured, as "held_out_loss" in nats per token; None: no rows.
          eval_every: steps between these measurements, besides the one after the last step; 0: an epoch.
          patience: stop after this many consecutive measurements without a lower loss, and keep the weights with the lowest;
            None: train all steps and keep the newest weights.
          window: 0 encodes all rows before the first step. N reads, encodes and packs them in windows of at most N rows, so
            that rows such as those of `read_rows` need not fit in memory; a malformed row raises when its window is read.

        Raises:
          UserError: there are no rows, a row is malformed or longer than the model's limit, or a row's prompt leaves no space
            for its response.
        """
        section, steps_per_epoch = self.section, 1
        kept = () if held_out is None else as_examples(held_out, "SFT.fit(held_out)")
        if checked(window, int, "SFT.fit(window)", at_least(0)):
            given = GivenRows(self, "rows", rows, window, self._encoded, PackedRowBuilder(section.row_length), "row_length")
            claimed = given.identity
        else:
            examples = as_examples(rows, "SFT.fit(rows)")
            claimed, self.cut = self._packed(examples, "SFT.fit(rows)")
            batches = EpochLoader(len(claimed.tokens), section.batch_rows, self.inputs.seed)
            steps_per_epoch = batches.steps(1)
            warn_of_same_rows("SFT.fit", examples, kept)
        measured = self._packed(kept, "SFT.fit(held_out)")[0] if kept else None

        def measure(params: Params, completed: int) -> dict[str, float]:
            del completed
            return {LOSS: held_out_loss(self.inputs.model, join(self.frozen, params), measured, section.batch_rows)}

        stopping = self._held_out(held_out, eval_every, patience, measure, steps_per_epoch)
        data = claimed if measured is None else (claimed, measured)
        self._claim(data, eval_every=eval_every, patience=patience, window=window)
        stream = streams.LOADERS["sft"]
        if not window:
            return self.fit_packed(claimed, section.steps or batches.steps(section.epochs), stream, stopping=stopping)
        train = given.open(stream, self.inputs.loop.directory)
        stopping = every_epoch(stopping, eval_every, train.steps(1, section.batch_rows))
        steps = section.steps or train.steps(section.epochs, section.batch_rows)
        return self.fit_packed(train, steps, stream, stopping=stopping)

    def _encoded(self, row: Any, where: str) -> Document:
        """The document of a row. Raises UserError, which names `where`, if it cannot be trained on."""
        document = self._encode(as_example(row, where), where)
        check_length(where, min(len(document[0]), self.section.row_length), "row_length", self.inputs.language_model)
        return document

    def _encode(self, example: Example, where: str) -> Document:
        tokenizer, (messages, text) = self.tokenizer, example
        if messages is not None:
            with styles.naming(where):
                return styles.encode_completion(tokenizer, messages, text, self.inputs.language_model.style)
        ids = [*tokenizer.begin_ids, *tokenizer.encode(text), tokenizer.eos_id]
        return ids, [1.0] * len(ids)

    def _packed(self, examples: Sequence[Example], where: str) -> tuple[PackedBatch, int]:
        """(examples, packed; how many of them were cut). where: the argument of `fit` with their rows."""
        encoded = [self._encode(example, f"{where}[{number}]") for number, example in enumerate(examples)]
        longest = min(max(len(ids) for ids, _ in encoded), self.section.row_length)
        check_length(where, longest, "row_length", self.inputs.language_model)
        try:
            packed, cut = pack(encoded, self.section.row_length)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        warn_of_cut(where, cut, len(encoded), "rows", "row_length", self.section.row_length)
        return packed, cut

    def fit_packed(
        self, rows: PackedBatch | WindowedRows, total_steps: int, stream: int, balance_coef: float = 0.0,
        stopping: EarlyStopping | None = None,
    ) -> Iterator[Step]:
        """Trains on packed rows, for the stages pretrain, sft and best_of_n, and yields each step.

        Args:
          rows: all rows, numpy arrays; or the rows of windows, which have an order of their own.
          total_steps: the number of steps.
          stream: the random stream that shuffles the rows.
          balance_coef: the weight of the experts' load-balancing loss.
          stopping: measures held-out rows, and may end training early; None trains all steps.
        """
        model, section = self.inputs.model, self.section
        in_windows = isinstance(rows, WindowedRows)
        loader: EpochLoader | InOrder = InOrder(section.batch_rows)
        if not in_windows:
            loader = EpochLoader(len(rows.tokens), section.batch_rows, self.inputs.seed, stream)
        row_length = section.row_length if in_windows else rows.tokens.shape[1]
        micro_batches = chosen(section.micro_batches, section.batch_rows, row_length, model.sharding)

        def arguments(frozen: Params | None, index: np.ndarray) -> LmArguments:
            return LmArguments(
                model=model,
                optimizer=self.optimizer,
                batch=place_rows(model.sharding, *((rows.take(index),) if in_windows else (rows, index))),
                frozen=frozen,
                micro_batches=micro_batches,
                balance_coef=balance_coef,
            )

        steps = self._train(lm_step, arguments, rows, loader, total_steps=total_steps, stopping=stopping)
        return closing(rows, steps) if in_windows else steps


def packed(tokenizer: Tokenizer, pairs: Iterable[Answered], style: str, row_length: int) -> tuple[PackedBatch, int]:
    """Packs answered prompts: (packed rows, number of documents cut at the end of a row). The loss covers the answers."""
    return pack((styles.encode_completion(tokenizer, messages, text, style) for messages, text in pairs), row_length)


def held_out_loss(model: Model, params: Params, rows: PackedBatch, batch: int) -> float:
    """The mean negative log-likelihood over all rows, in nats per token, computed `batch` rows at a time."""
    loss = tokens = 0.0
    for start in range(0, len(rows.tokens), batch):
        part = take(rows, slice(start, start + batch))
        short = batch - len(part.tokens)
        part = jax.tree.map(functools.partial(np.pad, pad_width=((0, short), (0, 0))), part)
        part_loss, part_tokens = lm_evaluate(model, params, place_rows(model.sharding, part))
        loss, tokens = loss + float(part_loss), tokens + float(part_tokens)
    return loss / max(tokens, 1.0)
