"""What a stage is, and the manifest that makes it idempotent.

A stage owns one folder of the work directory. Its manifest records the config fields and the earlier stages' outputs
that it was run with; the folder's state follows from comparing those with what is asked for now. Outputs are
deterministic, so a stage's output hash is the hash of what it was made from: no large file is read to compute it.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import Config, schema
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.tracking.jsonl import write_atomically

RUNNING, DONE = "running", "done"


@dataclasses.dataclass(frozen=True)
class StageContext:
    """What a stage gets to work with."""

    config: Config
    workdir: Path
    directory: Path  # The stage's own; it exists, and holds what an interrupted run left there.
    resumed: bool  # An interrupted run was here before.
    began: float = dataclasses.field(default_factory=time.perf_counter)  # By that clock.

    def input_directory(self, stage: str) -> Path:
        """The folder of an earlier stage."""
        return self.workdir / stage


class Stage(abc.ABC):
    """One step of the pipeline. Its module holds an instance named STAGE.

    `config_fields` are the dotted names (fields or whole sections) that decide what the stage produces, and no others:
    when one of them changes, the stage is out of date. The mesh is never among them, as results do not depend on it.
    """

    name: str
    config_fields: tuple[str, ...]

    @abc.abstractmethod
    def inputs(self, config: Config) -> tuple[str, ...]:
        """Names of the earlier stages that this one reads under `config`."""

    def files(self, config: Config) -> dict[Path, str]:
        """Files from outside the work directory that it reads under `config`, and the config field that names each.

        When the content of one changes, the stage is out of date.
        """
        return {}

    @abc.abstractmethod
    def run(self, context: StageContext) -> None:
        """Does the work, or what an interrupted run left of it. Whatever it writes is written whole or appended."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a stage's folder was made from. `config` is by dotted name; `files` has a hash by path."""

    stage: str
    status: str
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, str]
    mesh: dict[str, int]

    @property
    def config_hash(self) -> str:
        return fingerprint(self.config)

    @property
    def output_hash(self) -> str:
        return fingerprint([self.stage, self.config, self.inputs, self.files])

    def write(self, directory: Path) -> None:
        content = dataclasses.asdict(self) | {"config_hash": self.config_hash, "output_hash": self.output_hash}
        write_json(directory / "manifest.json", content)


def new_manifest(stage: Stage, config: Config, inputs: Mapping[str, str]) -> Manifest:
    """The manifest of a stage about to start. `inputs` has the output hash of every earlier stage it reads."""
    return Manifest(
        stage=stage.name,
        status=RUNNING,
        config={name: schema.to_plain(schema.get(config, name)) for name in sorted(stage.config_fields)},
        inputs=dict(inputs),
        files={str(path): file_fingerprint(path, field) for path, field in sorted(stage.files(config).items())},
        mesh=schema.to_plain(config.mesh),
    )


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a stage's folder; None when the stage was never started there.

    Raises:
        UserError: there is a manifest, but it is not one of ours.
    """
    path = directory / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(**{entry.name: content[entry.name] for entry in dataclasses.fields(Manifest)})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); put the file back, or move the folder "
                        f"{directory} aside to have the stage redone") from None


def fingerprint(value: Any) -> str:
    """A hash of JSON values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def file_fingerprint(path: Path, field: str) -> str:
    """A hash of a file's content. Raises UserError, naming the config field, when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise UserError(f"config.{field}: {path} cannot be read ({error.strerror or error}); set it to an existing "
                        "file") from None


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file in one step. Of several processes the first one writes, and all return when it has."""
    hosts.once(lambda: write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"))
