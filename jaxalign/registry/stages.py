"""Stages: what `config.stages` names. Config checks, pipeline, planner and report read these records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Registry, load_object


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of rows that a stage makes, which the mesh must be able to split.

    Attributes:
      rows: the dotted config field that holds its size, such as "ppo.batch".
      factors: the dotted config fields whose product must divide it; a field that is 0 counts as 1.
    """

    rows: str
    factors: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """A stage of the pipeline and what the rest of the program needs to know about it.

    Functions are callables or "module:attribute", imported when they are first used.

    Attributes:
      name: the folder of the stage in the work directory, and of its section in the config.
      stage: a `jaxalign.stages.shared.base.Stage`, or "module:attribute" of one.
      section: the default of the stage's config section (a frozen dataclass of `jaxalign.config.schema.field`s), its class, or
        "module:attribute" of either. None for a built-in stage, whose section is a field of Config, and for a stage without
        options. The fields of a user's section are set as config.NAME.FIELD.
      after: the stages that it must follow where the config has them.
      makes_policy: it writes a policy, from which later stages start and which evaluation measures.
      samples: it samples from a model, so config.NAME.max_new_tokens must leave room for a prompt, and rows are spread over
        all devices.
      uses_sampler: its policy's responses are sampled by config.sampler.
      trains: it trains in steps, so single steps can be profiled.
      learns_from: the kinds of rows ("text", "prompts", "comparisons", "judgements") of which the data source must have at
        least one; empty: it reads none.
      batches: its batches.
      programs: `function(run: planner.programs.Run) -> list[planner.programs.Program]`, every jitted step that it calls, for
        ahead-of-time compilation; None: it compiles nothing worth planning.
      workload: `function(config, prompt, examples) -> list[planner.workload.Task]`, its work for the planner's arithmetic;
        None: it has no task. `prompt` is the length of the longest prompt, `examples` the rows of the data file; either may
        be None.
      report: `function(run: tracking.workdir.RunFiles) -> tracking.report.blocks.Section` or a list of sections; None: the
        report only names the stage. Stages that share a function share its sections.
      preview: `function(context, tokenizer, count) -> list[tracking.tokens.TokenRow]`, the first rows that the stage learns
        from, for `jaxalign.preview`; None: there is nothing to show.
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
    batches: tuple[Batch, ...] = ()
    programs: Callable | str | None = None
    workload: Callable | str | None = None
    report: Callable | str | None = None
    preview: Callable | str | None = None

    def load(self, part: str) -> Any:
        """The attribute `part` ("stage", "section", "programs" ...), imported where it is a string; None stays None.

        Raises:
          UserError: the module cannot be imported or has no such attribute.
        """
        found = getattr(self, part)
        return load_object(found, f"the {part} of stage {self.name!r}") if isinstance(found, str) else found


_PROGRAMS, _WORK = "jaxalign.planner.stage_programs", "jaxalign.planner.stage_workloads"
_REPORT = "jaxalign.tracking.report"
_PREVIEW = "jaxalign.stages.shared.preview"


def _builtin(name: str, programs: str | None = _PROGRAMS, workload: str | None = _WORK, **parts: Any) -> StageRecord:
    """The record of a stage whose functions are called like itself, in the modules `programs` and `workload`."""
    programs, workload = (place and f"{place}:{name}" for place in (programs, workload))
    return StageRecord(name, f"jaxalign.stages.{name}:STAGE", programs=programs, workload=workload, **parts)


_BUILTIN = (
    _builtin(
        "pretrain", trains=True, learns_from=("text",), report=f"{_REPORT}.training:losses",
        batches=(Batch("pretrain.batch_rows", ("pretrain.micro_batches",)),),
    ),
    _builtin(
        "revise", samples=True, learns_from=("comparisons",), report=f"{_REPORT}.feedback:revisions",
        batches=(Batch("revise.batch"),),
    ),
    _builtin(
        "sft", makes_policy=True, trains=True, learns_from=("comparisons",), report=f"{_REPORT}.training:losses",
        preview=f"{_PREVIEW}:sft_rows", batches=(Batch("sft.batch_rows", ("sft.micro_batches",)),),
    ),
    _builtin(
        "compare", samples=True, learns_from=("comparisons",), report=f"{_REPORT}.feedback:labels",
        batches=(Batch("compare.batch"),),
    ),
    _builtin(
        "preference", trains=True, learns_from=("comparisons",), report=f"{_REPORT}.reward_models:preference",
        preview=f"{_PREVIEW}:preference_rows", batches=(Batch("preference.batch"),),
    ),
    _builtin(
        "reward_distill", workload=None, samples=True, uses_sampler=True, trains=True, learns_from=("comparisons",),
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
        "online_dpo", makes_policy=True, samples=True, uses_sampler=True, trains=True, learns_from=("comparisons",),
        report=f"{_REPORT}.training:direct",
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
    _builtin("report", programs=None, workload=None),
)


def _in_this_order(records: Iterable[StageRecord]) -> Iterator[StageRecord]:
    """The records, each with all before it as the stages that it must follow."""
    names: tuple[str, ...] = ()
    for record in records:
        yield dataclasses.replace(record, after=names)
        names += (record.name,)


STAGES = Registry("stage", StageRecord, _in_this_order(_BUILTIN))


def stages_in_order(names: Iterable[str], where: str = "config.stages") -> tuple[StageRecord, ...]:
    """The records of `names`, each after those that it must follow.

    Args:
      names: registered names, "package.module:attribute" or "FILE.py:attribute".
      where: the config field or argument that names them, for error messages.

    Raises:
      UserError: a name is unknown, a user's record has the name of another stage, or the stages must follow each other in a
        circle.
    """
    found: dict[str, StageRecord] = {}
    for given in names:
        record = STAGES.get(given, where)
        clash = found.get(record.name) or (STAGES.get(record.name) if record.name in STAGES else record)
        if clash != record:
            raise UserError(f"{where} has {given!r}, a stage called {record.name!r}, and there is another stage of that name; "
                            "give it another name")
        found[record.name] = record
    return ordered(found.values(), where)


def ordered(records: Iterable[StageRecord], where: str = "config.stages") -> tuple[StageRecord, ...]:
    """The records, each behind those that it follows. Among those that may come next, the order given is kept.

    Raises:
      UserError: stages must follow each other in a circle.
    """
    waiting, done = {record.name: record for record in records}, []
    while waiting:
        ready = next((record for record in waiting.values() if waiting.keys().isdisjoint(record.after)), None)
        if ready is None:
            raise UserError(f"{where}: the stages {', '.join(waiting)} must follow each other in a circle; change the `after` "
                            "of their records")
        done.append(waiting.pop(ready.name))
    return tuple(done)


def policies_before(stages: Iterable[str], before: str) -> tuple[str, ...]:
    """The names of those of `stages` that make a policy and come before the stage `before`, in order.

    Args:
      stages: names as in `config.stages`.
      before: the name of a stage, among them or not.
    """
    stages = tuple(stages)
    planned = {record.name for record in stages_in_order(stages)}
    records = stages_in_order(stages if before in planned else (*stages, before))
    earlier = records[: [record.name for record in records].index(before)]
    return tuple(record.name for record in earlier if record.makes_policy)


def policy_makers(stages: Iterable[str] | None = None) -> tuple[str, ...]:
    """The names of those of `stages`, by default of all registered ones, that make a policy, in order."""
    records = STAGES if stages is None else stages_in_order(stages)
    return tuple(record.name for record in records if record.makes_policy)
