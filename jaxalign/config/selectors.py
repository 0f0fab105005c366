"""Parses `config.profile`, the steps to profile."""

from __future__ import annotations

import re

from jaxalign.errors import UserError

_TRACED = re.compile(r"(?P<stage>\w+):(?P<first>\d+)(:(?P<count>[1-9]\d*))?")


def traced_steps(spec: str) -> tuple[str, int, int]:
    """Parses STAGE:STEP or STAGE:STEP:COUNT into (stage, first step, number of steps, by default 1).

    Raises:
        UserError: `spec` has neither form.
    """
    match = _TRACED.fullmatch(spec)
    if match is None:
        raise UserError(f"config.profile is {spec!r}; STAGE:STEP or STAGE:STEP:COUNT is expected, such as ppo:10:3")
    return match["stage"], int(match["first"]), int(match["count"] or 1)
