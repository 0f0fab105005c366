"""Sends what a work directory contains to trackers: the steps and attachments that they do not have yet."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import TrackingConfig
from jaxalign.errors import UserError
from jaxalign.registry.stages import STAGES
from jaxalign.registry.trackers import TRACKERS, tracker_record
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.sinks.attachments import Attachments, read_attachments, read_results
from jaxalign.tracking.sinks.base import Sink, reason
from jaxalign.tracking.workdir import read_config, read_object

_DONE = "done"


@dataclasses.dataclass(frozen=True)
class RunContent:
    """What the trackers show of one folder.

    Attributes:
      folder: the folder of a stage, or of a member of an ensemble.
      rows: the metrics of each step with the number under "step"; of a stage that does not train, one row of its results.
      attachments: those of a finished stage.
      finished: whether the stage is done.
    """

    folder: Path
    rows: list[dict[str, Any]]
    attachments: Attachments
    finished: bool


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a tracker received of one folder: the name of the run, and the numbers of steps and attachments."""

    run: str
    steps: int
    attachments: int


def read_content(folder: Path, samples: int, finished: bool) -> RunContent:
    """The content of a folder. Raises UserError if one of its files is damaged.

    Args:
      folder: the folder.
      samples: the number of rows in the table of samples.
      finished: whether its stage is done; otherwise it has neither results nor attachments.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    results = read_results(folder) if finished and not rows else {}
    attachments = read_attachments(folder, samples) if finished else Attachments()
    return RunContent(folder, rows or ([{"step": 0} | results] if results else []), attachments, finished)


def run_folders(workdir: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of a work directory that have a run, in the order of the pipeline, and whether their stage is done.

    Raises:
      UserError: a manifest is damaged.
    """
    found = {path.parent for depth in ("*", "*/*", "*/*/*") for name in ("manifest.json", "metrics.jsonl")
             for path in workdir.glob(f"{depth}/{name}")}
    order, places = list(STAGES.names()), {}
    for folder in found:
        parts = folder.relative_to(workdir).parts
        if any(".old-" in part or part in ("checkpoints", "trackers") for part in parts):
            continue
        round_number = int(parts[0].removeprefix("round-")) if parts[0].removeprefix("round-").isdecimal() else 1
        stage = parts[1] if round_number > 1 and len(parts) > 1 else parts[0]
        places[folder] = (round_number, order.index(stage) if stage in order else len(order), parts)
    for folder in sorted(places, key=places.__getitem__):
        manifest = read_object(folder / "manifest.json") or read_object(folder.parent / "manifest.json")
        yield folder, manifest.get("status") == _DONE


def send(sink: Sink, config: Mapping[str, Any], workdir: Path, content: RunContent) -> Sent:
    """Sends the steps and attachments that a tracker does not have. Errors of the tracker are raised.

    Args:
      sink: a tracker that was not started; it is started and finished.
      config: the config of the run as plain values.
      workdir: the work directory.
      content: the content of one of its folders.
    """
    place = str(content.folder.relative_to(workdir))
    sink.start({**config, "workdir": str(workdir), "directory": str(content.folder), "stage": place, "step": 0})
    status = "failed"
    try:
        first, steps = sink.next_step(), 0
        for row in content.rows:
            if row["step"] >= first:
                sink.log(row["step"], {name: value for name, value in row.items() if name != "step"})
                steps += 1
        missing = content.attachments.without(sink.attached() if content.attachments.names else set())
        if missing.names:
            sink.attach(missing, content.rows[-1]["step"] + 1 if content.rows else 0)
        status = "done" if content.finished else "interrupted"
    finally:
        sink.finish(status)
    return Sent(sink.run.name, steps, len(missing.names))


def make_sink(name: str, settings: TrackingConfig, where: str) -> Sink | None:
    """The tracker with this name; None if it is of another kind, which only training can feed.

    Raises:
      UserError: there is no such tracker. where: the field or flag with the name, for the message.
    """
    make = tracker_record(name, where).load()
    return make(settings) if isinstance(make, type) and issubclass(make, Sink) else None


def send_finished(settings: TrackingConfig, config: Mapping[str, Any], workdir: Path, folder: Path) -> None:
    """Sends the results and attachments of a stage whose work is complete to the trackers of its config.

    A failure is a warning. Nothing is sent of a stage that trained and has no attachments: its trackers have everything.

    Args:
      settings: `config.tracking`.
      config: the config of the run as plain values.
      workdir: the work directory.
      folder: the folder of the stage.
    """
    trained = (folder / "metrics.jsonl").exists()
    for name in settings.trackers:
        try:
            sink = make_sink(name, settings, "config.tracking.trackers")
            content = read_content(folder, settings.samples, True)
            if sink is not None and (content.attachments.names or (content.rows and not trained)):
                send(sink, config, workdir, content)
        except Exception as error:  # A tracker never stops a run.
            logging.getLogger("jaxalign").warning(
                f"tracker {name!r} did not receive the results of stage {folder.name} ({reason(error)}); "
                f"`python -m jaxalign.track --workdir={workdir} --to={name}` sends them later"
            )


def send_all(name: str, settings: TrackingConfig, workdir: Path) -> Iterator[Sent]:
    """Sends all of a work directory to a tracker and yields what each run received.

    Args:
      name: the name of the tracker.
      settings: the project, group and so on.
      workdir: the work directory; no other process may write to it.

    Raises:
      UserError: the work directory has no run, one of its files is damaged, the tracker is not one of the package's, or it
        fails.
    """
    config = read_config(workdir)
    contents = [read_content(folder, settings.samples, done) for folder, done in run_folders(workdir)]
    contents = [content for content in contents if content.rows or content.attachments.names]
    if not contents:
        raise UserError(f"{workdir} has no metrics or results of a run; give the --workdir of a run that has started")
    for content in contents:
        sink = make_sink(name, settings, "--to")
        if sink is None:
            raise UserError(f"--to is {name!r}, a tracker that cannot say which steps it has; one of "
                            f"{', '.join(TRACKERS.builtin)} is expected")
        try:
            yield send(sink, config, workdir, content)
        except UserError:
            raise
        except Exception as error:  # A service's library may raise anything.
            raise UserError(f"tracker {name!r} failed ({reason(error)}); correct the cause and run "
                            "the same command again: it sends what is missing") from None
