"""The base class of stages, both built-in and user-defined."""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxalign import streams
from jaxalign.config import Config, rounds
from jaxalign.parallel import hosts
from jaxalign.storage import json_bytes, write_bytes_atomically

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class StageContext:
    """The config and the folders that a stage works with.

    Attributes:
      config: the whole config.
      workdir: the work directory.
      directory: the stage's own folder. It exists, and contains the files of an interrupted run, if any.
      resumed: whether this run continues an interrupted one.
      began: when the stage began, by `time.perf_counter`.
      round: the round of the run (`config.rounds`) that the stage belongs to, counted from 1.
      inputs: the folders, relative to the work directory, of the earlier stages that are not in WORKDIR/STAGE.
      start: the folder of the policy that the stage starts from, relative to the work directory; "": that of the last stage
        before it in `config.stages` that trains a policy, or the base.
      left_out: the rows that did not fit, by their name in a sentence: {"total", "dropped", "cut"}. The stage adds to it; the
        pipeline writes it to "left_out.json".
    """

    config: Config
    workdir: Path
    directory: Path
    resumed: bool
    began: float = dataclasses.field(default_factory=time.perf_counter)
    round: int = 1
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: str = ""
    left_out: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def stream_seed(self) -> int:
        """The seed of the stage's random numbers, except those that generate or split data, which use `config.seed`."""
        return streams.round_seed(self.config.seed, self.round)

    @property
    def title(self) -> str:
        """The name of the stage in progress lines; it includes the round, if it is not the first."""
        return rounds.label(rounds.folder(self.directory.name, self.round))

    def key(self, stage: str, use: int | str = streams.STATE) -> jax.Array:
        """The PRNG key for one use of randomness in one stage. use: a number, or a name in `streams.KEYS[stage]`."""
        import jax  # Here, so that a run with nothing to compute does not import it.

        number = streams.KEYS[stage][use] if isinstance(use, str) else use
        root = jax.random.fold_in(jax.random.key(self.stream_seed), streams.number_of(stage, streams.STAGES))
        return jax.random.fold_in(root, number)

    def input_directory(self, stage: str) -> Path:
        """The folder of an earlier stage."""
        return self.workdir / self.inputs.get(stage, stage)


class Stage(abc.ABC):
    """One step of the pipeline.

    The pipeline calls `run` once, with the stage's own folder of the work directory, and writes a manifest to that folder. A
    later run skips the stage while its config fields, files and inputs are unchanged. If one of them has changed, the run
    refuses to start or, with --overwrite, runs the stage again. If `run` is interrupted, the next run calls it again with
    `context.resumed` set; it must then continue from the files in the folder, and end with the same files.

    A user-defined stage is a subclass, wrapped in a `jaxalign.registry.stages.StageRecord` and named in config.stages as
    "package.module:RECORD" or "FILE.py:RECORD". docs/extending.md has an example.

    Attributes:
      name: the name of the record, of the folder and of the config section.
      config_fields: dotted names of exactly the config fields, or whole sections, that determine the stage's results. The mesh
        is never among them: results do not depend on it.
      setup_files: names of files that the stage may write before it has work to resume. If a first start fails while the
        folder contains nothing else except empty files, the folder is removed.
      published: names of the files that `publish` writes in the work directory itself.
    """

    name: str
    config_fields: tuple[str, ...] = ()
    setup_files: tuple[str, ...] = ()
    published: tuple[str, ...] = ()

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Names of the earlier stages that this stage reads under `config`."""
        return ()

    def files(self, config: Config) -> dict[Path, str]:
        """Files from outside the work directory that the stage reads under `config`, and the config field that names each.

        When the content of a file changes, the stage is out of date.
        """
        return {}

    @abc.abstractmethod
    def run(self, context: StageContext) -> None:
        """Does the work, or the rest of it after an interruption. Files must be written atomically, or by appending lines.

        With several processes, every process calls this. `pipeline.run` returns the folder's "summary.json", if any, as part
        of its result.
        """

    def publish(self, config: Config, workdir: Path) -> None:  # noqa: B027  # Few stages publish a file.
        """Writes the files `published` from those of finished stages.

        The first process calls this after `run`, and a later run calls it again if such a file is missing or has changed.
        """


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file atomically. With several processes, the first one writes, and all return once it has written."""
    hosts.once(lambda: write_bytes_atomically(path, json_bytes(content)))
