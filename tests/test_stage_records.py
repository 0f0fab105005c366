"""Stages are records that config, pipeline, planner and report read."""

import dataclasses

import pytest

from jaxalign.config import default_for
from jaxalign.config.schema import get
from jaxalign.errors import UserError
from jaxalign.registry.stages import STAGES, StageRecord, stages_in_order
from jaxalign.stages.shared.base import Stage


def names(records):
    return tuple(record.name for record in records)


@pytest.mark.parametrize("record", tuple(STAGES), ids=lambda record: record.name)
def test_everything_that_a_built_in_record_names_exists(record):
    assert isinstance(record.load("stage"), Stage) and record.load("stage").name == record.name
    for part in ("programs", "report", "preview"):
        assert getattr(record, part) is None or callable(record.load(part))
    for batch in record.batches:
        assert all(isinstance(get(default_for(()), field), int) for field in (batch.rows, *batch.factors))
    assert record.name == "report" or dataclasses.is_dataclass(getattr(default_for(()), record.name))


def test_stages_are_sorted_into_the_order_of_the_graph():
    assert names(stages_in_order(("report", "sft", "pretrain"))) == ("pretrain", "sft", "report")


def test_a_users_stage_keeps_its_place_or_follows_the_stages_it_depends_on():
    STAGES.register(StageRecord("mine", "somewhere:STAGE", after=("sft",)))
    try:
        assert names(stages_in_order(("sft", "mine", "ppo", "report"))) == ("sft", "mine", "ppo", "report")
        assert names(stages_in_order(("mine", "sft", "ppo", "report"))) == ("sft", "mine", "ppo", "report")
    finally:
        STAGES.unregister("mine")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match=r"config\.stages is 'stf'; one of pretrain, revise, sft,.* is expected"):
        stages_in_order(("stf",))


def test_a_record_with_the_name_of_another_stage_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("from jaxalign.registry.stages import StageRecord\nRECORD = StageRecord('sft', 'a:B')\n")
    with pytest.raises(UserError, match="there is another stage with that name; rename it"):
        stages_in_order(("pretrain", f"{tmp_path / 'mine.py'}:RECORD"))


def test_stages_with_circular_dependencies_are_refused():
    STAGES.register(StageRecord("first", "somewhere:STAGE", after=("second",)))
    STAGES.register(StageRecord("second", "somewhere:STAGE", after=("first",)))
    try:
        with pytest.raises(UserError, match="first, second depend on each other in a cycle"):
            stages_in_order(("first", "second"))
    finally:
        STAGES.unregister("first")
        STAGES.unregister("second")
