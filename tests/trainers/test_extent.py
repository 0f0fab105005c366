"""Warnings about training that changes little."""

from __future__ import annotations

import optax
import pytest

from jaxalign.config import Optimizer
from jaxalign.data.loader import EpochLoader, InOrder
from jaxalign.trainers.extent import read_share, rows_warning, schedule_warning
from jaxalign.trainers.sft import SFT
from tests.trainers.small import EXAMPLES, language_model


def test_steps_that_read_less_than_half_of_the_rows_are_told():
    assert read_share(50_000, 8, 10) == pytest.approx(0.0016) and read_share(10, 8, 10) == 1.0
    said = rows_warning(EpochLoader(50_000, 8, 0), 10)
    assert said == "training reads 80 of 50,000 rows (0.2%); raise steps or epochs to read more"
    assert rows_warning(EpochLoader(160, 8, 0), 10) is None and rows_warning(EpochLoader(161, 8, 0), 10) is not None
    assert rows_warning(InOrder(8), 1) is None


@pytest.mark.parametrize(("optimizer", "steps", "said"), [
    (Optimizer(learning_rate=0), 20, "the learning rate is 0, so no weight changes"),
    (Optimizer(warmup_steps=500), 20, "the warm-up has 500 steps but training 20, so the learning rate reaches only 4.0% of "
                                      "its peak; lower warmup_steps"),
    (Optimizer(warmup_steps=10), 9, None), (Optimizer(), 1, None), (optax.sgd(0.0), 1, None),
])
def test_a_schedule_that_hardly_changes_the_weights_is_told(optimizer, steps, said):
    assert schedule_warning(optimizer, steps) == said


def test_a_trainer_tells_both_before_its_first_step(caplog):
    trainer = SFT(language_model(), steps=1, batch_rows=1, row_length=48, optimizer=Optimizer(learning_rate=0.0))
    next(trainer.fit(EXAMPLES * 4))
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("[SFT] training reads 1 of ") and said[1] == "[SFT] the learning rate is 0, so no weight changes"
