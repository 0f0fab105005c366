"""Reads a work directory, complete or not, in the layout of `docs/data_formats.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.config import Config, rounds, to_dict
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.registry.stages import STAGES, StageRecord, ordered, policies_before, stages_in_order
from jaxalign.tracking import device_times
from jaxalign.tracking.device_times import IterationTimes, read_device_times
from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.judge_audit import FILE
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.system import FAILED, RunEnd, read_end
from jaxalign.tracking.timing import PhaseTotal, read_timing


@dataclasses.dataclass(frozen=True)
class StageFiles:
    """The files of one stage; missing files are empty. `status` is "done", "running", or None without a manifest. `inputs` has
    the stages that it read, by its manifest; None without a record of them. `config` has the config fields that it depends on,
    by dotted name, `left_out` the rows that did not fit (`LEFT_OUT`), `device_times` those of a stage whose roles have
    devices of their own, and `choice` the sentences on what it chose for its devices (`MICRO_BATCHES`)."""

    name: str
    status: str | None = None
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    timing: Mapping[str, PhaseTotal] = dataclasses.field(default_factory=dict)
    inputs: tuple[str, ...] | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    device_times: Sequence[IterationTimes] = ()
    choice: str = ""

    @property
    def started(self) -> bool:
        """Whether the stage has written anything."""
        return bool(self.status or self.summary or self.metrics or self.timing)

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """The steps and values of one metric, from the rows in which it is a number."""
        rows = [row for row in self.metrics if isinstance(row.get(name), (int, float)) and "step" in row]
        return [row["step"] for row in rows], [row[name] for row in rows]


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of a work directory.

    Attributes:
      path: the directory.
      config: the run's config; empty if there is none.
      evaluation: the summary of stage evaluate; empty if there is none.
      stages: the files of every stage that is registered, planned or has a folder, by name.
      planned: the names of the stages in the config; without a config, of the stages that have started.
      records: the records of the stages that are planned or have started, in the order of the pipeline.
      audit: the audit of the judge; empty if there is none.
      later: the files of the stages of each round after the first (`config.rounds`), by round and name.
      used: the stages whose output another stage read (`used_stages`).
      end: how the run ended if it failed or was interrupted; None if it finished, goes on or was killed.
    """

    path: Path
    config: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    stages: Mapping[str, StageFiles]
    planned: tuple[str, ...] = ()
    records: tuple[StageRecord, ...] = ()
    audit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    later: Mapping[int, Mapping[str, StageFiles]] = dataclasses.field(default_factory=dict)
    used: frozenset[str] = frozenset()
    end: RunEnd | None = None

    @property
    def failure(self) -> RunEnd | None:
        """The error that ended the run; None if none did."""
        return self.end if self.end is not None and self.end.event == FAILED else None

    @property
    def by_round(self) -> Mapping[int, Mapping[str, StageFiles]]:
        """The stages that are repeated, by round and name; empty for a run of one round."""
        repeated = dict.fromkeys(name for stages in self.later.values() for name in stages)
        return {1: {name: self.stage(name) for name in repeated}, **self.later} if self.later else {}

    @property
    def runs(self) -> dict[str, StageFiles]:
        """The planned stages of every round in the order in which they run, by label."""
        last = next((name for name in reversed(self.planned) if self.later and name in self.by_round[1]), None)
        by_label: dict[str, StageFiles] = {}
        for name in self.planned:
            by_label[name] = self.stage(name)
            if name == last:
                by_label |= {rounds.label(rounds.folder(stage, number)): files
                             for number, stages in self.later.items() for stage, files in stages.items()}
        return by_label

    @property
    def models(self) -> tuple[str, ...]:
        """The models of the evaluation, in order."""
        return tuple(self.evaluation.get("models") or ())

    def stage(self, name: str) -> StageFiles:
        """The files of a stage; empty for an unknown stage."""
        return self.stages.get(name) or StageFiles(name)

    def has(self, name: str) -> bool:
        """Whether a stage is planned or has started."""
        return name in self.planned or self.stage(name).started

    def reads(self, stage: str, source: str) -> bool:
        """Whether a stage read the output of another one, by its manifest."""
        return source in (self.stage(stage).inputs or ())

    def start_of(self, stage: str) -> str:
        """The model from which a stage started: the last policy that it read by its manifest, else "base". Before the stage has
        a manifest, the last planned policy before it."""
        names, recorded = [record.name for record in self.records], self.stage(stage).inputs
        before = self.records[: names.index(stage)] if stage in names else ()
        known = self.planned if recorded is None else recorded
        return next((record.name for record in reversed(before) if record.makes_policy and record.name in known), "base")

    @property
    def kl_reference(self) -> str:
        """The model that stage evaluate measured the KL against."""
        return kl_reference(self.stage("evaluate").config, self.config)

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """The generated rows of a stage, shard by shard. Raises UserError for a line that is not JSON."""
        for path in sorted((self.path / stage).glob("rows-*.jsonl")):
            yield from read_rows(path)

    def absence(self, stage: str, content: str) -> str:
        """A sentence that explains why `content`, which `stage` writes, is missing."""
        if stage not in self.planned:
            return f"This run has no stage {stage}, which writes {content}."
        status = self.stage(stage).status
        failed = self.failure.stage if self.failure else ""
        if self.end is not None and self.end.stage == stage and (failed or status != "done"):
            how = "failed" if failed else "was interrupted"
            return f"The {stage} stage {how}; once it has finished in a resumed run, this section will show {content}."
        if status == "running":
            return f"The {stage} stage has not finished yet; once it has, this section will show {content}."
        if status == "done":
            return f"The {stage} stage finished without recording {content}."
        reason = f", because the run failed in stage {failed}" if failed else ""
        return f"The {stage} stage has not run yet{reason}; once it has, this section will show {content}."


def read_run(workdir: str | Path) -> RunFiles:
    """Reads all files except the generated rows, which `RunFiles.rows` reads.

    Raises:
        UserError: the directory is missing or has no files of a run, one of its files is damaged, or the config names a stage
          that cannot be found.
    """
    path = Path(workdir)
    if not path.is_dir():
        raise UserError(f"The work directory {path} does not exist; pass the --workdir of a run that has started.")
    config = read_config(path)
    present = {child.parent.name for child in path.glob("*/*") if child.name in _STAGE_FILES and
               ".old-" not in child.parent.name}
    asked = stages_in_order(config.get("stages") or (), f"{path / 'config.json'}: stages")
    names = dict.fromkeys([*(record.name for record in asked), *STAGES.names(), *sorted(present)])
    stages = {name: _read_stage(path / name) for name in names}
    end = read_end(path)
    if (end is None or end.event != FAILED) and not any(stage.started for name, stage in stages.items() if name != "report"):
        raise UserError(f"There is nothing to report in {path}: no stage has written anything yet; "
                        f"run `python -m jaxalign.train --workdir={path}` first.")
    evaluation = read_object(path / "summary.json") or stages["evaluate"].summary
    planned = tuple(record.name for record in asked) or tuple(name for name in names if stages[name].started)
    used = used_stages(path, planned)
    for name in set(stages) - {*planned, *(planned if used is None else used)}:
        if _contradicts(stages[name], config):  # Left by an earlier run with other options, and not used by this one.
            stages[name] = StageFiles(name)
    records = dict.fromkeys([*asked, *(record for record in STAGES if record.name in planned or stages[record.name].started)])
    later = {}
    for number in range(2, (config.get("rounds") or 1) + 1):
        repeated = rounds.repeated(config["stages"], (config.get("reward") or {}).get("source") or "preference")
        later[number] = {name: _read_stage(path / rounds.folder(name, number)) for name in repeated}
    return RunFiles(path, config, evaluation, stages, planned, ordered(records), read_object(path / FILE), later,
                    frozenset(planned) if used is None else used, end)


MANIFEST = "manifest.json"
_STAGE_FILES = (MANIFEST, "metrics.jsonl", "timing.jsonl", "summary.json")
LEFT_OUT = "left_out.json"
"""A stage's file with the rows that did not fit: {rows: {"total", "dropped", "cut"}}; only written if there are any."""
MICRO_BATCHES = "micro_batches.json"
"""A stage's file with the values of `micro_batch_tokens=auto` and `keep_gathered=auto`, and sentences on them ("reason")."""


def used_stages(workdir: Path, planned: Iterable[str]) -> frozenset[str] | None:
    """The stages whose output the stages of a run read, directly or not, by the manifests in its work directory.

    Args:
      workdir: the work directory.
      planned: the folders of the run's stages. Stages evaluate and report, which read all others, do not count as readers.

    Returns:
      The names; None if no manifest of a planned stage records what the stage read.
    """
    waiting, used, recorded = [name for name in planned if name not in ("evaluate", "report")], set(), False
    while waiting:
        inputs = _read_manifest(workdir / waiting.pop() / MANIFEST).get("inputs")
        recorded = recorded or inputs is not None
        waiting += set(inputs or ()) - used
        used |= set(inputs or ())
    return frozenset(used) if recorded else None


def kl_reference(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The model that stage evaluate measures the KL against: the policy that a preference model starts from.

    Args:
      recorded: the config in the manifest of evaluate, which has the stages of its run.
      config: the run's config, for an evaluation without a manifest.
    """
    stages = recorded.get("stages") or config.get("stages") or ()
    return next(iter(policies_before(stages, "preference")[-1:]), "base")


def _contradicts(stage: StageFiles, config: Mapping[str, Any]) -> bool:
    """Whether a stage was run with other values of the fields that it depends on than those of the config."""
    for name, recorded in stage.config.items():
        value: Any = config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != recorded:
            return True
    return False


def _read_stage(path: Path) -> StageFiles:
    manifest, metrics, timing, summary = (path / name for name in _STAGE_FILES)
    recorded = _read_manifest(manifest)
    inputs = recorded.get("inputs")
    return StageFiles(path.name, recorded.get("status"), read_object(summary), read_metrics(metrics), read_timing(timing),
                      None if inputs is None else tuple(inputs), recorded.get("config") or {}, read_object(path / LEFT_OUT),
                      read_device_times(path / device_times.FILE), str(read_object(path / MICRO_BATCHES).get("reason") or ""))


def read_config(workdir: Path) -> dict[str, Any]:
    """The config of a run; empty if there is none. Raises UserError if a section or the stages have another type."""
    path = workdir / "config.json"
    config, expected = read_object(path), to_dict(Config())
    stages = config.get("stages") or []
    wrong = [name for name, value in config.items()
             if isinstance(expected.get(name), dict) and not isinstance(value, dict | None)
             or name == "rounds" and not isinstance(value, int | None)]
    if not isinstance(stages, list) or not all(isinstance(name, str) for name in stages):
        wrong.append("stages")
    if wrong:
        raise UserError(f"{path} is damaged: {wrong[0]} is {str(config[wrong[0]])[:40]!r}; restore the file")
    return config


def _read_manifest(path: Path) -> dict[str, Any]:
    """The content of a manifest. Raises UserError if a field that is read here has another type than expected."""
    manifest = read_object(path)
    for name, kind in (("inputs", dict), ("config", dict), ("status", str)):
        if manifest.get(name) is not None and not isinstance(manifest[name], kind):
            raise UserError(f"{path} is damaged: {name} is {str(manifest[name])[:40]!r}; restore the file, or move the folder "
                            "of its stage aside to run the stage again")
    return manifest


def read_object(path: Path, kind: type = dict) -> Any:
    """A JSON object, or with kind=list an array, from a file; empty if the file does not exist. Raises UserError if the file
    has anything else."""
    if not path.exists():
        return kind()
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); fix it, or move it away and run the stage again.") from None
    if not isinstance(content, kind):
        expected = "object" if kind is dict else "array"
        raise UserError(f"{path} contains a {type(content).__name__}; a JSON {expected} is expected.")
    return content
