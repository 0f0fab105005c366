"""The runs of a comparison, and the differences of their settings and data."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.config import rounds
from jaxalign.config.results import decides_results
from jaxalign.config.schema import leaves
from jaxalign.errors import UserError
from jaxalign.tracking.estimates import EvaluatedModel
from jaxalign.tracking.workdir import RunFiles, read_object, read_run

MOST = 6
"""The largest number of runs: so many curves can be told apart."""

NO_RESULT = ("tracking", "compile_cache", "profile", "mesh", "placement")
"""Settings on which results do not depend, except for rounding. `ppo.sample_ahead` changes results, so it is not listed."""


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison.

    Attributes:
      name: its name on the page; unique.
      files: its files.
      answers: the rows of stage evaluate of its last model.
      manifests: the manifest of each stage by the stage's label.
    """

    name: str
    files: RunFiles
    answers: tuple[Mapping[str, Any], ...]
    manifests: Mapping[str, Mapping[str, Any]]

    @property
    def model(self) -> str:
        """The last evaluated model; "" without an evaluation."""
        return self.files.models[-1] if self.files.models else ""

    @property
    def evaluated(self) -> EvaluatedModel:
        """The last evaluated model with its answers."""
        return EvaluatedModel(self.files, self.model, self.answers)


def read_runs(workdirs: Sequence[str | Path]) -> tuple[list[ComparedRun], list[str]]:
    """(the runs that can be read, a sentence for each one that cannot).

    Raises:
      UserError: fewer than two or more than `MOST` directories are given, one of them twice, or fewer than two can be read.
    """
    if not 2 <= len(workdirs) <= MOST:
        raise UserError(f"the number of work directories is {len(workdirs)}; pass those of 2 to {MOST} runs")
    places = [Path(workdir).resolve() for workdir in workdirs]
    twice = next((place for place, others in itertools.groupby(sorted(places)) if len(list(others)) > 1), None)
    if twice is not None:
        raise UserError(f"the work directory {twice} is given twice; give each run once")
    runs, problems = [], []
    for name, workdir in zip(_names(places), workdirs, strict=True):
        try:
            runs.append(_read(name, Path(workdir)))
        except UserError as error:
            problems.append(f"{name} is left out: {error}")
        except OSError as error:
            problems.append(f"{name} is left out: {error.filename or workdir} cannot be read ({error.strerror}).")
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            problems.append(f"{name} is left out: one of its files has another form than expected "
                            f"({type(error).__name__}: {error}).")
    if len(runs) < 2:
        raise UserError(" ".join(["fewer than two of the work directories can be compared.", *problems]))
    return runs, problems


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, of equally many parts, that differ from each other."""
    ends = (["/".join(place.parts[-parts:]) for place in places] for parts in itertools.count(1))
    return next(names for names in ends if len(set(names)) == len(names))


def _read(name: str, workdir: Path) -> ComparedRun:
    files = read_run(workdir)
    last = files.models[-1] if files.models else ""
    answers = tuple(row for row in files.rows("evaluate") if row["model"] == last and isinstance(row["messages"], list))
    manifests = {}
    for path in sorted(workdir.glob("**/manifest.json")):
        place = str(path.parent.relative_to(workdir))
        if ".old-" not in place:
            manifests[rounds.label(place)] = read_object(path)
    return ComparedRun(name, files, answers, manifests)


def setting_differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The values of each setting that differs between the runs, by dotted name; "-" in a run without the field."""
    flat = [dict(leaves(run.files.config)) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    shown = {name: [json.dumps(settings[name], ensure_ascii=False) if name in settings else "-" for settings in flat]
             for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


def affects_results(name: str) -> bool:
    """Whether results can depend on a setting."""
    return name.split(".")[0] not in NO_RESULT and decides_results(name)


def file_differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The hash of each file that a stage read, by the name of the file; "-" in a run that did not read it."""
    read = [{Path(path).name: str(mark) for manifest in run.manifests.values()
             for path, mark in (manifest.get("files") or {}).items()} for run in runs]
    names = dict.fromkeys(name for files in read for name in files)
    return {name: [files.get(name, "-") for files in read] for name in names}


def output_hashes(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The output hash of each stage, which two runs share exactly if its settings, files and inputs are the same; "-" in a run
    without the stage."""
    names = dict.fromkeys(label for run in runs for label in run.files.runs if label not in ("evaluate", "report"))
    return {name: [str(run.manifests.get(name, {}).get("output_hash", "-")) for run in runs] for name in names}
