"""What a stage is: the base class of the built-in stages and of a user's own."""

from __future__ import annotations

import abc
import dataclasses
import time
from pathlib import Path
from typing import Any

from jaxalign.config import Config
from jaxalign.parallel import hosts
from jaxalign.storage import json_bytes, write_bytes_atomically


@dataclasses.dataclass(frozen=True)
class StageContext:
    """What a stage is given to work with.

    Attributes:
      config: the whole config.
      workdir: the work directory.
      directory: the stage's own folder. It exists, and holds what an interrupted run left there.
      resumed: whether an interrupted run was here before.
      began: when the stage began, by `time.perf_counter`.
    """

    config: Config
    workdir: Path
    directory: Path
    resumed: bool
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def input_directory(self, stage: str) -> Path:
        """The folder of an earlier stage."""
        return self.workdir / stage


class Stage(abc.ABC):
    """One step of the pipeline.

    The pipeline calls `run` once, with the stage's own folder of the work directory, and writes a manifest beside what the
    stage writes. A later run skips the stage while its config fields, files and inputs are the same, and refuses to start, or
    with --overwrite runs the stage again, when one of them has changed. If `run` is interrupted, the next run calls it again
    with `context.resumed` set; it must then continue from what is in the folder, and end with the same files.

    A stage of one's own is a subclass, wrapped in a `jaxalign.registry.stages.StageRecord` and named in config.stages as
    "package.module:RECORD" or "FILE.py:RECORD". docs/extending.md has an example.

    Attributes:
      name: the name of the record, of the folder and of the config section.
      config_fields: dotted names of the config fields, or whole sections, that decide what the stage produces, and no others.
        The mesh is never among them: results do not depend on it.
      setup_files: names of files in the stage's folder that may be written before there is work to resume. A first start
        that fails with nothing else in the folder, empty files aside, leaves no folder behind.
    """

    name: str
    config_fields: tuple[str, ...] = ()
    setup_files: tuple[str, ...] = ()

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Names of the earlier stages that this one reads under `config`."""
        return ()

    def files(self, config: Config) -> dict[Path, str]:
        """Files from outside the work directory that the stage reads under `config`, and the config field that names each.

        When the content of a file changes, the stage is out of date.
        """
        return {}

    @abc.abstractmethod
    def run(self, context: StageContext) -> None:
        """Does the work, or what an interrupted run left of it. Every file is written whole, or by appending lines.

        With several processes, every process calls this. "summary.json" in the folder, if there is one, is part of what
        `pipeline.run` returns.
        """


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file in one step. With several processes the first one writes, and all return when it has."""
    hosts.once(lambda: write_bytes_atomically(path, json_bytes(content)))
