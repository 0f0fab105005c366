"""RL without the checks before the first update, in code that a test runs unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from jaxalign.parallel.ahead import Ahead
from jaxalign.rl.iteration import Iteration
from jaxalign.rl.step_zero import step_zero_values


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Leave out the checks, and do not compile their program ahead. It takes the longest to compile."""
    add = Ahead.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iteration, "check_start", lambda *_: None)
        patch.setattr(Ahead, "add", lambda ahead, step, *rest: None if step is step_zero_values else add(ahead, step, *rest))
        yield
