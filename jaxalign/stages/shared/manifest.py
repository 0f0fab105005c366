"""The manifest of a stage's folder, from which the pipeline knows whether the stage is done, interrupted or out of date.

A manifest records the config fields, the files and the outputs of earlier stages that the stage was run with. Outputs are
deterministic, so a stage's output hash is the hash of its inputs; computing it reads no large output files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import Config, schema
from jaxalign.errors import UserError
from jaxalign.stages.shared.base import Stage
from jaxalign.storage import LocalStorage, Storage, read_json, write_json

RUNNING, DONE = "running", "done"
FILE = "manifest.json"
NO_RESULT = ("preference.on_failure",)
"""Fields that decide only whether a run continues after a stage: changing them leaves its results valid."""


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
    """

    stage: str
    status: str
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, str]
    mesh: dict[str, int]

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
        return Manifest(**{entry.name: content[entry.name] for entry in dataclasses.fields(Manifest)})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{storage.path(name)} is damaged ({type(error).__name__}: {error}); restore the file, or move the "
                        f"folder {storage.path(folder)} aside to run the stage again") from None


def leaves_of(value: Any, name: str) -> dict[str, Any]:
    """Returns the values inside nested dicts by dotted name, or {name: value}."""
    if isinstance(value, dict):
        return {leaf: item for key, inner in value.items() for leaf, item in leaves_of(inner, f"{name}.{key}").items()}
    return {name: value}


def fingerprint(value: Any) -> str:
    """A hash of JSON values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def file_fingerprint(path: Path, field: str) -> str:
    """A hash of a file's content. Raises UserError, which names the config field, if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise UserError(f"config.{field}: {path} cannot be read ({error.strerror or error}); set it to an existing "
                        "file") from None
