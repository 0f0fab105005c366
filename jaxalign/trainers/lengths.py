"""Lengths of training rows against the limit of the model, and warnings about rows that are cut."""

from __future__ import annotations

import logging

from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.parallel import hosts


def check_length(where: str, longest: int, field: str, model: LanguageModel) -> None:
    """Raises UserError if the longest row, cut to `field`, is longer than the model's `max_length`."""
    if longest > model.max_length:
        raise UserError(f"{where}: a row has {longest} tokens, but the model supports at most {model.max_length}; lower "
                        f"{field} to {model.max_length} or less, so that longer rows are cut, or remove them")


def warn_of_cut(where: str, cut: int, total: int, rows: str, field: str, length: int) -> None:
    """Warns that some of the rows are longer than `field` and lose tokens."""
    if cut and hosts.is_first():
        logging.getLogger("jaxalign").warning(
            f"{where}: {cut:,} of {total:,} {rows} are longer than {field} ({length} tokens) and are cut; raise {field}"
        )
