"""Judges: the records that `config.feedback.judge` and the fields `config.judge.STAGE` select from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxalign.errors import UserError
from jaxalign.registry.core import Record, Registry, load_object
from jaxalign.registry.custom import new_instance
from jaxalign.registry.declarations import declared

METHODS = ("critique", "revise", "compare", "rate")
"""The methods of `jaxalign.feedback.judge.JudgeProtocol`; a judge has at least one of them."""

STAGE_FIELDS = ("revise", "compare", "evaluate")
"""The stages for which a field of `config.judge` can select another judge than `config.feedback.judge`."""


@dataclasses.dataclass(frozen=True)
class JudgeRecord(Record):
    """A source of AI feedback.

    Attributes:
      name: its name in the config.
      make: `make(inputs: JudgeInputs) -> Judge`, or "module:attribute" of such a function, imported on first use.
        `JudgeInputs` and `Judge` are in `jaxalign.feedback.judge`.
      runs_base: it uses the run's base model on the run's devices.
      on_devices: its methods compute on the devices of all processes, so every process calls them, and an error ends the run.
        Otherwise only the first process makes the judge and calls it, and the others receive its results. Implied by
        `runs_base`.
      methods: the names of the methods of `Judge` that it has; None: unknown until a stage calls one.
    """

    name: str
    make: Callable[[Any], Any] | str
    runs_base: bool = False
    methods: tuple[str, ...] | None = None
    on_devices: bool = False

    _where = "{part} of judge {name!r}"

    @property
    def on_all_processes(self) -> bool:
        """Whether every process calls the judge."""
        return self.runs_base or self.on_devices


JUDGES = Registry("judge", JudgeRecord, lambda: declared(JudgeRecord, (
    "jaxalign.stages.shared.judges", "jaxalign.stages.shared.endpoints",
)))


def judge_record(name: str, where: str = "config.feedback.judge") -> JudgeRecord:
    """The registered record with this name, or a record for the judge at "package.module:name" or "FILE.py:name".

    The object at that location may be a record, a judge, or a judge class with a constructor without arguments.

    Args:
      name: the name or location.
      where: the field with the name, for error messages.

    Raises:
      UserError: there is no such record or object, its module cannot be imported, the object is not a judge, or the name is a
        URL.
    """
    if name.lower().startswith(("http://", "https://")):
        raise UserError(f"{where} is {name!r}, a URL; set it to 'endpoint', and config.endpoint.url to the URL of an "
                        "OpenAI-compatible server")
    if name in JUDGES or ":" not in name:
        return JUDGES.get(name, where)
    judge = load_object(name, where)
    if isinstance(judge, JudgeRecord):
        return judge
    methods = tuple(method for method in METHODS if callable(getattr(judge, method, None)))
    if not methods:
        raise UserError(f"{where} names {name!r}, which is not a judge; a class or object with some of the methods "
                        f"{', '.join(METHODS)}, or a JudgeRecord, is expected")

    def make(inputs: Any) -> Any:
        if not isinstance(judge, type):
            return judge
        return new_instance(judge, f"{where} names {name!r}, which", "name an instance or a JudgeRecord")

    return JudgeRecord(name, make, methods=methods)


def judge_field(config: Any, stage: str) -> str:
    """The dotted config field that selects the judge of a stage: "judge.STAGE" if it is set, else "feedback.judge"."""
    return f"judge.{stage}" if stage in STAGE_FIELDS and getattr(config.judge, stage) else "feedback.judge"


def judge_name(config: Any, stage: str) -> str:
    """The name or location of the judge of a stage."""
    section, field = judge_field(config, stage).split(".")
    return getattr(getattr(config, section), field)


def stage_judge(config: Any, stage: str) -> JudgeRecord:
    """The record of the judge of a stage. Raises UserError like `judge_record`."""
    return judge_record(judge_name(config, stage), f"config.{judge_field(config, stage)}")


def judge_file(config: Any, stage: str) -> Path | None:
    """The file of the judge of a stage; None if it is not named as "FILE.py:name"."""
    place = judge_name(config, stage).rpartition(":")[0]
    return Path(place).expanduser() if place.endswith(".py") else None
