"""Stages: the records that `config.stages` selects from. Config checks, pipeline, planner and report read them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Record, Registry
from jaxalign.registry.declarations import declared


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of a stage; the mesh must be able to split its rows.

    Attributes:
      rows: the dotted config field with its size, such as "ppo.batch".
      factors: dotted config fields; their product must divide the size. A value of 0 counts as 1.
    """

    rows: str
    factors: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StageRecord(Record):
    """A stage of the pipeline and the properties that the rest of the package reads.

    Functions are callables or "module:attribute", imported on first use.

    Attributes:
      name: the name of the stage, of its folder in the work directory, and of its section in the config.
      stage: a subclass of `jaxalign.stages.shared.base.Stage` or an instance of one, or "module:attribute" of either.
      section: the default of the stage's config section (a frozen dataclass of `jaxalign.config.schema.field`s), its class, or
        "module:attribute" of either. Its fields are set as config.NAME.FIELD. None for a stage without options, and for a
        stage whose section is a field of `jaxalign.config.Config`.
      after: the stages that it must follow if the config has them.
      makes_policy: it writes a policy. Later stages start from the policy, and evaluation measures it.
      samples: it samples from a model, so config.NAME.max_new_tokens must leave space for a prompt, and rows are spread over
        all devices.
      uses_sampler: config.sampler samples its policy's responses.
      trains: it trains in steps, so single steps can be profiled.
      learns_from: kinds of rows (`jaxalign.registry.data_sources.KINDS`), of which the data source must have at least one,
        unless another stage of the run makes them; empty: it reads no rows.
      windows: it reads rows in windows, or the prompts of one window, if `config.data.window` is above 0.
      makes: the kinds of rows that it makes for later stages: "revisions" or "comparisons".
      asks_judge: the methods of the judge of `config.feedback` that it calls.
      batches: its batches.
      programs: `function(run: planner.programs.Run) -> list[planner.programs.Task]`, its tasks with the jitted steps that they
        call, for the planner's arithmetic and for ahead-of-time compilation; None: it has nothing worth planning.
      report: `function(run: tracking.workdir.RunFiles) -> tracking.report.blocks.ReportSection` or a list of sections; None:
        the report only names the stage. Stages with the same function share its sections.
      preview: `function(context, tokenizer, count) -> list[tracking.tokens.TokenRow]`, the first rows that the stage trains
        on, for `jaxalign.preview`; None: nothing to show.
    """

    name: str
    stage: Any
    section: Any = None
    after: tuple[str, ...] = ()
    makes_policy: bool = False
    samples: bool = False
    uses_sampler: bool = False
    trains: bool = False
    learns_from: tuple[str, ...] = ()
    windows: bool = False
    makes: tuple[str, ...] = ()
    asks_judge: tuple[str, ...] = ()
    batches: tuple[Batch, ...] = ()
    programs: Callable | str | None = None
    report: Callable | str | None = None
    preview: Callable | str | None = None

    _where = "the {part} of stage {name!r}"

    def load(self, part: str = "stage") -> Any:
        """The field `part`, imported if it is a string; None stays None. A stage is returned as an instance.

        Raises:
          UserError: the module cannot be imported or has no such attribute.
        """
        value = super().load(part)
        return value() if part == "stage" and isinstance(value, type) else value


_BUILTIN = (
    "pretrain", "revise", "sft", "compare", "preference", "reward_distill", "best_of_n", "dpo", "online_dpo", "ppo", "evaluate",
    "report",
)
"""The modules of `jaxalign.stages` that declare the built-in stages, in the order of the graph."""


def _builtin() -> Iterator[StageRecord]:
    """The records of the built-in stages. Each follows all earlier ones."""
    for index, record in enumerate(declared(StageRecord, (f"jaxalign.stages.{name}" for name in _BUILTIN))):
        yield dataclasses.replace(record, after=_BUILTIN[:index])


STAGES = Registry("stage", StageRecord, _builtin)


def stages_in_order(names: Iterable[str], where: str = "config.stages") -> tuple[StageRecord, ...]:
    """The records of `names`, each after the records that it must follow.

    Args:
      names: registered names, "package.module:attribute" or "FILE.py:attribute".
      where: the config field or argument with the names, for error messages.

    Raises:
      UserError: a name is unknown, a custom record has the name of another stage, or the stages depend on each other in a
        cycle.
    """
    records: dict[str, StageRecord] = {}
    for given in names:
        record = STAGES.get(given, where)
        clash = records.get(record.name) or (STAGES.get(record.name) if record.name in STAGES else record)
        if clash != record:
            raise UserError(f"{where} has {given!r}, a stage called {record.name!r}, and there is another stage with that "
                            "name; rename it")
        records[record.name] = record
    return ordered(records.values(), where)


def ordered(records: Iterable[StageRecord], where: str = "config.stages") -> tuple[StageRecord, ...]:
    """The records in topological order: each after the records that it must follow, otherwise in the order given.

    Raises:
      UserError: stages depend on each other in a cycle.
    """
    waiting, done = {record.name: record for record in records}, []
    while waiting:
        ready = next((record for record in waiting.values() if waiting.keys().isdisjoint(record.after)), None)
        if ready is None:
            raise UserError(f"{where}: the stages {', '.join(waiting)} depend on each other in a cycle; change the `after` of "
                            "their records")
        done.append(waiting.pop(ready.name))
    return tuple(done)


def made_before(stages: Iterable[str], before: str) -> set[str]:
    """The kinds of rows that the stages in `stages` make before the stage `before`."""
    earlier = itertools.takewhile(lambda record: record.name != before, stages_in_order(stages))
    return {kind for record in earlier for kind in record.makes}


def policies_before(stages: Iterable[str], before: str) -> tuple[str, ...]:
    """The names of the stages in `stages` that write a policy and come before the stage `before`, in order.

    Args:
      stages: names as in `config.stages`.
      before: the name of a stage, which need not be in `stages`.
    """
    stages = tuple(stages)
    planned = {record.name for record in stages_in_order(stages)}
    records = stages_in_order(stages if before in planned else (*stages, before))
    earlier = records[: [record.name for record in records].index(before)]
    return tuple(record.name for record in earlier if record.makes_policy)


def policy_makers(stages: Iterable[str] | None = None) -> tuple[str, ...]:
    """The names of the stages that write a policy, in order. stages: the stages to search; None: all registered stages."""
    records = STAGES if stages is None else stages_in_order(stages)
    return tuple(record.name for record in records if record.makes_policy)
