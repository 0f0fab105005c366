"""The manifest of a stage's folder, from which the pipeline knows whether the stage is done, interrupted or out of date.

A manifest records the config fields, the files and the outputs of earlier stages that the stage was run with. A field that may
change while the stage is unfinished (`config/results.py`) has the value of the first start. Outputs are deterministic, so a
stage's output hash is the hash of its inputs; computing it reads no large output files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import Config, schema
from jaxalign.data.sources.rows import data_identity
from jaxalign.data.sources.tfds_part import is_tfds
from jaxalign.errors import UserError
from jaxalign.stages.shared.base import Stage
from jaxalign.storage import LocalStorage, Storage, read_json, write_json
from jaxalign.tracking import device_times
from jaxalign.tracking.sinks import identity
from jaxalign.tracking.workdir import MICRO_BATCHES

RUNNING, DONE = "running", "done"
FILE = "manifest.json"
_ARRAYS = "_CHECKPOINT_METADATA"  # Orbax's file in a folder of parameters, which contains their checksums.
_WORKDIR = "../"  # Begins the name of an output in the work directory itself.
_NO_OUTPUT = (FILE, "timing.jsonl", device_times.FILE, "speed.json", "trackers.json", identity.FILE, MICRO_BATCHES)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The inputs from which a stage's folder was produced.

    Attributes:
      stage: the stage's name.
      status: RUNNING or DONE.
      config: the values that the stage depends on, by dotted name.
      inputs: the output hash of each stage that it reads, by folder.
      files: the hash of each external file that it reads, by path.
      mesh: the mesh of the last run; results do not depend on it.
      outputs: [size in bytes, hash] of each file that the stage wrote, by its path in the folder, and [number of arrays, hash
        of their checksums] of each folder of parameters; "../NAME" is a file of the work directory itself. Empty until the
        stage is done.
    """

    stage: str
    status: str
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, str]
    mesh: dict[str, int]
    outputs: dict[str, list] = dataclasses.field(default_factory=dict)

    @property
    def output_hash(self) -> str:
        return fingerprint([self.stage, self.config, self.inputs, self.files])

    def fields(self) -> dict[str, Any]:
        """Returns the values of the config fields by dotted name, without sections."""
        return {leaf: value for name, section in self.config.items() for leaf, value in leaves_of(section, name).items()}

    def write(self, storage: Storage, folder: str = "") -> None:
        """Writes the manifest into the folder of a stage in a work directory; "": that of its first round."""
        content = dataclasses.asdict(self) | {"config_hash": fingerprint(self.config), "output_hash": self.output_hash}
        write_json(storage, f"{folder or self.stage}/{FILE}", content)


def new_manifest(stage: Stage, config: Config, inputs: Mapping[str, str]) -> Manifest:
    """The manifest of a stage that is about to start. `inputs` has the output hash of every stage that it reads, by folder.

    Raises:
      UserError: a file that the stage reads cannot be read.
    """
    return Manifest(
        stage=stage.name,
        status=RUNNING,
        config={name: schema.to_plain(schema.get(config, name)) for name in sorted(stage.config_fields)},
        inputs=dict(inputs),
        files={str(path): file_fingerprint(path, field) for path, field in sorted(stage.files(config).items())},
        mesh=schema.to_plain(config.mesh),
    )


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in a stage's folder; None if the stage was never started there. Raises UserError like `find_manifest`."""
    return find_manifest(LocalStorage(directory.parent), directory.name)


def find_manifest(storage: Storage, folder: str) -> Manifest | None:
    """The manifest in a stage's folder of a work directory; None if the stage was never started there.

    Raises:
      UserError: the file is not a manifest.
    """
    name = f"{folder}/{FILE}"
    try:
        content = read_json(storage, name)
        if content is None and storage.read(name) is None:
            return None
        manifest = Manifest(**{entry.name: content[entry.name] for entry in dataclasses.fields(Manifest)})
        for entry in dataclasses.fields(Manifest):
            value, expected = getattr(manifest, entry.name), str if entry.type == "str" else dict
            if not isinstance(value, expected):
                raise TypeError(f"{entry.name} is of type {type(value).__name__}; {expected.__name__} is expected")
        if manifest.status not in (RUNNING, DONE):
            raise ValueError(f"status is {manifest.status!r}; {RUNNING} or {DONE} is expected")
        return manifest
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{storage.path(name)} is damaged ({type(error).__name__}: {error}); restore the file, or move the "
                        f"folder {storage.path(folder)} aside to run the stage again") from None


def stage_outputs(storage: Storage, folder: str) -> dict[str, list]:
    """Returns the size and the hash of each output in a stage's folder, as in `Manifest.outputs`.

    Leaves out checkpoints and profiles, which no later stage reads, and files with clock times.
    """
    files = storage.list(folder)
    arrays = {file.removesuffix(f"/{_ARRAYS}") for file in files if file.endswith(f"/{_ARRAYS}")}
    arrays = {place for place in arrays if "checkpoints" not in place.split("/")}
    outputs = {place: _arrays_fingerprint(storage, f"{folder}/{place}/{_ARRAYS}") for place in arrays}
    for file in files:
        *folders, name = file.split("/")
        skipped = name in _NO_OUTPUT or name.startswith(".") or not {"checkpoints", "profile"}.isdisjoint(folders)
        if not skipped and not any(file.startswith(f"{place}/") for place in arrays):
            path = storage.path(f"{folder}/{file}")
            outputs[file] = [storage.size(f"{folder}/{file}"), file_fingerprint(path, "workdir")]
    return dict(sorted(outputs.items()))


def published_outputs(storage: Storage, names: Iterable[str]) -> dict[str, list]:
    """Returns the size and the hash of files in the work directory itself, as in `Manifest.outputs`.

    A missing file has [0, "missing"].
    """
    contents = {name: storage.read(name) for name in names}
    return {f"{_WORKDIR}{name}": [0, "missing"] if content is None else [len(content), hashlib.sha256(content).hexdigest()[:32]]
            for name, content in contents.items()}


def published_changes(storage: Storage, manifest: Manifest) -> list[str]:
    """Returns the names of the recorded files in the work directory itself that are missing or have changed."""
    names = [file.removeprefix(_WORKDIR) for file in manifest.outputs if file.startswith(_WORKDIR)]
    now = published_outputs(storage, names)
    return [name for name in names if now[f"{_WORKDIR}{name}"] != manifest.outputs[f"{_WORKDIR}{name}"]]


def _arrays_fingerprint(storage: Storage, file: str) -> list:
    """The number of the arrays in a folder of parameters and a hash of their checksums."""
    try:
        checksums = read_json(storage, file)["custom_metadata"]["checksums"]
        return [len(checksums), fingerprint(checksums)]
    except (ValueError, TypeError, KeyError):
        return [0, "damaged"]


def output_changes(storage: Storage, folder: str, manifest: Manifest) -> list[str]:
    """Returns the differences between the recorded outputs of a finished stage and the files in its folder.

    Leaves out the files in the work directory itself, which can be written again (`published_changes`).
    """
    now, differences = stage_outputs(storage, folder), []
    for file, recorded in manifest.outputs.items():
        if file.startswith(_WORKDIR):
            continue
        if file not in now:
            differences.append(f"its output {file} is missing")
        elif now[file] != recorded:
            differences.append(f"its output {file} has changed since the stage ended")
    return differences


def leaves_of(value: Any, name: str) -> dict[str, Any]:
    """Returns the values inside nested dicts by dotted name, or {name: value}."""
    if isinstance(value, dict):
        return {leaf: item for key, inner in value.items() for leaf, item in leaves_of(inner, f"{name}.{key}").items()}
    return {name: value}


def fingerprint(value: Any) -> str:
    """A hash of JSON values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def file_fingerprint(path: Path, field: str) -> str:
    """A hash of a file's content, or of the names and contents of the files of a folder or a TFDS data set.

    Raises:
      UserError: a file cannot be read; the message names the config field.
    """
    try:
        if is_tfds(path) or path.is_dir():
            identity, files = data_identity(path)
            return fingerprint([identity, [[file.name, file_fingerprint(file, field)] for file in files]])
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except UserError as error:
        raise UserError(str(error) if str(error).startswith("config.") else f"config.{field}: {error}") from None
    except OSError as error:
        raise UserError(f"config.{field}: {path} cannot be read ({error.strerror or error}); set it to an existing "
                        "file") from None
