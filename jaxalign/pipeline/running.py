"""Runs the stages of a config in a work directory, and reads their results."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.config import Config, rounds, schema, to_dict
from jaxalign.config.arguments import as_path
from jaxalign.config.root import require_config
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.parallel.compile_cache import use_compile_cache
from jaxalign.pipeline.changes import (
    CONFIG,
    Changes,
    compare_stages,
    refusal,
    with_current_calls,
    with_current_code,
    with_style,
)
from jaxalign.pipeline.companions import Companions, accompanied
from jaxalign.pipeline.graph import Load, inputs, loader, unread
from jaxalign.registry.stages import STAGES
from jaxalign.stages.shared import manifest as manifests
from jaxalign.stages.shared.base import Stage, StageContext
from jaxalign.stages.shared.manifest import DONE, find_manifest, fingerprint, new_manifest
from jaxalign.storage import LocalStorage, Storage, write_json
from jaxalign.tracking import device_times, table
from jaxalign.tracking.sinks import identity
from jaxalign.tracking.sinks.replay import send_finished
from jaxalign.tracking.timing import rest_of
from jaxalign.tracking.workdir import LEFT_OUT, MANIFEST, MICRO_BATCHES, kl_reference, read_config, read_object, used_stages


@dataclasses.dataclass(frozen=True)
class StageResult:
    """A finished stage: its name ("ppo", or "round-2/ppo" in a later round of `config.rounds`), its folder, and its summary
    (empty if it wrote none)."""

    name: str
    directory: Path
    summary: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
      workdir: the work directory.
      stages: every stage of the config by name, in the order in which they ran.
      evaluation: the summary of stage evaluate (format: docs/data_formats.md); None if the run does not evaluate.
      report: the report's path; None if the run has no report.
    """

    workdir: Path
    stages: Mapping[str, StageResult]
    evaluation: Mapping[str, Any] | None
    report: Path | None

    def table(self) -> str:
        """The evaluation as a text table; empty if the run does not evaluate."""
        if self.evaluation is None:
            return ""
        used = used_stages(self.workdir, self.stages)
        recorded = read_object(self.workdir / "evaluate" / MANIFEST).get("config") or {}
        reference = kl_reference(recorded, read_config(self.workdir))
        return table.render(self.evaluation, tuple(self.stages) if used is None else used, reference)


def read_results(storage: Storage, stages: Sequence[str]) -> RunResult:
    """Reads the results of finished stages from their work directory."""
    folders = {name: storage.path(name) for name in stages}
    results = {name: StageResult(name, folder, read_object(folder / "summary.json")) for name, folder in folders.items()}
    evaluation = (read_object(storage.path("summary.json")) or None) if "evaluate" in results else None
    report = storage.path("report.html")
    return RunResult(storage.path(), results, evaluation, report if "report" in results and report.exists() else None)


TIMING = "timing.jsonl"
_VISIBLE_SECONDS = 30.0  # A shared file system may show stale contents of a folder for this long.
_MARK = ".processes"


def run(config: Config, workdir: str | os.PathLike, overwrite: bool = False, load: Load | None = None) -> RunResult:
    """Runs the stages of `config.stages` that are not done, in order, and prints the final table and the report's path.

    Args:
      config: the whole config.
      workdir: the work directory; created if it does not exist.
      overwrite: redo the stages whose config, files or inputs changed; the old folder is moved aside to STAGE.old-N.
      load: finds a stage by its name; by default `load_stage`.

    Returns:
      The summaries of the stages, the evaluation and the report's path.

    Raises:
      UserError: the directory is in use, a stage there was run with other settings, or an input is missing.
    """
    require_config(config, "run(config)")
    storage = LocalStorage(as_path(workdir, "run(workdir)"))
    config = with_style(config, storage)
    load = loader(config) if load is None else load
    with hosts.first_alone(storage.lock):
        _check_alike(config, storage)
        hosts.once(lambda: _make_ready(config, storage, overwrite, load))
        with accompanied(config, storage) as companions:
            names = rounds.folders(config)
            for number, name in enumerate(names):
                if _bring_to_done(name, config, storage, load, companions):
                    _release_programs(config, name, names[number + 1 :])
        hosts.wait()
        result = read_results(storage, rounds.folders(config))
        if hosts.is_first() and result.evaluation is not None:
            print("\n" + result.table())
        if hosts.is_first() and result.report is not None:
            print(f"\nReport: {result.report}")
    return result


def _check_alike(config: Config, storage: Storage) -> None:
    """Raises UserError in a process whose config differs from the first process's, or that does not see its work directory."""
    if hosts.count() == 1:
        return
    word, wanted = hosts.once(lambda: [uuid.uuid4().hex, fingerprint(to_dict(config))])
    hosts.once(lambda: storage.write(_MARK, word.encode()))
    if fingerprint(to_dict(config)) != wanted:
        raise UserError("this process's config differs from process 0's; start all processes with the same command and config "
                        "file")
    if not _appears(storage, word.encode()):
        raise UserError(f"the work directory {storage.path()} is not that of process 0; --workdir must name a folder that all "
                        "hosts share, by the same path on each")
    hosts.wait()
    hosts.once(lambda: storage.remove(_MARK))


def _appears(storage: Storage, content: bytes) -> bool:
    """Whether the mark of process 0 becomes visible within _VISIBLE_SECONDS."""
    until = time.monotonic() + _VISIBLE_SECONDS
    while time.monotonic() < until:
        if storage.read(_MARK) == content:
            return True
        time.sleep(0.2)
    return False


def check_changes(config: Config, storage: Storage, overwrite: bool, load: Load) -> Changes:
    """The stages of the work directory that a run would redo. The arguments are those of `run`.

    Raises:
      UserError: the run is not possible: a stage was run with other settings and `overwrite` is False, or it is not in
        `config.stages`; or as in `compare_stages`.
    """
    changes = compare_stages(config, storage, load)
    changed, planned = changes.stages, rounds.folders(config)
    refused = {name: differences for name, differences in changed.items() if name not in changes.extended}
    if refused and not overwrite:
        raise UserError(refusal(storage.path(), refused))
    for name in changed:
        if name not in planned:
            title = rounds.label(name)
            raise UserError(f"stage {title} in {storage.path()} was run with a different config and must be redone; "
                            f"add {rounds.parse(name)[0]} to config.stages")
    return changes


def _make_ready(config: Config, storage: Storage, overwrite: bool, load: Load) -> None:
    """Raises UserError if the run is not possible, and moves aside the stages that will be redone."""
    changes, planned = check_changes(config, storage, overwrite, load), rounds.folders(config)
    for name in changes.stages:
        aside = storage.move_aside(name)
        reason = "will include the new rounds" if name in changes.extended else "changed"
        print(f"[{rounds.label(name)}] {reason}; the old folder is now {storage.path(aside)}", flush=True)
    write_json(storage, CONFIG, to_dict(config))
    manifests_of = {name: find_manifest(storage, name) for name in planned}
    left = [name for name, manifest in manifests_of.items() if manifest is None or manifest.status != DONE]
    if left:  # Otherwise no code of a stage is loaded.
        from jaxalign.stages.shared.placements import check_placements  # Here, since it imports JAX.

        check_placements(config, {rounds.parse(name)[0] for name in left})
        if "evaluate" in left and config.evaluate.lm_eval:
            from jaxalign.stages.shared.harness import check_harness

            check_harness(config)
        for sentence in unread(config, load):
            print(f"warning: {sentence}", flush=True)


def _bring_to_done(name: str, config: Config, storage: Storage, load: Load, companions: Companions) -> bool:
    """Runs a stage, or what is left of it. Returns whether anything was left."""
    resumed = hosts.once(lambda: _begin(name, config, storage, load))
    if resumed is None:
        return False
    companions.begin(rounds.label(name))
    # Imported here, with JAX, so that a mistake in the arguments is reported at once.
    from jaxalign.parallel.freed_memory import return_freed_memory
    from jaxalign.parallel.precision import use_matmul_precision
    from jaxalign.stages.shared.micro_batches import with_micro_batches
    from jaxalign.stages.shared.spending import counted

    use_compile_cache(config.compile_cache)
    return_freed_memory()
    use_matmul_precision(config.model.matmul_precision)
    _show_devices()
    (stage_name, number), directory = rounds.parse(name), storage.path(name)
    stage = load(stage_name)
    context = StageContext(
        config=config, workdir=storage.path(), directory=directory, resumed=resumed, round=number,
        inputs=rounds.inputs_of(config, name), start=rounds.start_of(config, name),
    )
    try:
        with counted(context, stage_name), rest_of(directory / TIMING):
            stage.run(with_micro_batches(context, stage_name))
    except Exception:
        if not resumed and hosts.is_first():
            _forget(stage, name, storage)
        raise
    hosts.wait()
    hosts.once(lambda: _finish(stage, name, config, storage, context.left_out))
    if hosts.is_first():
        print(f"[{rounds.label(name)}] finished", flush=True)
    return True


def _release_programs(config: Config, name: str, later: Sequence[str]) -> None:
    """Frees the programs of sampling after the last stage that samples, if later stages need memory for others.

    name: a stage that has finished. later: the stages after it.
    """
    records = {record.name: record for record in (STAGES.get(given, "config.stages") for given in config.stages)}
    done, *left = (records[rounds.parse(other)[0]] for other in (name, *later))
    if done.samples and not any(record.samples for record in left) and any(record.programs for record in left):
        from jaxalign.rollout.forecast import release_programs

        release_programs()


@functools.cache  # once in a process
def _show_devices() -> None:
    """Prints the devices that JAX uses, and warns about accelerators of the machine that it does not use.

    All processes call it, since JAX starts its devices together: a process that starts them alone waits two minutes for the
    others. The first one prints.
    """
    from jaxalign.diagnosis.machine import devices

    found = devices()
    for finding in found if hosts.is_first() else ():
        print(f"{'warning' if finding.status == 'problem' else finding.topic}: {finding.text}", flush=True)


def _finish(stage: Stage, name: str, config: Config, storage: Storage, left_out: dict[str, dict[str, int]]) -> None:
    """Records the rows that the stage left out and its outputs, and marks it as done."""
    if left_out:
        write_json(storage, f"{name}/{LEFT_OUT}", left_out)
    stage.publish(config, storage.path())
    if config.tracking.trackers:
        send_finished(config.tracking, to_dict(config), storage.path(), storage.path(name))
    outputs = manifests.stage_outputs(storage, name) | manifests.published_outputs(storage, stage.published)
    dataclasses.replace(find_manifest(storage, name), status=DONE, outputs=outputs).write(storage, name)


def _begin(name: str, config: Config, storage: Storage, load: Load) -> bool | None:
    """Marks a stage as running. Returns whether it resumes an interrupted run, or None if the stage is done."""
    manifest, title = find_manifest(storage, name), rounds.label(name)
    if manifest is not None and manifest.status == DONE:
        if changed := manifests.published_changes(storage, manifest):
            print(f"[{title}] {', '.join(changed)} was missing or had changed, and is written again", flush=True)
            stage = load(rounds.parse(name)[0])
            stage.publish(config, storage.path())
            outputs = manifest.outputs | manifests.published_outputs(storage, stage.published)
            dataclasses.replace(manifest, outputs=outputs).write(storage, name)
        print(f"[{title}] done, nothing to compute", flush=True)
        return None
    resumed = manifest is not None
    if manifest is None:
        read = {source: find_manifest(storage, source).output_hash for source in inputs(config, name, load)}
        manifest = new_manifest(load(rounds.parse(name)[0]), config, read)
    manifest = with_current_calls(manifest, config)
    current = with_current_code(manifest, config)
    for path, mark in current.files.items():
        if mark != manifest.files[path]:
            print(f"[{title}] {Path(path).name} has changed since this stage began; its finished "
                  f"{'iterations' if 'reward' in manifest.config else 'rows'} are kept", flush=True)
    # A run may be resumed on another mesh; the manifest records the last mesh.
    dataclasses.replace(current, mesh=schema.to_plain(config.mesh)).write(storage, name)
    print(f"[{title}] {'continuing' if resumed else 'starting'}", flush=True)
    return resumed


def _forget(stage: Stage, folder: str, storage: Storage) -> None:
    """Removes the folder of a failed first start if it contains no work to resume, only setup files and empty files.

    The user can then correct the config and repeat the command without --overwrite.
    """
    setup = {manifests.FILE, MICRO_BATCHES, TIMING, device_times.FILE, identity.FILE, *stage.setup_files}
    if not any(storage.size(f"{folder}/{file}") for file in storage.list(folder) if file not in setup):
        storage.remove(folder)
