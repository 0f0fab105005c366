"""SFT.fit with windows of rows: every row once in an epoch, exact resume, and its refusals."""

from __future__ import annotations

import itertools

import pytest

from jaxalign.config import Optimizer
from jaxalign.errors import UserError
from jaxalign.trainers.sft import SFT
from tests.trainers.small import EXAMPLES, language_model

FIELDS = {
    "batch_rows": 2,
    "row_length": 48,
    "checkpoint_every": 2,
    "optimizer": Optimizer(learning_rate=1e-2, schedule="constant"),
}
ROWS = [*EXAMPLES, *({"prompt": row["prompt"], "response": f"{row['response']} It is."} for row in EXAMPLES)]


def losses(steps):
    return [step.metrics["loss"] for step in steps]


@pytest.mark.medium
def test_a_resumed_run_in_windows_equals_an_uninterrupted_one(tmp_path):
    trainer = SFT(language_model(), steps=7, **FIELDS)
    whole = losses(trainer.fit(ROWS, window=3))
    assert len(whole) == 7
    first = SFT(language_model(), steps=7, directory=tmp_path / "run", **FIELDS)
    begun = losses(itertools.islice(first.fit(ROWS, window=3), 4))
    rest = losses(SFT(language_model(), steps=7, directory=tmp_path / "run", **FIELDS).fit(ROWS, window=3))
    assert begun == whole[:4] and rest == whole[-len(rest) :] and len(rest) < 7
    other = SFT(language_model(), steps=7, directory=tmp_path / "run", **FIELDS)
    with pytest.raises(UserError, match="contains a run with different window"):
        other.fit(ROWS, window=4)


def test_a_window_of_all_rows_takes_the_steps_of_rows_in_memory():
    """Both learn from the same tokens in an epoch: every answer token once."""
    fields = FIELDS | {"batch_rows": 1}
    memory, windows = (list(SFT(language_model(), **fields).fit(EXAMPLES, window=window)) for window in (0, 100))
    assert len(memory) == len(windows)
    assert sum(step.metrics["tokens"] for step in memory) == sum(step.metrics["tokens"] for step in windows)


def test_held_out_rows_are_measured_at_the_end():
    trainer = SFT(language_model(), steps=3, **FIELDS)
    steps = list(trainer.fit(ROWS, EXAMPLES[:2], window=4))
    assert steps[-1].metrics["held_out_loss"] > 0


def test_rows_that_cannot_be_read_in_windows_are_refused():
    trainer = SFT(language_model(), steps=2, **FIELDS)
    with pytest.raises(UserError, match="of type generator; rows with a length and an index from 0"):
        trainer.fit((row for row in ROWS), window=4)
    with pytest.raises(UserError, match=r"SFT.fit\(window\) is -1"):
        trainer.fit(ROWS, window=-1)
    with pytest.raises(UserError, match=r"SFT.fit\(rows\)\[3\]"):
        list(trainer.fit([*ROWS[:3], {"prompt": "?"}], window=4))
