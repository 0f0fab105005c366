"""Finds the stages of a work directory that had a different config, files or inputs, or whose outputs have changed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.config import Config, rounds, schema, to_dict
from jaxalign.config.arguments import as_path
from jaxalign.config.results import REPEATED_CALLS, decides_results
from jaxalign.config.root import require_config
from jaxalign.data.chat.model_style import check_data, resolve_auto
from jaxalign.errors import UserError
from jaxalign.pipeline.graph import Load, loader, read_graph
from jaxalign.registry.judges import judge_field, judge_file
from jaxalign.stages.shared.manifest import (
    DONE,
    Manifest,
    file_fingerprint,
    find_manifest,
    leaves_of,
    new_manifest,
    output_changes,
)
from jaxalign.storage import LocalStorage, Storage, read_json

CONFIG = "config.json"
_SHOWN = 12  # An error lists this many differences per stage and counts the others.


@dataclasses.dataclass(frozen=True)
class Changes:
    """The stages of a work directory that are out of date.

    Attributes:
      stages: the differences of each stage, by folder.
      extended: the folders that are out of date only because they also read rounds that are new.
    """

    stages: dict[str, list[str]]
    extended: frozenset[str]


def find_changes(config: Config, workdir: str | os.PathLike | Storage, load: Load | None = None) -> dict[str, list[str]]:
    """The stages of `workdir` that are out of date, each with its differences, by folder.

    Takes the arguments of `compare_stages` and raises the same errors.
    """
    require_config(config, "find_changes(config)")
    storage = workdir if hasattr(workdir, "read") else as_path(workdir, "find_changes(workdir)")
    return compare_stages(config, storage, load).stages


def compare_stages(config: Config, workdir: str | os.PathLike | Storage, load: Load | None = None) -> Changes:
    """Compares the stages of `workdir` with the config.

    Only the stages that will run, and the stages that they read, are checked. A stage's code is loaded only if it has no
    manifest, to compute its output hash, or if the last run had a different config, to find its inputs.

    Raises:
      UserError: a stage that another stage reads is neither done nor in `config.stages`, or a run did not write its folder.
    """
    storage = LocalStorage(workdir) if isinstance(workdir, str | os.PathLike) else workdir
    config = with_style(config, storage)
    load = loader(config) if load is None else load
    manifests = functools.cache(functools.partial(find_manifest, storage))
    graph = read_graph(config, manifests, load, as_recorded=_is_last_config(config, storage))
    planned = rounds.folders(config)
    moved = MovedFiles([manifest for name in graph if (manifest := manifests(name))], config, load)
    changed: dict[str, list[str]] = {}
    extended: set[str] = set()
    output: dict[str, str] = {}
    for name, sources in graph.items():
        manifest = manifests(name)
        if manifest is None:
            if storage.list(name) or storage.read(name) is not None:
                raise UserError(f"{storage.path(name)} exists but was not written by a run (it has no manifest.json); move it "
                                "away, or choose another --workdir")
            stage = load(rounds.parse(name)[0])
            output[name] = new_manifest(stage, config, {source: output[source] for source in sources}).output_hash
            continue
        if manifest.status != DONE and name not in planned:
            raise UserError(f"stage {rounds.label(name)} is unfinished in {storage.path()}, and a later stage reads it; add "
                            f"{rounds.parse(name)[0]} to config.stages")
        manifest = with_current_code(with_current_calls(manifest, config), config)
        differences = _differences(manifest, config, moved)
        if manifest.status == DONE:
            differences += output_changes(storage, name, manifest)
        redone = [s for s in sources if s in changed or output[s] != manifest.inputs.get(s, output[s])]
        before, now = set(manifest.inputs), set(sources)
        adds_rounds = before < now and all(rounds.parse(source)[1] > 1 for source in now - before)
        if not differences and adds_rounds and extended.issuperset(redone):
            extended.add(name)
        if before != now:
            listed, listed_now = (", ".join(folders) or "nothing" for folders in (manifest.inputs, sources))
            differences.append(f"it read {listed} and would now read {listed_now}")
        differences += [f"its input {rounds.label(source)} changes" for source in redone]
        if differences:
            changed[name] = differences
        output[name] = manifest.output_hash
    return Changes(changed, frozenset(extended))


def with_current_calls(manifest: Manifest, config: Config) -> Manifest:
    """The manifest of a stage, with the current values of `REPEATED_CALLS` if the stage is unfinished."""
    if manifest.status == DONE or not isinstance(manifest.config.get("reward"), dict):
        return manifest
    names = [field.partition(".")[2] for field in REPEATED_CALLS]
    now = {name: getattr(config.reward, name) for name in names if name in manifest.config["reward"]}
    return dataclasses.replace(manifest, config=manifest.config | {"reward": manifest.config["reward"] | now})


def with_current_code(manifest: Manifest, config: Config) -> Manifest:
    """The manifest of a stage, with the current hashes of the files of its judge and its reward if the stage is unfinished.

    Code that raised an error can then be corrected without discarding the finished rows or iterations. A file that another
    config field of the stage names too, such as a data source in the same file, keeps its recorded hash.
    """
    if manifest.status == DONE:
        return manifest
    field = judge_field(config, manifest.stage)
    files, code = {judge_file(config, manifest.stage): field}, {"feedback.judge", field}
    if isinstance(manifest.config.get("reward"), dict):
        files[Path(config.reward.callable.rpartition(":")[0]).expanduser()] = "reward.callable"
        code.add("reward.callable")
    others = {Path(value.rpartition(":")[0]).expanduser() for leaf, value in manifest.fields().items()
              if isinstance(value, str) and leaf not in code}
    now = {str(path): file_fingerprint(path, name) for path, name in files.items()
           if path is not None and path not in others and str(path) in manifest.files and path.exists()}
    return dataclasses.replace(manifest, files=manifest.files | now)


def with_style(config: Config, storage: Storage) -> Config:
    """`resolve_auto` of the config, whose data is checked. If the model's folder no longer exists, "auto" is the style of the
    last run with it."""
    try:
        last = read_json(storage, CONFIG)
        recorded = last["data"]["style"] if last["model"]["path"] == config.model.path else None
    except (OSError, ValueError, TypeError, KeyError):
        recorded = None
    check_data(config)
    return resolve_auto(config, recorded)


def refusal(workdir: Path, changed: Mapping[str, list[str]]) -> str:
    """The error text for stages that are out of date."""
    lines = [f"{workdir} has stages that were run with a different config or whose files have changed (nothing "
             "was written; choose another --workdir, or give --overwrite to redo them, which keeps the old folders as "
             "STAGE.old-N):"]
    for name, differences in changed.items():
        rest = len(differences) - _SHOWN
        shown = differences[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        lines += [f"  [{rounds.label(name)}] {difference}" for difference in shown]
    return "\n".join(lines)


def _is_last_config(config: Config, storage: Storage) -> bool:
    """Whether the last run that passed the checks had this config, except for the mesh and the placement; the recorded inputs
    are then valid."""
    ignored = {"mesh": None, "placement": None}
    try:
        return read_json(storage, CONFIG) | ignored == to_dict(config) | ignored
    except (OSError, ValueError, TypeError):
        return False


def _differences(manifest: Manifest, config: Config, moved: MovedFiles) -> list[str]:
    """The differences between the stage's recorded config and files and the current ones: "config.NAME was OLD and is NEW".

    A field that may change does not count (`config/results.py`), nor one that did not exist then and has its default now:
    defaults keep the earlier behaviour. A path does not count if its files were only moved to another folder.
    """
    before = manifest.fields()
    usual: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for leaves, of_config in ((usual, resolve_auto(type(config)())), (after, config)):
        for name in manifest.config:
            with contextlib.suppress(KeyError):  # A name that the config does not have is left out.
                leaves |= leaves_of(schema.to_plain(schema.get(of_config, name)), name)
    after = {leaf: value for leaf, value in after.items() if leaf in before or value != usual[leaf]}
    differences, moved_away = [], set[str]()
    for leaf in sorted(filter(decides_results, before.keys() | after.keys())):
        was, now = (repr(side[leaf]) if leaf in side else "absent" for side in (before, after))
        if was != now:
            files = moved.find(before.get(leaf), after.get(leaf))
            differences += [] if files else [f"config.{leaf} was {was} and is {now}"]
            moved_away |= files
    for path, old in manifest.files.items():
        # A deleted file does not invalidate earlier results; a stage that still needs it reports it.
        if path not in moved_away and Path(path).exists() and file_fingerprint(Path(path), path) != old:
            differences.append(f"the content of {path} has changed")
    return differences


class MovedFiles:
    """Compares the files that the stages of a work directory have read with those that they would read now."""

    def __init__(self, manifests: Sequence[Manifest], config: Config, load: Load):
        """
        Args:
          manifests: the manifests of all stages in the work directory.
          config: the current config.
          load: finds a stage by its name. It is called only if a path differs.
        """
        self._recorded = {file: content for manifest in manifests for file, content in manifest.files.items()}
        self._current = functools.cache(
            lambda: {str(file) for manifest in manifests for file in load(manifest.stage).files(config)}
        )
        self._find = functools.cache(self._compare)  # The files of a model may be large.

    def find(self, was: Any, now: Any) -> set[str]:
        """The recorded files of a config field, if they were only moved.

        They are if the stages find files of the same names and contents at the new path. The last name of the path must be
        the same too, because the ids of prompts contain it.

        Args:
          was, now: the recorded and the current value of the field: a path or a list of paths; others were not moved.

        Returns:
          The paths that were recorded; empty if the files differ, or if the stages have read no file at a path.
        """
        before, after = ([value] if isinstance(value, str) else value for value in (was, now))
        if not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
            return set()
        if not all(isinstance(value, str) for value in (*before, *after)):
            return set()
        found = [self._find(old, new) for old, new in zip(before, after, strict=True) if old != new]
        return set().union(*found) if all(found) else set()

    def _compare(self, was: str, now: str) -> set[str]:
        """`find` for one path. Files that cannot be found or read were not moved."""
        if not Path(was).name or Path(was).name != Path(now).name:
            return set()
        try:
            old, new = Path(was).expanduser(), Path(now).expanduser()
            places = _places(old, self._recorded)
            for place in places:
                file = new / place
                if not file.exists() or file_fingerprint(file, now) != self._recorded[str(old / place)]:
                    return set()
            moved = bool(places) and places == _places(new, self._current())
        except (RuntimeError, UserError):  # `expanduser` does not know a user of another machine.
            return set()
        return {str(old / place) for place in places} if moved else set()


def _places(folder: Path, files: Iterable[str]) -> set[Path]:
    """The paths of files in a folder, or the empty path if the folder is a file itself."""
    return {Path(file).relative_to(folder) for file in files if Path(file).is_relative_to(folder)}
