"""The facts of a run that a card states: those in its manifests, summaries and config, and no others.

A card is published, so it names files and folders of the run's machine only by their last component.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.config.secrets import hide_keys
from jaxalign.tracking.judge_audit import FILE as AUDIT_FILE
from jaxalign.tracking.workdir import LEFT_OUT, MANIFEST, read_config, read_object

_HUB = re.compile(r"[\w.-]*\w/[\w.-]+")  # The name of a model on a hub, such as "org/judge-70b", which is no path.

Facts = list[tuple[str, Any]]
"""Names of facts with their values."""


@dataclasses.dataclass(frozen=True)
class StageFacts:
    """The facts of one stage.

    Attributes:
      folder: the stage's folder, relative to the work directory.
      manifest: the content of its manifest; empty if the stage never started.
      summary: its results; empty if there are none.
      left_out: the rows that did not fit, by name: {"total", "dropped", "cut"}.
    """

    folder: str
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    left_out: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """Whether the stage has finished."""
        return self.manifest.get("status") == "done"

    def value(self, name: str) -> Any:
        """The value of a config field that the stage depends on; None if its manifest has none."""
        config = self.manifest.get("config") or {}
        if name in config:
            return config[name]
        *sections, field = name.split(".")
        section: Any = config.get(".".join(sections))
        return section.get(field) if isinstance(section, Mapping) else None


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts of a run.

    Attributes:
      workdir: the work directory.
      config: the content of config.json.
    """

    workdir: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the run: the last component of its work directory."""
        return self.workdir.absolute().name

    def stage(self, folder: str) -> StageFacts:
        """The facts of a stage. Raises UserError if one of its files is damaged."""
        path = self.workdir / folder
        return StageFacts(folder, *(read_object(path / file) for file in (MANIFEST, "summary.json", LEFT_OUT)))

    def reads(self, stage: StageFacts) -> list[StageFacts]:
        """A stage and all stages that it read, directly or not, in the order of their folders in the manifests."""
        found, waiting = {stage.folder: stage}, [stage]
        while waiting:
            for folder in waiting.pop(0).manifest.get("inputs") or ():
                if folder not in found:
                    found[folder] = self.stage(folder)
                    waiting.append(found[folder])
        return list(reversed(found.values()))

    def audited(self) -> bool:
        """Whether the work directory has an audit of the judge."""
        return (self.workdir / AUDIT_FILE).is_file()


def read_facts(workdir: Path) -> RunFacts:
    """The facts of the run in a work directory. Raises UserError if its config is damaged."""
    return RunFacts(workdir, read_config(workdir))


def public_name(value: Any) -> str:
    """A value of the config for a card: a path, or a place in a file, without its folders, and no keys."""
    text = hide_keys(str(value))
    if text.startswith("~") or "/" in text or "\\" in text:
        text = text.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return text


def base_facts(stage: StageFacts) -> Facts:
    """The base model of a stage, its seed and its style."""
    source, path = stage.value("model.source"), stage.value("model.path")
    if source == "scratch":
        base = "a model that the run trained from scratch (stage pretrain)"
    else:
        base = public_name(path) if path else None
    return _known([("Base model", base), ("Seed", stage.value("seed")), ("Style of the dialogues", stage.value("data.style"))])


def judge_facts(stages: list[StageFacts]) -> Facts:
    """The constitution and the judge of the stages that asked one; a fact is stated once for each value that differs."""
    facts: Facts = []
    for stage in stages:
        if stage.value("feedback.constitution") is None:
            continue
        judge = stage.value(f"judge.{stage.folder.rpartition('/')[2]}") or stage.value("feedback.judge")
        named = [public_name(path) for path in stage.value("judge.path") or ()] if judge == "model" else []
        if judge == "endpoint":
            model = hide_keys(stage.value("endpoint.model") or "")
            named = [model if _HUB.fullmatch(model) else public_name(model)] if model else []
        if judge == "local":
            named = [stage.value("feedback.judge_stage") or "the base model of the run"]
        shown = public_name(judge) + (f" ({', '.join(named)})" if named else "")
        templates = stage.value("feedback.templates")
        facts += _known([
            (f"Constitution of {stage.folder}", public_name(stage.value("feedback.constitution"))),
            (f"Judge of {stage.folder}", shown if judge else None),
            (f"Templates of the requests of {stage.folder}", public_name(templates) if templates else None),
        ])
    return facts


def hash_rows(stages: list[StageFacts]) -> list[tuple[str, str, str]]:
    """(stage or file, kind of the hash, hash) of the stages and of the external files that they read."""
    rows, files = [], {}
    for stage in stages:
        for name in ("config_hash", "output_hash"):
            if stage.manifest.get(name):
                rows.append((f"stage {stage.folder}", name.replace("_hash", ""), stage.manifest[name]))
        files |= stage.manifest.get("files") or {}
    return rows + [(public_name(path), "content", value) for path, value in sorted(files.items())]


def evaluated(run: RunFacts, folder: str) -> Mapping[str, Any]:
    """The results of stage evaluate, if it measured the present output of a stage; otherwise empty."""
    evaluate, stage = run.stage("evaluate"), run.stage(folder)
    measured = (evaluate.manifest.get("inputs") or {}).get(folder)
    return evaluate.summary if evaluate.done and measured and measured == stage.manifest.get("output_hash") else {}


def _known(facts: Facts) -> Facts:
    return [(name, value) for name, value in facts if value is not None]
