"""Stages: the records that `config.stages` selects from. Config checks, pipeline, planner and report read them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Registry, load_object


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
class StageRecord:
    """A stage of the pipeline and the properties that the rest of the package reads.

    Functions are callables or "module:attribute", imported on first use.

    Attributes:
      name: the name of the stage, of its folder in the work directory, and of its section in the config.
      stage: a `jaxalign.stages.shared.base.Stage`, or "module:attribute" of one.
      section: the default of the stage's config section (a frozen dataclass of `jaxalign.config.schema.field`s), its class, or
        "module:attribute" of either. None for a stage without options and for built-in stages, which have a section in
        Config. The fields of a custom section are set as config.NAME.FIELD.
      after: the stages that it must follow if the config has them.
      makes_policy: it writes a policy. Later stages start from the policy, and evaluation measures it.
      samples: it samples from a model, so config.NAME.max_new_tokens must leave space for a prompt, and rows are spread over
        all devices.
      uses_sampler: config.sampler samples its policy's responses.
      trains: it trains in steps, so single steps can be profiled.
      learns_from: kinds of rows ("text", "prompts", "comparisons", "judgements"), of which the data source must have at least
        one, unless another stage of the run makes them; empty: it reads no rows.
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
    makes: tuple[str, ...] = ()
    asks_judge: tuple[str, ...] = ()
    batches: tuple[Batch, ...] = ()
    programs: Callable | str | None = None
    report: Callable | str | None = None
    preview: Callable | str | None = None

    def load(self, part: str) -> Any:
        """The attribute `part` ("stage", "section", "programs" ...), imported if it is a string; None stays None.

        Raises:
          UserError: the module cannot be imported or has no such attribute.
        """
        found = getattr(self, part)
        return load_object(found, f"the {part} of stage {self.name!r}") if isinstance(found, str) else found


_PROGRAMS = "jaxalign.planner.stage_programs"
_REPORT = "jaxalign.tracking.report"
_PREVIEW = "jaxalign.stages.shared.preview"


def _builtin(name: str, programs: str | None = _PROGRAMS, **parts: Any) -> StageRecord:
    """The record of a stage whose tasks are the function of the same name in the module `programs`."""
    return StageRecord(name, f"jaxalign.stages.{name}:STAGE", programs=programs and f"{programs}:{name}", **parts)


_BUILTIN = (
    _builtin(
        "pretrain", trains=True, learns_from=("text",), report=f"{_REPORT}.training:losses",
        batches=(Batch("pretrain.batch_rows", ("pretrain.micro_batches",)),),
    ),
    _builtin(
        "revise", samples=True, learns_from=("prompts",), makes=("revisions",), asks_judge=("critique", "revise"),
        report=f"{_REPORT}.feedback:revisions", preview=f"{_PREVIEW}:revise_rows", batches=(Batch("revise.batch"),),
    ),
    _builtin(
        "sft", makes_policy=True, trains=True, learns_from=("revisions", "comparisons"), report=f"{_REPORT}.training:losses",
        preview=f"{_PREVIEW}:sft_rows", batches=(Batch("sft.batch_rows", ("sft.micro_batches",)),),
    ),
    _builtin(
        "compare", samples=True, learns_from=("prompts",), makes=("comparisons",), asks_judge=("compare",),
        report=f"{_REPORT}.feedback:labels", preview=f"{_PREVIEW}:compare_rows", batches=(Batch("compare.batch"),),
    ),
    _builtin(
        "preference", trains=True, learns_from=("comparisons",), report=f"{_REPORT}.reward_models:preference",
        preview=f"{_PREVIEW}:preference_rows", batches=(Batch("preference.batch"),),
    ),
    _builtin(
        "reward_distill", samples=True, uses_sampler=True, trains=True, learns_from=("comparisons",),
        report=f"{_REPORT}.reward_models:distilled",
        batches=(
            Batch("reward_distill.batch", ("reward_distill.samples",)),
            Batch("reward_distill.batch_pairs", ("reward_distill.micro_batches",)),
        ),
    ),
    _builtin(
        "best_of_n", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("comparisons",),
        report=f"{_REPORT}.training:losses",
        batches=(Batch("best_of_n.batch", ("best_of_n.n",)), Batch("best_of_n.batch_rows", ("best_of_n.micro_batches",))),
    ),
    _builtin(
        "dpo", makes_policy=True, trains=True, learns_from=("comparisons", "judgements"),
        report=f"{_REPORT}.training:direct", preview=f"{_PREVIEW}:dpo_rows", batches=(Batch("dpo.batch"),),
    ),
    _builtin(
        "online_dpo", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("prompts",),
        asks_judge=("compare",), report=f"{_REPORT}.training:direct",
        batches=(Batch("online_dpo.batch", ("online_dpo.minibatches",)),),
    ),
    _builtin(
        "ppo", programs="jaxalign.planner.ppo_programs", makes_policy=True, samples=True, uses_sampler=True, trains=True,
        learns_from=("prompts",), report=f"{_REPORT}.training:reinforcement", preview=f"{_PREVIEW}:ppo_rows",
        batches=(Batch("ppo.batch", ("ppo.minibatches",)),),
    ),
    _builtin(
        "evaluate", samples=True, uses_sampler=True, learns_from=("prompts", "judgements"),
        report=f"{_REPORT}.evaluation:evaluation", batches=(Batch("evaluate.batch"),),
    ),
    _builtin("report", programs=None),
)


def _in_this_order(records: Iterable[StageRecord]) -> Iterator[StageRecord]:
    """The records, with `after` set to the names of all earlier records."""
    names: tuple[str, ...] = ()
    for record in records:
        yield dataclasses.replace(record, after=names)
        names += (record.name,)


STAGES = Registry("stage", StageRecord, _in_this_order(_BUILTIN))


def stages_in_order(names: Iterable[str], where: str = "config.stages") -> tuple[StageRecord, ...]:
    """The records of `names`, each after the records that it must follow.

    Args:
      names: registered names, "package.module:attribute" or "FILE.py:attribute".
      where: the config field or argument with the names, for error messages.

    Raises:
      UserError: a name is unknown, a custom record has the name of another stage, or the stages depend on each other in a
        cycle.
    """
    found: dict[str, StageRecord] = {}
    for given in names:
        record = STAGES.get(given, where)
        clash = found.get(record.name) or (STAGES.get(record.name) if record.name in STAGES else record)
        if clash != record:
            raise UserError(f"{where} has {given!r}, a stage called {record.name!r}, and there is another stage with that "
                            "name; rename it")
        found[record.name] = record
    return ordered(found.values(), where)


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
