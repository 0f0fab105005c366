"""Warnings about training that changes too little or too much: few of the rows are read, rows are cut, the learning rate stays
far below its peak, or it is far above those that suit models of this size; and errors for rows that are too long."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import optax

from jaxalign.config import Optimizer
from jaxalign.data.loader import EpochLoader, InOrder
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.reasons import MOSTLY
from jaxalign.tracking.formatting import percent
from jaxalign.tracking.schedules import low_rate_sentence
from jaxalign.trainers.rows import Record, compared_texts


def read_share(rows: int, batch: int, steps: int) -> float:
    """The share of the rows that so many steps read, at most 1."""
    return min(1.0, steps * batch / rows)


def rows_warning(loader: EpochLoader | InOrder, steps: int) -> str | None:
    """A sentence if the steps read less than half of the rows of a loader; None for rows that are made on demand."""
    if not isinstance(loader, EpochLoader) or (share := read_share(loader.rows, loader.batch, steps)) >= MOSTLY:
        return None
    return (f"training reads {steps * loader.batch:,} of {loader.rows:,} rows ({percent(share)}); raise steps or epochs to "
            "read more")


def schedule_warning(optimizer: Optimizer | optax.GradientTransformation, steps: int) -> str | None:
    """A sentence if the learning rate is 0, or if training ends long before its warm-up; None for a user's optimizer."""
    if not isinstance(optimizer, Optimizer):
        return None
    return low_rate_sentence(optimizer.learning_rate, optimizer.warmup_steps, steps)


def warn_of_same_rows(where: str, rows: Iterable[Record], held_out: Sequence[Record]) -> None:
    """Warns if rows that a caller holds out are also rows to train on. Hashes of their texts are compared.

    where: the method that takes both.
    """
    if not held_out:
        return
    trained = {hash(compared_texts(row)) for row in rows}
    same = sum(hash(compared_texts(row)) in trained for row in held_out)
    if same:
        warn_of_extent(where, f"{same:,} of the {len(held_out):,} rows of held_out are also rows to train on, so the held-out "
                              "measures are too good; remove them from one of the two")


class UsualRates(NamedTuple):
    """Usual learning rates of AdamW for all weights (docs/python.md).

    Attributes:
      small: that of a model below `SMALL` parameters, which the default rates suit.
      large: that of a model of `LARGE` parameters or more, as in TRL, OpenRLHF and the papers.
    """

    small: float
    large: float


SMALL, LARGE = 3e7, 3e8
"""Parameters from which the default learning rates are too high, and from which the rates of large models apply."""
SUPERVISED, RL = UsualRates(1e-3, 1e-5), UsualRates(1.5e-4, 1e-6)
_FAR = 10
"""A rate needs a warning if it is more than so many times the usual one."""


def usual_rate(parameters: int, adapters: bool, rates: UsualRates = SUPERVISED) -> float:
    """The usual learning rate for a model.

    Args:
      parameters: the number of the model's parameters.
      adapters: whether only adapters are trained, which take about ten times the rate if the model is not small.
      rates: `SUPERVISED` or `RL`.
    """
    if parameters < SMALL:
        return rates.small
    return rates.large * (10 if adapters else 1) * (10 if parameters < LARGE else 1)


def rate_warning(
    optimizer: Optimizer | optax.GradientTransformation, model: Model, rates: UsualRates = SUPERVISED
) -> str | None:
    """A sentence if AdamW's learning rate is far above the usual one for a model. rates: as in `usual_rate`."""
    if not isinstance(optimizer, Optimizer) or optimizer.kind != "adamw":
        return None
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.base.abstract()))
    usual = usual_rate(parameters, model.lora is not None, rates)
    if optimizer.learning_rate <= _FAR * usual * (1 + 1e-6):
        return None
    trained = "adapters of a model" if model.lora is not None else "all weights of a model"
    if parameters < SMALL:
        size, harm = f"{parameters:,} parameters", "training may diverge"
    else:
        size, harm = f"{parameters / 1e9:.2g} billion parameters", "the model may lose what it knows"
    return (f"the learning rate is {optimizer.learning_rate:g}, but about {usual:.2g} is usual for {trained} of {size}; lower "
            f"optimizer.learning_rate, or {harm}")


def warn_of_extent(stage: str, *sentences: str | None) -> None:
    """Logs the sentences that are not None as warnings of a stage, in the first process."""
    for sentence in sentences:
        if sentence and hosts.is_first():
            logging.getLogger("jaxalign").warning(f"[{stage}] {sentence}")


def check_length(where: str, longest: int, field: str, model: LanguageModel) -> None:
    """Raises UserError if the longest row, cut to `field`, is longer than the model's `max_length`."""
    if longest > model.max_length:
        raise UserError(f"{where}: a row has {longest} tokens, but the model supports at most {model.max_length}; lower "
                        f"{field} to {model.max_length} or less, so that longer rows are cut, or remove them")


def refuse_equal(pairs: Sequence[tuple[Sequence, Sequence]], cut: Sequence[tuple[Sequence, Sequence]], max_length: int) -> None:
    """Raises UserError if pairs whose sides differ have equal sides after they were cut.

    Args:
      pairs: the two sides of each pair.
      cut: the same pairs, cut to `max_length` tokens.
    """
    equal = [i for i, ((a, b), (first, second)) in enumerate(zip(pairs, cut, strict=True)) if a != b and first == second]
    if equal:
        numbers = ", ".join(map(str, equal[:5])) + (", ..." if len(equal) > 5 else "")
        raise UserError(f"the answers of {len(equal)} of {len(pairs)} pairs differ only in tokens that are cut, since "
                        f"max_length is {max_length}; raise max_length, or remove these pairs (numbers from 0: {numbers})")


def warn_of_cut(where: str, cut: int, total: int, rows: str, field: str, length: int) -> None:
    """Warns that some of the rows are longer than `field` and lose tokens."""
    if cut and hosts.is_first():
        logging.getLogger("jaxalign").warning(
            f"{where}: {cut:,} of {total:,} {rows} are longer than {field} ({length} tokens) and are cut; raise {field}"
        )
