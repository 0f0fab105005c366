"""Errors for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from jaxalign.errors import UserError


def require_known(noun: str, name: str, known: Collection[str]) -> None:
    """Raises UserError, with the most similar name, if `name` is not among the known names. noun: such as "role"."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise UserError(f"{name!r} is not a {noun}; "
                        + (f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(known)}"))
