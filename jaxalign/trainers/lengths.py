"""Lengths of training rows against the limit of the model, and warnings about rows that are cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.parallel import hosts


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
